"""SchedulerActor in-process over scripted stages: the step loop, leases, and what one failure may touch."""

from __future__ import annotations

import asyncio
import gc
import time
from pathlib import Path

import pytest
from scheduler_harness import Harness
from scripted_stage import DRAG, NAN, RAISE_0, RAISE_LAST, SLOW, VOCAB_SIZE, expected_tokens

from qsa.errors import OverloadedError, RequestError
from qsa.scheduler.request import FinishReason


def run(scenario, **settings):
    async def main():
        async with Harness(**settings) as harness:
            await scenario(harness)

    asyncio.run(main())


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_many_requests_each_get_their_own_tokens_and_nothing_stays(num_stages):
    prompts = {f"r{i}": [100 + i] * (1 + 37 * i) for i in range(10)}

    async def scenario(h):
        for name, prompt in prompts.items():
            await h.submit(name, prompt, max_tokens=9)
        await h.until(lambda: len(h.ends) == len(prompts))
        assert h.tokens == {name: expected_tokens(prompt, 9) for name, prompt in prompts.items()}
        assert set(h.ends.values()) == {(FinishReason.LENGTH, None)}
        assert await h.all_free()
        await h.until(lambda: h.actor._pipeline.is_quiet)  # the call that released the last slot may be on its way back
        assert not h.actor._desk.num_open

    run(scenario, num_stages=num_stages)


@pytest.mark.slow
def test_ten_thousand_requests_leave_no_trace():
    def resident_bytes():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    async def scenario(h):
        after = {}
        for count in range(10_000):
            await h.submit(f"r{count}", [100 + count % 1000], max_tokens=1)
            await h.until(lambda count=count: len(h.ends) > count - 8)
            if count in (2000, 9999):
                gc.collect()
                after[count] = resident_bytes()
        await h.until(lambda: len(h.ends) == 10_000)
        assert after[9999] - after[2000] < 8000 * 1000  # what this test itself keeps of a request, and no more
        assert await h.all_free() and not h.actor._desk.num_open and h.actor._pipeline.is_quiet
        assert h.actor._desk.num_clients == 1

    run(scenario)


def test_what_stages_run_beside_each_other():
    """Bursts on all stages at once, and between two of them a chunk of a prompt on each."""

    async def scenario(h):
        for name in ("a", "b"):
            await h.submit(name, [DRAG], max_tokens=60)
        await h.until(lambda: len(h.tokens.get("b", ())) > 2)
        for stage in h.stages:
            stage.calls.clear()
        await h.submit("long", [82] * 64 * 5, max_tokens=4)
        await h.until(lambda: "long" in h.tokens and len(h.ends) == 3)
        first, second = (stage.calls for stage in h.stages)
        assert first.count("forward") == second.count("forward") == 5
        assert "forward,forward" not in ",".join(first) and "forward,forward" not in ",".join(second)
        assert first.index("forward") < second.index("forward")  # it came one burst later to the second stage
        assert h.tokens["long"] == expected_tokens([82] * 64 * 5, 4)

    run(scenario)


@pytest.mark.parametrize("transport", ["object_store", "p2p"])
def test_requests_of_all_kinds_under_every_transport(transport):
    prompts = {f"r{i}": [100 + i] * (1 + 90 * i) for i in range(6)}

    async def scenario(h):
        for name, prompt in prompts.items():
            await h.submit(name, prompt, max_tokens=70)
        await h.until(lambda: len(h.ends) == len(prompts))
        assert h.tokens == {name: expected_tokens(prompt, 70) for name, prompt in prompts.items()}

    run(scenario, transport=transport)


def test_counters_are_zero_after_the_warm_up():
    async def scenario(h):
        stats = await h.actor.stats()
        assert [(s.steps, s.tokens, s.busy_s) for s in stats.stages] == [(0, 0, 0.0)] * 2
        assert stats.scheduler.steps == stats.scheduler.computed_tokens == stats.scheduler.added == 0
        assert await h.all_free()

    run(scenario)


def test_counting_begins_again_once_everything_has_left():
    async def scenario(h):
        await h.submit("slow", [SLOW, 7], max_tokens=3)
        await h.actor.reset_stats()
        await h.until(lambda: "slow" in h.ends)
        assert h.ends["slow"][0] is FinishReason.LENGTH
        stats = await h.actor.stats()
        assert [(s.steps, s.tokens) for s in stats.stages] == [(0, 0)] * 2
        assert stats.scheduler.steps == stats.scheduler.computed_tokens == stats.scheduler.added == 0
        await h.submit("next", [8], max_tokens=5)
        await h.until(lambda: "next" in h.ends)
        assert h.tokens["next"] == expected_tokens([8], 5)
        await h.actor.reset_stats()  # returns when its slot has been given back
        assert await h.all_free()

    run(scenario)


def test_the_shortest_context_can_be_warmed_up():
    async def scenario(h):
        await h.submit("a", [8], max_tokens=1)
        await h.until(lambda: "a" in h.ends)
        assert h.tokens["a"] == expected_tokens([8], 1)

    run(scenario, max_model_len=2)


@pytest.mark.parametrize(
    ("prompt", "sampling", "param"),
    [
        ([5, VOCAB_SIZE], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([], {}, "prompt"),
        ([5], {"stop_token_ids": (VOCAB_SIZE + 3,)}, "stop_token_ids"),
        ([5], {"logit_bias": ((-2, 1.0),)}, "logit_bias"),
        ([5], {"stop_token_ids": (1 << 70,)}, "stop_token_ids"),
        ([5], {"top_k": 1 << 70}, "sampling"),  # no plan can carry it
        ([5], {"priority": None}, "priority"),
        ([5], {"priority": 1.5}, "priority"),
        ([5], {"max_tokens": 3.5}, "max_tokens"),
        ([5], {"max_tokens": None}, "max_tokens"),
        ([5], {"seed": None}, "seed"),
        ([5], {"temperature": "hot"}, "temperature"),
        ([5], {"stop_token_ids": 7}, "stop_token_ids"),
        ([5], {"stop_token_ids": ("7",)}, "stop_token_ids"),
        ([5], {"logit_bias": {7: 1.0}}, "logit_bias"),
        ([5], {"logit_bias": ((7, "1"),)}, "logit_bias"),
    ],
)
def test_a_wrong_request_is_refused_before_it_is_scheduled(prompt, sampling, param):
    async def scenario(h):
        await h.submit("neighbour", [77], max_tokens=20)
        with pytest.raises(RequestError) as refused:
            await h.submit("wrong", prompt, **sampling)
        assert refused.value.param == param
        await h.until(lambda: "neighbour" in h.ends)
        assert h.tokens["neighbour"] == expected_tokens([77], 20) and "wrong" not in h.ends

    run(scenario)


def test_nan_ends_its_own_request_only():
    async def scenario(h):
        await h.submit("before", [61], max_tokens=40)
        await h.submit("bad", [62, NAN], max_tokens=40)
        await h.submit("after", [63], max_tokens=40)
        await h.until(lambda: len(h.ends) == 3)
        assert h.ends["bad"][0] is FinishReason.ERROR and h.ends["bad"][1]
        assert h.tokens["before"] == expected_tokens([61], 40) and h.tokens["after"] == expected_tokens([63], 40)
        assert await h.all_free()

    run(scenario)


@pytest.mark.parametrize("trouble", [RAISE_0, RAISE_LAST])
def test_a_step_that_raises_ends_its_requests_and_the_next_ones_work(trouble):
    async def scenario(h):
        await h.submit("bad", [trouble], max_tokens=4)
        await h.until(lambda: "bad" in h.ends)
        reason, error = h.ends["bad"]
        assert reason is FinishReason.ERROR and "scripted failure" in error and "Traceback" not in error
        await h.submit("good", [71] * 130, max_tokens=4)
        await h.until(lambda: "good" in h.ends)
        assert h.tokens["good"] == expected_tokens([71] * 130, 4)
        assert await h.all_free() and (await h.actor.health()).ok

    run(scenario)


def test_abort_frees_every_stage_within_two_steps():
    async def scenario(h):
        await h.submit("long", [DRAG], max_tokens=4000)
        await h.until(lambda: len(h.tokens.get("long", ())) > 20)
        steps = (await h.actor.stats()).scheduler.steps
        await h.actor.abort("long")
        await h.until(lambda: "long" in h.ends)
        await asyncio.sleep(0.05)
        assert h.ends["long"][0] is FinishReason.ABORT and await h.all_free()
        assert (await h.actor.stats()).scheduler.steps <= steps + 3  # one may have been in flight in between
        await h.actor.abort("long")
        await h.actor.abort("never seen")

    run(scenario)


def test_abort_in_the_middle_of_a_long_prefill():
    async def scenario(h):
        await h.submit("long", [SLOW, *[82] * 2000], max_tokens=4)
        await asyncio.sleep(0.02)
        await h.actor.abort("long")
        await h.until(lambda: "long" in h.ends)
        await asyncio.sleep(0.3)
        assert await h.all_free()

    run(scenario)


def test_a_full_queue_refuses_and_says_when_to_come_back():
    async def scenario(h):
        for i in range(3):
            await h.submit(f"r{i}", [SLOW, 90 + i], max_tokens=50)
        with pytest.raises(OverloadedError) as refused:
            await h.submit("more", [5])
        assert refused.value.retry_after_s > 0

    run(scenario, max_sequences=2, max_waiting=1)


def test_requests_of_a_client_that_stopped_polling_are_aborted():
    async def scenario(h):
        await h.submit("lost", [DRAG], max_tokens=4000, client="gone")
        await h.submit("kept", [92], max_tokens=400)
        await asyncio.sleep(1.0)
        assert await h.actor.poll("gone")  # it has come back in time: nothing happens
        await h.until(lambda: "kept" in h.ends and h.actor._desk.num_open == 0)
        assert h.ends["kept"][0] is FinishReason.LENGTH and (await h.actor.stats()).scheduler.aborted == 1
        assert await h.all_free()

    run(scenario, lease_s=1.2)


def test_a_client_that_comes_back_after_its_lease_hears_how_its_requests_ended():
    async def scenario(h):
        await h.submit("slept", [DRAG], max_tokens=4000, client="sleeper")
        await h.until(lambda: h.actor._desk.num_open == 0)
        await asyncio.sleep(0.15)  # more than a lease later
        outputs = await asyncio.wait_for(h.actor.poll("sleeper"), 1)
        assert outputs[-1].finish_reason is FinishReason.ABORT
        await h.until(lambda: h.actor._desk.num_clients == 1, timeout_s=8)

    run(scenario, lease_s=0.1)


def test_an_idle_scheduler_costs_no_cpu():
    async def scenario(h):
        await h.submit("r", [93])
        await h.until(lambda: "r" in h.ends)
        await asyncio.sleep(0.1)
        before = time.process_time()
        await asyncio.sleep(1.5)
        assert time.process_time() - before < 0.03

    run(scenario)
