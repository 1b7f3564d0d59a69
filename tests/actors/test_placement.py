"""Where an engine's stages compute, decided before anything is started; and on cards, when the stages have looked at them."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.exceptions import ActorUnavailableError, NodeDiedError, ObjectLostError

from qsa.actors import placement
from qsa.actors.node_room import NodeView, why_no_node
from qsa.actors.placement import engine_bundles, plan_engine
from qsa.actors.ray_errors import is_actor_death
from qsa.config import make_config
from qsa.device import settle
from qsa.errors import BudgetError, ConfigError
from qsa.memory.budget import CardMemory
from qsa.model.checkpoint.load import open_checkpoint
from qsa.model.checkpoint.open import open_model
from qsa.model.layer_times import LayerTimes

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
H200 = 139 * GIB


@pytest.fixture
def checkpoint():
    checkpoint = open_checkpoint("default")
    yield checkpoint
    checkpoint.close()


def cards(*free_bytes: int) -> list[CardMemory]:
    return [CardMemory(str(place), "H200", free, H200) for place, free in enumerate(free_bytes)]


def test_stages_compute_on_the_cpu_unless_told_otherwise(checkpoint):
    config = make_config({})
    plan = plan_engine(config, checkpoint)
    assert {stage.device for stage in plan.stages} == {"cpu"} and {stage.prefill_chunk for stage in plan.stages} == {512}
    assert plan.memory is not None and not any("GPU" in bundle for bundle in engine_bundles(config))


def test_memory_on_cards_is_planned_when_they_are_known(checkpoint):
    config = make_config({"pipeline": {"device": "cuda"}})
    outline = plan_engine(config, checkpoint)
    assert outline.memory is None and {stage.num_chunks for stage in outline.stages} == {0}
    assert outline.summary == "2 stages on cuda: layers 0-15, layers 16-29"
    plan = plan_engine(config, checkpoint, cards(20 * GIB, 20 * GIB))
    assert plan.memory is not None and plan.memory.full_sequences == 8
    assert [stage.num_chunks for stage in plan.stages] == [part.num_chunks for part in plan.memory.stages]
    assert {stage.prefill_chunk for stage in plan.stages} == {8192} == {plan.scheduler.prefill_chunk}
    assert (plan.scheduler.busy_chunk, plan.scheduler.burst_steps) == (1536, 256)
    assert "20.0 GiB of 139.0 GiB free on H200" in plan.memory.table()
    with pytest.raises(BudgetError, match=r"stage 0 needs .* but H200 has 1\.0 GiB of 139\.0 GiB free"):
        plan_engine(config, checkpoint, cards(GIB, GIB))


@pytest.mark.parametrize(("device", "counts"), [("cpu", (19, 11)), ("cuda", (18, 12))])
def test_measured_times_decide_on_the_layers(checkpoint, device, counts):
    config = make_config({"pipeline": {"device": device}})
    times = LayerTimes((1.0,) * 30, head_ms=8.0, first_ms=0.0, batch=4, context=4096, device=device)
    where = dict(cards=cards(20 * GIB, 20 * GIB)) if device == "cuda" else dict(available=[16 * GIB])
    plan = plan_engine(config, checkpoint, times=times, **where)
    assert [(stage.first_layer, stage.last_layer) for stage in plan.stages] == [(0, counts[0]), (counts[0], 30)]
    assert plan.memory is not None and f"{counts[0]} + {counts[1]}, by measured times" in plan.memory.table()
    assert [stage.num_chunks for stage in plan.stages] == [part.num_chunks for part in plan.memory.stages]


def test_every_stage_reserves_its_share_of_a_card():
    def gpus(**pipeline) -> list[float]:
        return [bundle.get("GPU", 0.0) for bundle in engine_bundles(make_config({"pipeline": {"device": "cuda", **pipeline}}))]

    assert gpus() == [1.0, 1.0]
    assert gpus(gpus_per_stage=0.4, num_stages=3) == [0.4, 0.4, 0.4]


def test_the_first_bundle_also_holds_the_scheduler_and_who_owns_the_engine():
    config = make_config({"pipeline": {"device": "cpu", "num_stages": 3, "cpus_per_stage": 2}})
    assert engine_bundles(config) == [{"CPU": 2.25}, {"CPU": 2}, {"CPU": 2}]
    assert engine_bundles(config, 0.5) == [{"CPU": 2.75}, {"CPU": 2}, {"CPU": 2}]
    nothing = make_config({"pipeline": {"device": "cpu", "cpus_per_stage": 0}})
    assert engine_bundles(nothing) == [{"CPU": 0.25}, {"CPU": 0.01}], "a bundle is never empty"


NODES = {
    "a": NodeView("10.0.0.1", True, {"CPU": 3.0}),
    "b": NodeView("10.0.0.2", False, {"CPU": 8.0, "GPU": 1.0}),
    "c": NodeView("10.0.0.3", True, {"CPU": 1.0}),
}


@pytest.mark.parametrize(
    ("bundle", "own", "strategy", "reason"),
    [
        ({"CPU": 5.0}, "a", "PACK", None),  # its node is there, and what it reserves there is not free for others
        ({"CPU": 2.0}, "b", "PACK", None),  # its node is gone, another one has room
        ({"CPU": 2.0}, "b", "STRICT_SPREAD", "10.0.0.2 does not answer, and no other one without a stage has 2 CPU free"),
        ({"CPU": 1.0}, "b", "STRICT_SPREAD", None),
        ({"CPU": 4.0}, "b", "SPREAD", "10.0.0.2 does not answer, and no other one has 4 CPU free"),
        ({"CPU": 0.5, "GPU": 1.0}, "gone", "PACK", "its node is gone, and no other one has 0.5 CPU and 1 GPU free"),
        ({"CPU": 4.0}, None, "PACK", "its node is gone, and no other one has 4 CPU free"),
    ],
)
def test_whether_a_node_has_room_for_a_lost_stage(bundle, own, strategy, reason):
    found = why_no_node(bundle, own, ["a"], strategy, NODES)
    assert found is None if reason is None else found is not None and found.endswith(reason)


@pytest.mark.parametrize(
    ("error", "is_death"),
    [
        (ActorUnavailableError("gone", None), True),
        (ObjectLostError("00" * 28, "", ""), True),  # a chunk's hidden states, with the node that held them
        (NodeDiedError("gone"), True),
        (RuntimeError("scripted"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_lost_with_a_node_is_no_failure_of_the_request(error, is_death):
    assert is_actor_death(error) is is_death


@pytest.mark.parametrize(
    ("model", "words"),
    [({"kv_dtype": "fp8"}, r"model\.kv_dtype is fp8"), ({"quantization": "fp8"}, r"model\.quantization is fp8")],
)
def test_what_only_cards_compute_is_refused_on_the_cpu(checkpoint, model, words):
    with pytest.raises(ConfigError, match=words):
        plan_engine(make_config({"model": model, "pipeline": {"device": "cpu"}}), checkpoint)


@pytest.mark.parametrize("preset", [{}, {"kv_dtype": "fp8", "quantization": "int8"}])
def test_eight_full_sequences_of_the_reference_shape_fit_one_large_card(preset):
    path = str(ROOT / "benchmarks" / "models" / "qwen2.5-7b-shape")
    values = {"model": {"path": path, "load_format": "dummy", **preset}, "pipeline": {"num_stages": 1, "device": "cuda"}}
    config = settle(make_config(values))
    checkpoint = open_model(path, "dummy")
    memory = plan_engine(config, checkpoint, cards(H200)).memory
    assert memory is not None and memory.max_model_len == 262144 and memory.full_sequences == 8
    weights = 2 * 7.6e9 if not preset else 1.01 * 6.5e9 + 2 * 1.09e9
    assert abs(memory.stages[0].weight_bytes - weights) < 0.02 * weights
    assert memory.stages[0].total_bytes < (0.98 if not preset else 0.6) * H200


@pytest.mark.parametrize(
    ("bundles", "said"),
    [
        ([{"CPU": 0.25}, {"CPU": 0.75}, {"CPU": 0.75}], "the engine reserves 1.75 CPU; the cluster has 0.5 CPU free"),
        (
            [{"CPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}],
            "the engine reserves 2 CPU and 1 GPU; the cluster has 0.5 CPU and 0 GPU free",
        ),
    ],
)
def test_a_start_without_room_says_once_what_it_waits_for(monkeypatch, bundles, said):
    class Group:
        def __init__(self, bundles, strategy):
            self.waits = 0

        def wait(self, timeout_seconds):
            self.waits += 1
            return self.waits > 4

    monkeypatch.setattr(placement, "placement_group", Group)
    monkeypatch.setattr(placement.ray, "available_resources", lambda: {"CPU": 0.5})
    monkeypatch.setattr(placement, "QUIET_S", -1.0)
    heard: list[str] = []
    placement._reserve(bundles, "PACK", 60.0, heard.append)
    assert heard == [f"waiting for room: {said}"]
    monkeypatch.setattr(placement, "QUIET_S", 60.0)
    placement._reserve(bundles, "PACK", 60.0, heard.append)
    assert len(heard) == 1, "a moment is not worth a word"
