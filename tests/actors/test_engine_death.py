"""What happens when a part dies or freezes: streams go on or end within seconds, the engine comes back, nothing stays."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
from engine_helpers import (
    actor_pid,
    collect,
    engine_actors,
    greedy,
    is_running,
    scripted_config,
    until_free,
    until_healthy,
    wait_until,
)
from scripted_stage import DRAG, EXIT, FUSE, FUSE_LENGTH, HANG, SLOW, build_scripted, expected_tokens

from qsa.actors.engine import Engine
from qsa.actors.placement import NAMESPACE
from qsa.errors import EngineDeadError, EngineRecoveringError
from qsa.scheduler.request import FinishReason

pytestmark = pytest.mark.ray

PROMPTS = ([DRAG], [SLOW, *[8] * 1500], [9, DRAG], [10] * 5)  # one decodes, one prefills, two are about to
COUNT = 300


@pytest.fixture(scope="module")
def engine(ray_driver):
    """One engine for all tests but the last ones: it is as good as new after each."""
    with Engine.start(scripted_config(limits={"max_sequences": 8}), name="test/dying", build=build_scripted) as engine:
        yield engine


async def stage_pids(engine) -> list[int]:
    return [stage.pid for stage in (await engine.stats()).stages]


async def until_decoding(engine) -> None:
    before = (await engine.stats()).scheduler.generated_tokens
    while (await engine.stats()).scheduler.generated_tokens < before + 20:
        await asyncio.sleep(0.02)


def open_requests(engine) -> list[asyncio.Task]:
    return [asyncio.create_task(collect(engine, prompt, greedy(COUNT))) for prompt in PROMPTS]


async def check_all(requests) -> None:
    for prompt, (tokens, last) in zip(PROMPTS, await asyncio.gather(*requests), strict=True):
        assert last.finish_reason is FinishReason.LENGTH and tokens == expected_tokens(prompt, COUNT)


@pytest.mark.parametrize(("victim", "how"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)], ids=str)
def test_streams_go_on_after_the_loss_of_a_stage(engine, victim, how):
    async def scenario():
        before, recoveries = await stage_pids(engine), (await engine.stats()).recoveries
        requests = open_requests(engine)
        await until_decoding(engine)
        os.kill(before[victim], how)
        began = time.monotonic()
        while (health := await engine.health()).ok:
            assert time.monotonic() - began < 30
            await asyncio.sleep(0.02)
        assert not health.is_dead and f"stage {victim}" in health.reason
        late = asyncio.create_task(collect(engine, [11], greedy(3)))
        await check_all(requests)
        assert (await late)[0] == expected_tokens([11], 3), "it waited for the stage"
        await until_healthy(engine)
        after = await stage_pids(engine)
        assert [a != b for a, b in zip(before, after, strict=True)] == [n == victim for n in range(2)]
        assert not is_running(before[victim])
        stats = await until_free(engine)
        assert stats.recoveries == recoveries + 1 and stats.recovery_s > 0

    asyncio.run(scenario())


def test_streams_end_when_the_scheduler_is_lost_and_it_comes_back(engine):
    async def scenario():
        before, scheduler = await stage_pids(engine), actor_pid("qsa/test/dying/scheduler")
        requests = open_requests(engine)
        await until_decoding(engine)
        os.kill(scheduler, signal.SIGKILL)
        began = time.monotonic()
        ends = await asyncio.gather(*requests, return_exceptions=True)
        assert time.monotonic() - began < 10
        assert [type(end) for end in ends] == [EngineRecoveringError] * len(PROMPTS)
        assert all("scheduler has died" in str(end) and "\n" not in str(end) for end in ends), ends
        health = await engine.health()
        if not health.ok:  # it may be back already
            assert "the scheduler has died" in health.reason and not health.is_dead
            with pytest.raises(EngineRecoveringError):
                await collect(engine, [1], greedy(1))
        await until_healthy(engine)
        await check_all(open_requests(engine))
        assert await stage_pids(engine) == before, "stages keep their weights"
        await until_free(engine)

    asyncio.run(scenario())


def test_everything_at_once(engine):
    async def scenario():
        pids = [*await stage_pids(engine), actor_pid("qsa/test/dying/scheduler")]
        requests = open_requests(engine)
        await until_decoding(engine)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        ends = await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), 10)
        assert [type(end) for end in ends] == [EngineRecoveringError] * len(PROMPTS)
        await until_healthy(engine)
        await check_all(open_requests(engine))
        await until_free(engine)

    asyncio.run(scenario())


@pytest.mark.parametrize("victim", ["stage0", "scheduler"])
def test_an_idle_engine_notices_and_comes_back(engine, victim):
    async def scenario():
        await until_healthy(engine)
        pid = actor_pid(f"qsa/test/dying/{victim}")
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        while (health := await engine.health()).ok:
            assert time.monotonic() - began < 20, "health stayed green"
            await asyncio.sleep(0.02)
        assert "has died" in health.reason and not health.is_dead
        await until_healthy(engine)
        assert (await collect(engine, [12], greedy(4)))[0] == expected_tokens([12], 4)

    asyncio.run(scenario())


@pytest.mark.parametrize(("poison", "num_tokens"), [([EXIT], 0), ([5, FUSE], FUSE_LENGTH - 1)], ids=["prefill", "decode"])
def test_a_request_that_kills_its_stage_again_and_again_ends_alone(engine, poison, num_tokens):
    async def scenario():
        requests = open_requests(engine)
        tokens, last = await collect(engine, poison, greedy(COUNT))
        assert last.finish_reason is FinishReason.ERROR and "again and again" in last.error
        assert tokens == expected_tokens(poison, COUNT)[: len(tokens)] and len(tokens) == num_tokens
        await check_all(requests)
        await until_healthy(engine)
        await until_free(engine)

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_step_that_never_ends(engine):
    async def scenario():
        requests = open_requests(engine)
        _, last = await collect(engine, [HANG], greedy(3))
        assert last.finish_reason is FinishReason.ERROR and "again and again" in last.error
        await check_all(requests)
        await until_free(engine)

    asyncio.run(scenario())


@pytest.mark.parametrize("victim", ["stage1", "scheduler"])
def test_an_actor_that_ray_does_not_start_again_ends_the_engine_at_once(victim, ray_driver):
    async def scenario(engine):
        requests = open_requests(engine)
        await until_decoding(engine)
        ray.kill(ray.get_actor(f"qsa/test/killed/{victim}", NAMESPACE))
        ends = await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), 10)
        assert {type(end) for end in ends} <= {EngineDeadError, EngineRecoveringError}
        async with asyncio.timeout(10):
            while not (health := await engine.health()).is_dead:
                await asyncio.sleep(0.05)
        assert "ended for good" in health.reason

    with Engine.start(scripted_config(limits={"max_sequences": 8}), name="test/killed", build=build_scripted) as engine:
        asyncio.run(scenario(engine))


def test_close_during_a_recovery_leaves_nothing(ray_driver):
    async def scenario(engine):
        pids = [*await stage_pids(engine), actor_pid("qsa/test/closing/scheduler")]
        request = asyncio.create_task(collect(engine, [DRAG], greedy(900)))
        await until_decoding(engine)
        os.kill(pids[0], signal.SIGKILL)
        os.kill(pids[1], signal.SIGSTOP)
        while (await engine.health()).ok:
            await asyncio.sleep(0.01)
        began = time.monotonic()
        engine.close()
        assert time.monotonic() - began < 5
        with pytest.raises(EngineDeadError, match="closed"):
            await request
        assert (await engine.health()).is_dead
        wait_until(lambda: not any(map(is_running, pids)), 60)
        wait_until(lambda: not any("closing" in name for name in engine_actors()))

    with Engine.start(scripted_config(), name="test/closing", build=build_scripted) as engine:
        asyncio.run(scenario(engine))


def test_actors_end_with_the_process_that_owns_them(ray_driver):
    owner = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("owner.py"))],
        env=ray_driver.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        pids = json.loads(owner.stdout.readline())
        pids.append(actor_pid("qsa/test/owner/scheduler"))
        assert all(map(is_running, pids))
    finally:
        owner.kill()
        owner.wait()
    wait_until(lambda: not any(map(is_running, pids)), 60)
    wait_until(lambda: not any("owner" in name for name in engine_actors()))
