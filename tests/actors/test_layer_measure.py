"""Measuring at a start: asked of the last stage where it can change something, and no failure of it is the engine's."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from tiny_models import make_tiny_model

from qsa.actors import layer_measure
from qsa.actors.layer_measure import ask_for_times, measure_layers
from qsa.actors.stage_spec import StageSpec
from qsa.config import make_config
from qsa.errors import ConfigError
from qsa.kernels.registry import SparseConfig
from qsa.model import layer_times
from qsa.model.layer_times import LayerTimes

MODEL = SimpleNamespace(num_layers=30)
TIMES = LayerTimes((1.0,) * 30, 2.5, 0.0, batch=4, context=4096, device="cpu")


class Handle:
    """A stage's actor handle. answer: what `measure_layers` returns or raises."""

    def __init__(self, answer: object) -> None:
        self._answer = answer
        self.asked: list[int] = []
        self.measure_layers = SimpleNamespace(remote=self._remote)

    def _remote(self, sparse_id: int) -> object:
        self.asked.append(sparse_id)
        return self._answer


@pytest.fixture(autouse=True)
def local_ray(monkeypatch):
    def get(calls: list[object], timeout: float) -> list[object]:
        assert 0 < timeout <= 60
        for call in calls:
            if isinstance(call, Exception):
                raise call
        return calls

    monkeypatch.setattr(layer_measure, "ray", SimpleNamespace(get=get))


def config(**pipeline: object):
    return make_config({"pipeline": {"device": "cpu", **pipeline}, "default_sparse_id": 0})


def test_the_last_stage_is_asked_and_the_others_get_ready():
    stages = [Handle(None), Handle(TIMES)]
    assert ask_for_times(stages, config(), MODEL) is TIMES
    assert [stage.asked for stage in stages] == [[0], [0]]


@pytest.mark.parametrize("pipeline", [{"num_stages": 1}, {"split": [15, 15]}, {"num_stages": 30}])
def test_nobody_is_asked_where_it_would_change_nothing(pipeline):
    stages = [Handle(TIMES)]
    assert ask_for_times(stages, config(**pipeline), MODEL) is None and stages[0].asked == []


@pytest.mark.parametrize("error", [ConfigError("the model has 2 layers"), MemoryError("no room"), TimeoutError()])
def test_a_failure_is_logged_in_a_line_and_no_more(caplog, error):
    with caplog.at_level(logging.WARNING):
        assert ask_for_times([Handle(None), Handle(error)], config(), MODEL) is None
    (record,) = caplog.records
    assert "divided as estimated" in record.getMessage() and "\n" not in record.getMessage()


def test_a_stage_measures_with_its_own_settings(tmp_path, monkeypatch):
    for name, value in dict(WARM_STEPS=1, MIN_ROUNDS=2, MAX_ROUNDS=2, MAX_STEPS=3).items():
        monkeypatch.setattr(layer_times, name, value)
    spec = StageSpec(
        stage=1, num_stages=2, first_layer=2, last_layer=4, model_path=str(make_tiny_model("llama", tmp_path)), num_chunks=0,
        max_sequences=5, max_model_len=256, sparse={0: SparseConfig(dense=True)}, dtype="float32", lanes=2,
    )  # fmt: skip
    times = measure_layers(spec, 0)
    assert len(times.layer_ms) == 4 and times.batch == 3 and times.device == "cpu"
