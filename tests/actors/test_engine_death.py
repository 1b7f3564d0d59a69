"""What happens when a part dies or freezes: everybody hears within seconds, health says why, nothing is left behind."""

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
from engine_helpers import collect, engine_actors, greedy, scripted_config, wait_until
from ray.util import state
from scripted_stage import DRAG, SLOW, build_scripted

from qsa.actors.engine import Engine
from qsa.errors import EngineDeadError

pytestmark = pytest.mark.ray


@pytest.fixture
def engine(ray_driver):
    with Engine.start(scripted_config(), name="test/dying", build=build_scripted) as engine:
        yield engine


def is_running(pid: int) -> bool:
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return letter not in ("Z", "X")


def actor_pid(name: str) -> int:
    (found,) = state.list_actors(filters=[("name", "=", name), ("state", "=", "ALIVE")])
    return found.pid


async def ends_badly(request) -> str:
    """How a request that was open ended; fails when it ended in another way than by the engine's death."""
    with pytest.raises(EngineDeadError) as death:
        await request
    return str(death.value)


async def watch_it_die(engine, kill, words: str) -> None:
    """Kill a part under three open requests: one that decodes, one that prefills, one that has just come."""
    requests = [
        asyncio.create_task(collect(engine, prompt, greedy(900))) for prompt in ([DRAG], [SLOW, *[8] * 2000], [9, DRAG])
    ]
    await asyncio.sleep(0.3)
    kill()
    began = time.monotonic()
    reasons = await asyncio.wait_for(asyncio.gather(*map(ends_badly, requests)), 12)
    took_s = time.monotonic() - began
    assert took_s < 10, f"they heard after {took_s:.1f} s"
    assert all(words in reason and "\n" not in reason for reason in reasons), reasons
    health = await engine.health()
    assert not health.ok and words in health.reason
    with pytest.raises(EngineDeadError, match=words):
        await collect(engine, [1], greedy(1))
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < 2
    wait_until(lambda: not any("dying" in name for name in engine_actors()))


def test_kill_of_a_stage(engine):
    async def scenario():
        pids = [s.pid for s in (await engine.stats()).stages]
        await watch_it_die(engine, lambda: os.kill(pids[1], signal.SIGKILL), "stage")
        wait_until(lambda: not any(map(is_running, pids)))

    asyncio.run(scenario())


def test_kill_of_the_scheduler(engine):
    async def scenario():
        pids = [s.pid for s in (await engine.stats()).stages]
        scheduler = actor_pid("qsa/test/dying/scheduler")
        await watch_it_die(engine, lambda: os.kill(scheduler, signal.SIGKILL), "the scheduler")
        wait_until(lambda: not any(map(is_running, pids)))

    asyncio.run(scenario())


def test_a_frozen_stage_is_found_and_close_still_works(engine):
    async def scenario():
        pid = (await engine.stats()).stages[1].pid
        await watch_it_die(engine, lambda: os.kill(pid, signal.SIGSTOP), "stage 1 has not answered")
        wait_until(lambda: not is_running(pid), 10)

    asyncio.run(scenario())


def test_an_idle_engine_notices_a_dead_stage(engine):
    async def scenario():
        pid = (await engine.stats()).stages[0].pid
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while (health := await engine.health()).ok:
            assert time.monotonic() < deadline, "health stayed green"
            await asyncio.sleep(0.05)
        assert "stage 0 has died" in health.reason
        with pytest.raises(EngineDeadError):
            await engine.stats()

    asyncio.run(scenario())


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
    wait_until(lambda: not any(map(is_running, pids)), 15)
    wait_until(lambda: not any("owner" in name for name in engine_actors()))
