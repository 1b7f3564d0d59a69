"""What a layer, head and embedding cost is told apart, whatever the layers' kinds; nothing is left behind. No timing."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_models import TinyModel, make_tiny_model

from qsa.errors import ConfigError
from qsa.kernels.registry import SparseConfig
from qsa.model import layer_times
from qsa.model.checkpoint.load import open_checkpoint
from qsa.model.checkpoint.open import open_model
from qsa.model.layer_times import measure_layer_times

SMALL = dict(window_size=32, sink_size=8, block_size_coarse=32, block_size_fine=16, top_k_fine=1, summary="sketch")


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch):
    for name, value in dict(WARM_STEPS=1, MIN_ROUNDS=2, MAX_ROUNDS=2, MAX_STEPS=3).items():
        monkeypatch.setattr(layer_times, name, value)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    options = dict(max_position_embeddings=512, num_hidden_layers=6)
    checkpoint = open_checkpoint(str(make_tiny_model(TinyModel("llama", options=options), tmp_path_factory.mktemp("tiny"))))
    yield checkpoint
    checkpoint.close()


class Clock:
    """Steps that take what their layers should, without running any. Stands in for `_Stage`."""

    closed = 0
    head, first, fixed = 7.0, 0.5, 3.0

    def __init__(self, model, layers, num_kinds, batch, context) -> None:
        self.model, self.layers, self.kinds = model, layers, range(num_kinds)

    def step_ms(self, kind: int) -> float:
        begin, end = self.layers
        config, num_layers = self.model.attention.sparse[kind], self.model.spec.num_layers
        layers = sum(self.layer(config, layer) for layer in range(begin, end))
        return self.fixed + layers + self.first * (begin == 0) + self.head * (end == num_layers)

    @staticmethod
    def layer(config: SparseConfig, layer: int) -> float:
        return 1.0 if config.dense else 1.0 + 0.1 * config.pool_size(layer) + 2.0 / config.scan_interval(layer)

    def close(self) -> None:
        Clock.closed += 1
        self.model.close()


@pytest.mark.parametrize(
    "config",
    [
        SparseConfig(dense=True),
        SparseConfig(**SMALL),
        SparseConfig(**SMALL, reselect_every=16),
        SparseConfig(**SMALL, reselect_every=(2, 16, 1, 16, 2, 16), candidate_factor=(4, 2, 4, 2, 4, 2)),
        SparseConfig(**SMALL, reselect_every=(2, 16, 1, 16, 2, 16), rerank="none"),
    ],
    ids=["dense", "every step", "seldom", "mixed", "no rerank"],
)
@pytest.mark.parametrize("num_layers", [3, 4, 6])
def test_layers_head_and_embedding_are_told_apart(tmp_path, monkeypatch, config, num_layers):
    path = make_tiny_model(TinyModel("llama", options=dict(num_hidden_layers=num_layers)), tmp_path)
    monkeypatch.setattr(layer_times, "_Stage", Clock)
    monkeypatch.setattr(Clock, "closed", 0)
    if isinstance(config.reselect_every, tuple):
        cut = {name: getattr(config, name) for name in ("reselect_every", "candidate_factor")}
        cut = {name: value[:num_layers] if isinstance(value, tuple) else value for name, value in cut.items()}
        config = SparseConfig(**{**vars(config), **cut})
    checkpoint = open_checkpoint(str(path))
    times = measure_layer_times(checkpoint, batch=2, sparse=config, max_model_len=256)
    checkpoint.close()
    assert times.layer_ms == pytest.approx([Clock.layer(config, layer) for layer in range(num_layers)])
    assert (times.head_ms, times.first_ms, times.step_ms) == pytest.approx((Clock.head, Clock.first, Clock.fixed))
    assert times.spread == pytest.approx(0) and times.batch == 2 and times.device == "cpu"
    assert Clock.closed == (3 if num_layers == 3 else 4) + (num_layers == 3)


@pytest.mark.parametrize(
    "config",
    [
        SparseConfig(dense=True),
        SparseConfig(**SMALL, reselect_every=(1, 16, 16, 2, 16, 16), candidate_factor=(3, 2, 2, 3, 2, 2)),
    ],
    ids=["dense", "sparse"],
)
@pytest.mark.parametrize("options", [{}, {"dtype": "float32"}, {"quantization": "int8"}], ids=str)
def test_real_layers_are_measured(tiny, config, options):
    threads = torch.get_num_threads()
    more = not options  # once: threads wait for each other, which is slow where others need the cores
    times = measure_layer_times(tiny, batch=2, sparse=config, max_model_len=512, num_threads=threads + more, **options)
    assert len(times.layer_ms) == 6 and all(map(math.isfinite, (*times.layer_ms, times.head_ms, times.first_ms, times.spread)))
    assert times.batch == 2 and times.context < 512
    assert torch.get_num_threads() == threads


def test_random_weights_are_measured_like_others(tmp_path):
    path = make_tiny_model("qwen3", tmp_path)
    (path / "model.safetensors").unlink()
    checkpoint = open_model(str(path), "dummy")
    times = measure_layer_times(checkpoint, batch=1, sparse=SparseConfig(**{**SMALL, "summary": "code"}), max_model_len=256)
    assert len(times.layer_ms) == 4
    checkpoint.close()


def test_what_cannot_be_measured_is_said(tiny, tmp_path):
    with pytest.raises(ConfigError, match=r"measuring takes \d+ tokens, but model\.max_model_len is 6"):
        measure_layer_times(tiny, batch=1, sparse=SparseConfig(dense=True), max_model_len=6)
    small = open_checkpoint(str(make_tiny_model(TinyModel("llama", options=dict(num_hidden_layers=2)), tmp_path)))
    with pytest.raises(ConfigError, match="has 2 layers"):
        measure_layer_times(small, batch=1, sparse=SparseConfig(dense=True), max_model_len=256)
    small.close()


def test_stages_are_closed_when_measuring_fails(tiny, monkeypatch):
    monkeypatch.setattr(Clock, "closed", 0)
    monkeypatch.setattr(Clock, "step_ms", lambda self, kind: 1 / 0)
    monkeypatch.setattr(layer_times, "_Stage", Clock)
    with pytest.raises(ZeroDivisionError):
        measure_layer_times(tiny, batch=1, sparse=SparseConfig(dense=True), max_model_len=256)
    assert Clock.closed == 4


def test_operators_of_cards_are_measured_like_others(tmp_path):
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    path = make_tiny_model(TinyModel("qwen3", options=dict(head_dim=64, num_hidden_layers=3)), tmp_path)
    checkpoint = open_checkpoint(str(path))
    config = SparseConfig(**SMALL, prefill_tile=16, reselect_every=(1, 8, 8))
    times = measure_layer_times(
        checkpoint, batch=1, sparse=config, max_model_len=160, dtype="float32", backend="triton", device=device
    )  # fmt: skip
    assert len(times.layer_ms) == 3 and times.device == device
    checkpoint.close()
