"""Engine on a real Ray cluster: the default model end to end, aborts, refusals, event loops, and a clean start and end."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from pathlib import Path

import pytest
import ray
from engine_helpers import actor_pid, collect, engine_actors, greedy, scripted_config, until_free, wait_until
from ray.util import state
from scripted_stage import (
    DRAG,
    NAN,
    SLOW,
    VOCAB_SIZE,
    build_cold,
    build_failing,
    build_scripted,
    build_slow,
    build_warming,
    expected_tokens,
)

from qsa.actors.engine import Engine
from qsa.config import make_config
from qsa.errors import (
    BudgetError,
    CapacityError,
    CheckpointError,
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    OverloadedError,
    RequestError,
)
from qsa.scheduler.request import FinishReason, SamplingParams

pytestmark = pytest.mark.ray

PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def scripted(ray_driver):
    with Engine.start(scripted_config(), name="test/scripted", build=build_scripted) as engine:
        yield engine


@pytest.fixture(scope="module")
def smollm(ray_driver):
    progress = []
    config = make_config({"model": {"max_model_len": 2048}, "pipeline": {"threads_per_stage": 1, "cpus_per_stage": 0.2}})
    with Engine.start(config, name="test/smollm", on_progress=progress.append) as engine:
        assert progress[-1] == "ready" and "2 stages" in " ".join(progress)
        yield engine


# the default model


def test_the_default_model_answers_and_gives_everything_back(smollm):
    async def scenario():
        stats = await until_free(smollm)
        assert stats.scheduler.steps == 0 and {(s.steps, s.tokens) for s in stats.stages} == {(0, 0)}, "warm-up counts nothing"
        prompt = smollm.tokenizer.encode(PROMPT, parse_special=True)
        sampling = SamplingParams(temperature=0.0, max_tokens=40)
        tokens, last = await collect(smollm, prompt, sampling)
        assert smollm.tokenizer.decode(tokens).startswith("The capital of France is Paris.")
        assert last.finish_reason is FinishReason.STOP and last.prompt_len == len(prompt) and last.attended_share == 1.0
        stats = await until_free(smollm)
        assert stats.stages[0].layers[1] == stats.stages[1].layers[0] and all(s.busy_s > 0 for s in stats.stages)
        assert stats.scheduler.generated_tokens == len(tokens) + 1  # and the token that ended it

    asyncio.run(scenario())


def test_eight_at_once_get_what_each_gets_alone(smollm):
    questions = [f"<|im_start|>user\nCount from {i} to twenty.<|im_end|>\n<|im_start|>assistant\n" for i in range(8)]
    prompts = [smollm.tokenizer.encode(question, parse_special=True) for question in questions]
    samplings = [SamplingParams(temperature=0.8, top_p=0.9, seed=i, max_tokens=12, ignore_eos=True) for i in range(8)]

    async def scenario():
        alone = [(await collect(smollm, *pair))[0] for pair in zip(prompts, samplings, strict=True)]
        together = await asyncio.gather(*(collect(smollm, *pair) for pair in zip(prompts, samplings, strict=True)))
        assert [tokens for tokens, _ in together] == alone
        await until_free(smollm)

    asyncio.run(scenario())


def test_a_long_prompt_reports_progress(smollm):
    async def scenario():
        seen = [o.computed_len async for o in smollm.generate([50] * 1300, greedy(2))]
        assert seen[0] == 0 and seen[-1] == 1300 and {512, 1024} <= set(seen) and seen == sorted(seen)

    asyncio.run(scenario())


# requests


def test_scripted_tokens_come_through_both_stages(scripted):
    async def scenario():
        prompt = [300, 301] * 90
        tokens, last = await collect(scripted, prompt, greedy(25))
        assert tokens == expected_tokens(prompt, 25) and last.finish_reason is FinishReason.LENGTH

    asyncio.run(scenario())


@pytest.mark.parametrize("state", ["queued", "prefill", "decode"])
def test_leaving_the_iterator_frees_both_stages(scripted, state):
    async def scenario():
        before = (await until_free(scripted)).scheduler
        others = []
        if state == "queued":
            others = [asyncio.create_task(collect(scripted, [DRAG], greedy(100))) for _ in range(4)]
            await asyncio.sleep(0.1)
        prompt = [SLOW, *[9] * 2500] if state == "prefill" else [DRAG]
        outputs = scripted.generate(prompt, greedy(90 if state == "prefill" else 900))
        if state == "queued":
            waiting = asyncio.create_task(anext(outputs))
            await asyncio.sleep(0.1)
            assert (await scripted.stats()).scheduler.num_waiting >= 1
            waiting.cancel()  # a cancelled task leaves the iterator too
            with pytest.raises(asyncio.CancelledError):
                await waiting
        else:
            async for output in outputs:
                if output.tokens or (state == "prefill" and output.computed_len):
                    break
            steps = (await scripted.stats()).scheduler.steps
            await outputs.aclose()
        await asyncio.gather(*others)
        after = (await until_free(scripted)).scheduler
        assert after.aborted == before.aborted + 1
        if state != "queued":
            assert after.steps < steps + 60, "it went on computing"

    asyncio.run(scenario())


def test_abort_by_id_ends_the_iterator(scripted):
    async def scenario():
        reading = asyncio.create_task(collect(scripted, [DRAG], greedy(3000), request_id="mine"))
        await asyncio.sleep(0.2)
        await scripted.abort("mine")
        _, last = await asyncio.wait_for(reading, 10)
        assert last.finish_reason is FinishReason.ABORT
        await scripted.abort("mine")
        await until_free(scripted)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("prompt", "sampling", "sparse_id", "error", "param"),
    [
        ([], greedy(4), None, RequestError, "prompt"),
        ([VOCAB_SIZE], greedy(4), None, RequestError, "prompt"),
        (["a"], greedy(4), None, RequestError, "prompt"),
        ([[1, 2]], greedy(4), None, RequestError, "prompt"),
        ([1.5], greedy(4), None, RequestError, "prompt"),
        (["7"], greedy(4), None, RequestError, "prompt"),
        ([1 << 63], greedy(4), None, RequestError, "prompt"),
        ([5], None, None, RequestError, "sampling"),
        ([5], greedy(0), None, RequestError, "max_tokens"),
        ([5], greedy(4, logit_bias=((VOCAB_SIZE, 1.0),)), None, RequestError, "logit_bias"),
        ([5], greedy(4), 99, RequestError, "sparse_id"),
        ([5] * 4000, greedy(97), None, ContextLengthError, "max_tokens"),
        ([5] * 3000, greedy(900), None, CapacityError, "max_tokens"),  # 153 chunks on stage 0, which has 128
    ],
)
def test_a_wrong_request_raises_its_own_error_at_the_first_step(scripted, prompt, sampling, sparse_id, error, param):
    async def scenario():
        with pytest.raises(error) as raised:
            await anext(scripted.generate(prompt, sampling, sparse_id=sparse_id))
        assert raised.value.param == param and "\n" not in str(raised.value)
        await until_free(scripted)

    asyncio.run(scenario())


def test_nan_hurts_no_neighbour(scripted):
    async def scenario():
        good = [asyncio.create_task(collect(scripted, [20 + i], greedy(60))) for i in range(2)]
        _, last = await collect(scripted, [NAN], greedy(5))
        assert last.finish_reason is FinishReason.ERROR and last.error
        for i, task in enumerate(good):
            assert (await task)[0] == expected_tokens([20 + i], 60)

    asyncio.run(scenario())


def test_more_requests_than_may_wait_are_refused_as_busy(scripted):
    async def scenario():
        tasks = [asyncio.create_task(collect(scripted, [SLOW, i], greedy(10))) for i in range(12)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        busy = [r for r in results if isinstance(r, OverloadedError)]
        assert len(busy) == 4 and all(error.retry_after_s > 0 for error in busy)
        assert all(r[0] == expected_tokens([SLOW, i], 10) for i, r in enumerate(results) if isinstance(r, tuple))
        await until_free(scripted)

    asyncio.run(scenario())


def test_several_event_loops_share_an_engine(scripted):
    results = {}

    def work(i):
        results[i] = asyncio.run(collect(scripted, [500 + i], greedy(20)))[0]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert results == {i: expected_tokens([500 + i], 20) for i in range(4)}


def test_health_is_green_and_quick_while_a_step_runs(scripted):
    async def scenario():
        reading = asyncio.create_task(collect(scripted, [SLOW, 8], greedy(1)))
        for _ in range(10):
            began = time.monotonic()
            health = await scripted.health()
            assert health.ok and health.reason is None and health.heartbeat_age_s < 5 and time.monotonic() - began < 5
        await reading

    asyncio.run(scenario())


def test_actors_have_telling_names_and_reprs(scripted):
    assert {f"qsa/test/scripted/{actor}" for actor in ("scheduler", "stage0", "stage1")} <= engine_actors()
    found = {a.name: a.repr_name for a in state.list_actors(filters=[("state", "=", "ALIVE")], detail=True)}
    assert found["qsa/test/scripted/stage0"] == "Stage0(layers 0 to 16, cpu)"
    assert found["qsa/test/scripted/scheduler"] == "Scheduler(2 stages, 2 lanes)"


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_the_scheduler_starts_without_torch(scripted):
    """It would take its process three times as long to start, and to start again."""
    loaded = {
        actor: Path(f"/proc/{actor_pid(f'qsa/test/scripted/{actor}')}/maps").read_text() for actor in ("scheduler", "stage0")
    }
    assert "libtorch" in loaded["stage0"] and "libtorch" not in loaded["scheduler"]


# start and end


@pytest.mark.parametrize(
    ("settings", "build", "error", "words"),
    [
        ({}, build_failing, CheckpointError, "blk.7.attn_q.weight"),
        ({"model": {"path": "/nowhere/model.gguf"}}, build_scripted, CheckpointError, "/nowhere/model.gguf"),
        ({"cache": {"device_bytes": 1 << 50}}, build_scripted, BudgetError, "cache.device_bytes"),
        ({"pipeline": {"cpus_per_stage": 500, "start_timeout_s": 0.5}}, build_scripted, ConfigError, "reserves 1000"),
        ({"model": {"max_model_len": 10**6}}, build_scripted, ConfigError, "max_model_len"),
    ],
    ids=["weights", "path", "budget", "resources", "length"],
)
def test_a_start_that_fails_says_why_and_leaves_nothing(ray_driver, settings, build, error, words):
    before = engine_actors()
    with pytest.raises(error, match=words) as raised:
        Engine.start(scripted_config(**settings), build=build)
    assert type(raised.value) is error and "\n" not in str(raised.value), "the error itself, without Ray's traceback"
    wait_until(lambda: engine_actors() == before)
    assert {group.state for group in state.list_placement_groups()} <= {"REMOVED", "CREATED"}


def test_a_warm_up_is_followed_and_counts_nothing(ray_driver):
    seen = []
    with Engine.start(scripted_config(), build=build_warming, on_progress=seen.append) as engine:
        assert [start.num_graphs for start in engine.starts] == [3, 3]
        steps = [line for line in seen if line.startswith("warming up")]
        assert any(line.endswith("/10: kernel 2") for line in steps), steps  # four of each stage, and two of the whole
        assert steps[-3:] == [
            "warming up 8/10: a first step through all stages", "warming up 9/10: first requests", "warming up 10/10",
        ]  # fmt: skip
        assert seen[-1] == "ready"
        stats = asyncio.run(engine.stats())
        assert (stats.scheduler.added, stats.scheduler.steps, [s.steps for s in stats.stages]) == (0, 0, [0, 0])
        assert asyncio.run(collect(engine, [3], greedy(2)))[0] == expected_tokens([3], 2)


def test_an_engine_that_was_not_warmed_up_refuses_until_it_is(ray_driver):
    with Engine.start(scripted_config(), build=build_scripted, warm_up=False) as engine:
        with pytest.raises(EngineDeadError, match="starting"):
            asyncio.run(collect(engine, [3], greedy(2)))
        sent = []
        engine.warm_up(first_requests=lambda: sent.append(asyncio.run(collect(engine, [5], greedy(2)))[0]))
        assert sent == [expected_tokens([5], 2)], "first requests go the way that was given"
        assert asyncio.run(collect(engine, [3], greedy(2)))[0] == expected_tokens([3], 2)


def test_a_warm_up_that_fails_says_why_and_leaves_nothing(ray_driver):
    before = engine_actors()
    with pytest.raises(BudgetError, match=r"cache\.device_bytes"):
        Engine.start(scripted_config(), build=build_cold)
    wait_until(lambda: engine_actors() == before)


def test_a_warm_up_that_stands_still_is_given_up(ray_driver):
    before = engine_actors()
    engine = Engine.start(scripted_config(), build=build_slow, warm_up=False)
    engine.config = scripted_config(
        pipeline={"start_timeout_s": 3.0}
    )  # too short for the processes' own start, on a busy machine
    with pytest.raises(EngineDeadError, match=r"stood still for 3 s.*0/10: kernel 0.*start_tim"):
        engine.warm_up()
    wait_until(lambda: engine_actors() == before)


def test_a_name_that_is_taken_is_refused(scripted):
    with pytest.raises(ConfigError, match="test/scripted"):
        Engine.start(scripted_config(), name="test/scripted", build=build_scripted)
    assert asyncio.run(collect(scripted, [3], greedy(2)))[0] == expected_tokens([3], 2), "the other one lives on"


@pytest.fixture(scope="module")
def three_stages(ray_driver):
    with Engine.start(scripted_config(pipeline={"num_stages": 3}), name="test/closing", build=build_scripted) as engine:
        yield engine


def test_three_stages_say_the_same_as_two(three_stages):
    tokens, _ = asyncio.run(collect(three_stages, [33] * 70, greedy(12)))
    assert tokens == expected_tokens([33] * 70, 12)
    assert [stage.layers for stage in asyncio.run(three_stages.stats()).stages] == [(0, 11), (11, 22), (22, 30)]


def test_close_ends_open_requests_and_all_actors(three_stages):
    engine = three_stages  # its last test
    free = ray.available_resources()["CPU"]

    async def scenario():
        reading = asyncio.create_task(collect(engine, [DRAG], greedy(2000)))
        await asyncio.sleep(0.3)
        engine.close()
        engine.close()
        with pytest.raises(EngineDeadError, match="closed"):
            await asyncio.wait_for(reading, 10)
        with pytest.raises(EngineDeadError, match="closed"):
            await collect(engine, [1], greedy(1))
        with pytest.raises(EngineDeadError, match="closed"):
            await engine.stats()
        health = await engine.health()
        assert not health.ok and "closed" in health.reason
        await engine.abort("anything")

    asyncio.run(scenario())
    wait_until(lambda: not any("closing" in name for name in engine_actors()))
    wait_until(lambda: ray.available_resources()["CPU"] > free + 0.5)
