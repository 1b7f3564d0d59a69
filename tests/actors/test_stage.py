"""StageActor in-process: slots turn over in plan order, hidden states travel, rows are sampled, failures stay local."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from fakes import wait_until
from scripted_stage import NAN, RAISE_LAST, build_scripted, build_warming, expected_tokens, next_token

from qsa.actors.stage import StageActor
from qsa.actors.stage_spec import StageSpec
from qsa.errors import ConfigError, OutOfChunksError, StageLostError
from qsa.kernels.registry import SparseConfig
from qsa.scheduler.plan import SequenceStep, StepPlan, StepResult
from qsa.scheduler.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def make_spec(stage: int, num_stages: int = 2, num_chunks: int = 64) -> StageSpec:
    return StageSpec(
        stage=stage,
        num_stages=num_stages,
        first_layer=3 * stage,
        last_layer=3 * stage + 3,
        model_path="scripted",
        num_chunks=num_chunks,
        max_sequences=4,
        max_model_len=4096,
        sparse={0: SparseConfig(dense=True), 1: SparseConfig()},
    )


@pytest.fixture
def stages():
    actors = [StageActor(make_spec(stage), build_scripted) for stage in (0, 1)]
    for actor in actors:
        actor.load()
        actor.open_link(1, "object_store", b"")
    yield actors
    for actor in actors:
        actor.close()


def run(stages, plan: StepPlan) -> StepResult:
    data, message = plan.to_bytes(), None
    for stage in stages:
        message = stage.forward(data, message)
    assert isinstance(message, StepResult)
    return message


def prefill(request_id, slot, tokens, start=0, sampling=GREEDY):
    return SequenceStep(request_id, slot, start, tuple(tokens), is_prefill=True, sampling=sampling)


def test_prefill_and_decode_give_the_scripted_tokens(stages):
    prompt = [11, 12, 13]
    result = run(stages, StepPlan(0, 0, 0, (prefill("a", 2, prompt),), open_slots=((2, 1),)))
    first = result.results[0].token.token_id
    decode = SequenceStep("a", 2, 3, (first,), is_prefill=False, sampling=GREEDY)
    second = run(stages, StepPlan(0, 1, 0, (decode,))).results[0].token.token_id
    assert [first, second] == expected_tokens(prompt, 2)


def test_a_chunk_without_sampling_gives_no_token_and_counts_as_work(stages):
    result = run(stages, StepPlan(0, 0, 0, (prefill("a", 0, range(10, 74), sampling=None),), open_slots=((0, 1),)))
    assert [(entry.token, entry.error) for entry in result.results] == [(None, None)]
    assert len(result.compute_ms) == 2 and {s.request_id for s in result.selection} == {"a"}
    assert len(result.selection) == 2  # one a stage
    stats = stages[1].stats()
    assert (stats.steps, stats.tokens, stats.layers, stats.pool.num_sequences) == (1, 64, (3, 6), 1)
    stages[1].reset_stats()
    assert (stages[1].stats().steps, stages[1].stats().tokens, stages[1].stats().busy_s) == (0, 0, 0.0)


def test_a_released_slot_gives_its_chunks_back_and_can_be_opened_again(stages):
    whole = 64
    run(stages, StepPlan(0, 0, 0, (prefill("a", 0, range(10, 20)),), open_slots=((0, 1),)))
    held = whole - stages[0].stats().pool.num_free
    assert held == 6  # a page and a summary chunk in each of three layers
    for stage in stages:
        stage.release(0, (0, 3))  # slot 3 was never opened
    assert stages[0].stats().pool.num_free == stages[1].stats().pool.num_free == whole
    run(stages, StepPlan(0, 1, 0, (prefill("b", 0, range(30, 40)),), open_slots=((0, 1),)))
    assert stages[0].stats().pool.num_free == stages[1].stats().pool.num_free == whole - held


def test_sent_bytes_count_from_ready_and_go_on_with_another_link(stages):
    def send(step):
        run(stages, StepPlan(0, step, 0, (prefill("a", 0, [21] * 10),), open_slots=((0, 1),)))
        stages[0].release(0, (0,))
        stages[1].release(0, (0,))

    send(0)
    one = stages[0].stats().sent_bytes
    assert one > 0
    stages[0].reset_stats()
    assert stages[0].stats().sent_bytes == 0
    send(1)
    assert stages[0].stats().sent_bytes == one
    for stage in stages:
        stage.reset(0)
        assert stage.stats().sent_bytes == (one if stage is stages[0] else 0)
        stage.open_link(2, "object_store", b"")
    send(2)
    assert stages[0].stats().sent_bytes == 2 * one


def test_plans_and_releases_of_an_older_epoch_are_late(stages):
    first = StepPlan(3, 0, 0, (prefill("a", 0, [41]),), open_slots=((0, 1),))
    run(stages, first)
    with pytest.raises(RuntimeError, match="epoch 2 came late"):
        run(stages, StepPlan(2, 9, 0, (prefill("b", 1, [41]),), open_slots=((1, 1),)))
    for stage in stages:
        stage.release(2, (0,))
        assert stage.stats().pool.num_free < 64
        stage.reset(4)
        assert stage.stats().pool.num_free == 64
    with pytest.raises(RuntimeError, match="came late"):
        stages[0].forward(first.to_bytes(), None)


def test_nan_in_one_row_is_that_rows_error_alone(stages):
    items = (prefill("good", 0, [21, 22]), prefill("bad", 1, [21, NAN]), prefill("fine", 2, [31]))
    result = run(stages, StepPlan(0, 0, 0, items, open_slots=((0, 1), (1, 1), (2, 0))))
    good, bad, fine = result.results
    assert good.token.token_id == next_token(22, 1) and fine.token.token_id == next_token(31, 0)
    assert bad.token is None and "logit" in bad.error.lower()


def test_a_failed_step_leaves_the_stage_usable(stages):
    bad = StepPlan(0, 0, 0, (prefill("a", 0, [RAISE_LAST]),), open_slots=((0, 1),))
    with pytest.raises(RuntimeError, match="scripted failure"):
        run(stages, bad)
    assert stages[1].ping().running_s == 0.0
    for stage in stages:
        stage.release(0, (0,))
    result = run(stages, StepPlan(0, 1, 0, (prefill("b", 0, [41]),), open_slots=((0, 0),)))
    assert result.results[0].token.token_id == next_token(41, 0)


def test_a_pool_that_is_too_small_is_named():
    actor = StageActor(make_spec(0, num_chunks=5), build_scripted)
    actor.load()
    with pytest.raises(OutOfChunksError, match="5"):
        actor.forward(StepPlan(0, 0, 0, (prefill("a", 0, [1]),), open_slots=((0, 1),)).to_bytes(), None)
    actor.close()
    actor.close()
    with pytest.raises(StageLostError, match="closed"):
        actor.stats()


def test_the_pool_can_be_sized_when_the_stage_is_loaded():
    actor = StageActor(make_spec(0, num_chunks=0), build_scripted)
    assert actor.load(48).num_chunks == 48 == actor.stats().pool.num_chunks
    actor.close()


def test_a_warm_up_tells_how_far_it_is_and_what_computes():
    actor = StageActor(make_spec(1), build_warming)
    actor.load()
    assert str(actor.progress()) == "warming up 0/0"
    seen: list[str] = []
    thread = threading.Thread(target=lambda: seen.append(str(actor.warm_up())))
    thread.start()
    wait_until(lambda: actor.progress().done == 2)
    assert str(actor.progress()) == "warming up 2/4: kernel 2"
    thread.join()
    assert seen[0].startswith("stage 1: layers 3 to 5 on cpu, backend scripted, attention scripted_decode, scripted_prefill;")
    assert "3 graphs captured, warm after 0." in seen[0]
    actor.close()


def test_a_model_without_a_warm_up_is_warm():
    actor = StageActor(make_spec(0), build_scripted)
    actor.load()
    start = actor.warm_up()
    assert (start.num_graphs, start.backend, start.layers) == (0, "torch", (0, 3)) and actor.progress().total == 0
    actor.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_a_card_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"pipeline\.device is cuda, but where stage 0 runs .*; set pipeline\.device to cpu"):
        StageActor(make_spec(0)).look_at_card()


def test_repr_tells_layers_and_device():
    assert repr(StageActor(make_spec(1), build_scripted)) == "Stage1(layers 3 to 5, cpu)"


def test_the_scheduler_process_needs_no_torch():
    """It imports the scheduler actor, and through the handles it is given, the stage actor."""
    code = "import sys, qsa.actors.scheduler_actor, qsa.actors.stage; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_late_figures_of_a_slots_last_sequence_are_not_the_next_ones():
    """On a card the figures of a sequence's last step may come when its slot has been released, and another's steps run."""
    stage = StageActor(make_spec(0, num_stages=1), build_scripted)
    stage.load()
    steps = stage._steps
    run([stage], StepPlan(0, 0, 0, (prefill("old", 0, [5] * 900),), ((0, 1),)))
    stage.release(0, (0,))
    steps._device = SimpleNamespace(type="cuda")  # `selection` knows what `note_selection` was told, as on a card
    late = SimpleNamespace(slot=0, attended=450.0, context=900.0, num_selected=4, newly_hit=1, margin=0.5)
    steps.model.attention.take_stats = lambda: [late]
    steps.note_selection()
    del steps.model.attention.take_stats
    opened = StepPlan(0, 1, 0, (prefill("new", 0, [5] * 7),), ((0, 1),))
    steps.compute(opened, None)
    steps.note_selection()
    assert [s.context for s in steps.selection(opened)] == [7.0]
    stage.close()
