"""A SchedulerActor over scripted stages in this process, and a client that collects what each request got."""

from __future__ import annotations

import asyncio
import time

import numpy as np
from scripted_stage import VOCAB_SIZE, LocalStage

from qsa.actors.scheduler_actor import SchedulerActor
from qsa.actors.scheduler_spec import SchedulerSpec
from qsa.actors.stage_spec import StageSpec
from qsa.errors import EngineDeadError
from qsa.kernels.registry import SparseConfig
from qsa.scheduler.request import FinishReason, SamplingParams

SPARSE = {0: SparseConfig(dense=True), 1: SparseConfig()}
NUM_CHUNKS = 96


class Harness:
    """A scheduler over scripted stages, and a client that collects what each request got."""

    def __init__(self, num_stages: int = 2, **settings) -> None:
        values = dict(
            max_sequences=4, max_waiting=8, max_model_len=4096, prefill_chunk=64, growth_horizon=64, eos_token_ids=(2,), lanes=2
        )
        spec = SchedulerSpec(**values | settings, sparse=SPARSE, vocab_size=VOCAB_SIZE, default_sparse_id=1)
        self.stages = [
            LocalStage(StageSpec(n, num_stages, 2 * n, 2 * n + 2, "scripted", NUM_CHUNKS, 4, 4096, SPARSE))
            for n in range(num_stages)
        ]
        self.actor = SchedulerActor(spec, self.stages)
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, tuple[FinishReason, str | None]] = {}
        self.died: str | None = None
        self._collector: asyncio.Task | None = None

    async def __aenter__(self):
        await self.actor.begin([stage.capacity for stage in self.stages])
        self._collector = asyncio.create_task(self._collect())
        return self

    async def __aexit__(self, *_):
        self._collector.cancel()
        await asyncio.sleep(0.01)
        for stage in self.stages:
            stage.close()

    async def _collect(self):
        while True:
            try:
                outputs = await self.actor.poll("me")
            except EngineDeadError as error:
                self.died = str(error)
                return
            for output in outputs:
                self.tokens.setdefault(output.request_id, []).extend(t.token_id for t in output.tokens)
                if output.finish_reason:
                    assert output.request_id not in self.ends, "a request ends once"
                    self.ends[output.request_id] = output.finish_reason, output.error

    async def submit(self, request_id, prompt, max_tokens=4, client="me", priority=0, **sampling):
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens} | sampling)
        await self.actor.submit(client, request_id, np.array(prompt), params, 1, priority)

    async def until(self, condition, timeout_s=20.0):
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"it did not happen; ends: {self.ends}"
            await asyncio.sleep(0.005)

    async def all_free(self, timeout_s=10.0):
        """Whether everything has been given back, which follows a request's end within a moment."""
        deadline = time.monotonic() + timeout_s
        while not (is_free := await self._is_free()) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        return is_free

    async def _is_free(self):
        stats = await self.actor.stats()
        c = stats.scheduler
        return (c.num_waiting, c.num_running, c.num_in_flight, c.num_slots, sum(c.held_chunks)) == (0,) * 5 and all(
            stage.pool.num_free == NUM_CHUNKS for stage in stats.stages
        )
