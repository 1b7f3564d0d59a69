"""Where an engine's stages compute, decided before anything is started."""

from __future__ import annotations

import pytest

from qsa.actors.placement import engine_bundles, plan_engine
from qsa.config import make_config
from qsa.errors import ConfigError
from qsa.model.checkpoint.load import open_checkpoint


@pytest.fixture
def checkpoint():
    checkpoint = open_checkpoint("default")
    yield checkpoint
    checkpoint.close()


def test_stages_compute_on_the_cpu_unless_told_otherwise(checkpoint):
    config = make_config({})
    assert {stage.device for stage in plan_engine(config, checkpoint).stages} == {"cpu"}
    assert not any("GPU" in bundle for bundle in engine_bundles(config))


def test_cards_are_refused_while_a_stage_cannot_run_on_them(checkpoint):
    with pytest.raises(ConfigError, match=r"pipeline.device is cuda.*set pipeline.device to cpu"):
        plan_engine(make_config({"pipeline": {"device": "cuda"}}), checkpoint)
