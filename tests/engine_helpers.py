"""What tests of the engine share: a small scripted configuration, ways to collect, and ways to wait."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from ray.util import list_named_actors, state

from qsa.actors.placed_scheduler import NAMESPACE
from qsa.config import make_config
from qsa.scheduler.request import SamplingParams

CHUNKS = 128


def scripted_config(**settings):
    values = {
        "model": {"max_model_len": 4096},
        "cache": {"device_bytes": CHUNKS << 20},
        "limits": {"max_sequences": 4, "max_waiting": 4, "prefill_chunk": 64},
        "pipeline": {"cpus_per_stage": 0.2},
    }
    for name, part in settings.items():
        values.setdefault(name, {}).update(part)
    return make_config(values)


def greedy(max_tokens: int, **more) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **more)


async def collect(engine, prompt, sampling, **more):
    """All tokens of one request, and its last output."""
    tokens, output = [], None
    async for output in engine.generate(prompt, sampling, **more):
        tokens += [token.token_id for token in output.tokens]
    return tokens, output


async def until_free(engine, timeout_s=30.0):
    """Wait until no request, slot or chunk is held anywhere; returns the statistics of that moment."""
    deadline = time.monotonic() + timeout_s
    while True:
        stats = await engine.stats()
        c = stats.scheduler
        held = [stage.pool.num_chunks - stage.pool.num_free for stage in stats.stages]
        if (c.num_waiting, c.num_running, c.num_in_flight, c.num_slots, sum(held)) == (0,) * 5:
            return stats
        assert time.monotonic() < deadline, stats
        await asyncio.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return letter not in ("Z", "X")


def actor_pid(name: str) -> int:
    """Process of the living actor of this name."""
    (found,) = state.list_actors(filters=[("name", "=", name), ("state", "=", "ALIVE")])
    return found.pid


async def until_healthy(engine, timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    while not (health := await engine.health()).ok:
        assert time.monotonic() < deadline and not health.is_dead, health
        await asyncio.sleep(0.05)


def engine_actors() -> set[str]:
    return {actor["name"] for actor in list_named_actors(all_namespaces=True) if actor["namespace"] == NAMESPACE}


def wait_until(condition, timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
