"""Pipeline: sends plans to the stages so that each runs them in the right order, and brings their results back.

Chunks of prompts follow each other through the stages: what one returns goes to the next by object reference. While
others decode there are rounds instead:

    stage 0    burst 1 | chunk a | burst 2 | chunk b | burst 3 | ...
    stage 1    burst 1 |         | burst 2 | chunk a | burst 3 | chunk b

A burst needs all stages at once. Chunks run between two bursts on every stage at the same time, each stage with the one
that has come so far, and so neither waits for the other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from qsa.scheduler.plan import BurstEnd, BurstPlan, StepPlan, StepResult

CONTROL = {"concurrency_group": "control"}
RESULTS = {"concurrency_group": "results"}


class PipelineEvents(Protocol):
    """Who is told what becomes of plans; called in the event loop."""

    def on_results(self, results: Sequence[StepResult]) -> None:
        """Results of a chunk, or of steps of the burst under way."""

    def on_burst_end(self, end: BurstEnd) -> None:
        """The burst under way is over, after all its results."""

    def on_failure(self, plan: StepPlan | BurstPlan, error: BaseException) -> None:
        """A call for a plan raised."""


@dataclass
class _Chunk:
    """A chunk plan on its way. `message`: what the last stage that it was sent to returns."""

    plan: StepPlan
    data: bytes
    message: Any = None
    next_stage: int = 0


class Pipeline:
    """The state: the burst under way, and chunks that wait for the next one before they go on."""

    def __init__(self, stages: Sequence[Any], events: PipelineEvents) -> None:
        """stages: actor handles."""
        self._stages, self._events = list(stages), events
        self._delayed: deque[_Chunk] = deque()
        self._generation = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_cut = False
        self.burst: BurstPlan | None = None
        self.has_chunk = False  # one was sent since the burst under way
        self.forward_options: dict[str, Any] = {}  # of calls whose result goes to another stage, as the transport wants it

    @property
    def is_quiet(self) -> bool:
        """Nothing is under way."""
        return not self._tasks and not self._delayed

    def release(self, epoch: int, slots: tuple[int, ...]) -> None:
        """Let every stage give slots back before the plans that are sent from now on."""
        self._start(_wait_for_all([stage.release.remote(epoch, slots) for stage in self._stages]))

    def send_chunk(self, plan: StepPlan) -> None:
        """Send a chunk to all stages; during a burst to the first one only, behind the burst."""
        chunk = _Chunk(plan, plan.to_bytes())
        self._advance(chunk)
        if self.burst is None:
            self._finish(chunk)
        elif chunk.next_stage < len(self._stages):
            self._delayed.append(chunk)
        self.has_chunk = True

    def send_burst(self, plan: BurstPlan) -> None:
        """Start a burst on all stages; behind it every chunk that has waited goes one stage further."""
        assert self.burst is None, "a burst is under way"
        self.burst, self.has_chunk, self._is_cut = plan, False, False
        first, *others = self._stages
        calls = [first.drive.remote(plan.to_bytes()), *(stage.follow.remote(plan.epoch, plan.step) for stage in others)]
        self._start(self._run_burst(plan, calls, self._generation))
        for chunk in self._delayed:
            self._advance(chunk)
        self._delayed = deque(chunk for chunk in self._delayed if chunk.next_stage < len(self._stages))

    def flush(self) -> None:
        """No burst follows: chunks that have waited for one go through."""
        while self._delayed:
            self._finish(self._delayed.popleft())

    def cut(self) -> None:
        """End the burst under way early."""
        if self.burst is not None and not self._is_cut:
            self._is_cut = True
            self._stages[0].cut.options(**CONTROL).remote(self.burst.epoch, self.burst.step)

    def forget(self) -> None:
        """What is under way is lost: nobody is told of it any more."""
        self._generation += 1
        self._delayed.clear()
        self.burst = None
        self.has_chunk = False
        for task in self._tasks:
            task.cancel()

    async def step(self, plan: StepPlan) -> StepResult:
        """Send a plan of any kind through all stages, outside of what is planned otherwise, and wait for its result."""
        data, message = plan.to_bytes(), None
        for stage in self._stages:
            message = self._forward(stage).remote(data, message)
        assert message is not None
        result: StepResult = await message
        return result

    def _forward(self, stage: Any) -> Any:
        is_last = stage is self._stages[-1]
        return stage.forward if is_last or not self.forward_options else stage.forward.options(**self.forward_options)

    def _advance(self, chunk: _Chunk) -> None:
        """Send a chunk to its next stage. A stage runs its calls in the order in which they are made here."""
        chunk.message = self._forward(self._stages[chunk.next_stage]).remote(chunk.data, chunk.message)
        chunk.next_stage += 1
        if chunk.next_stage == len(self._stages):
            self._start(self._await_chunk(chunk, self._generation))

    def _finish(self, chunk: _Chunk) -> None:
        while chunk.next_stage < len(self._stages):
            self._advance(chunk)

    async def _await_chunk(self, chunk: _Chunk, generation: int) -> None:
        try:
            result = await chunk.message
        except Exception as error:
            if generation == self._generation:
                self._events.on_failure(chunk.plan, error)
        else:
            if generation == self._generation:
                self._events.on_results([result])

    async def _run_burst(self, plan: BurstPlan, calls: Sequence[Awaitable[Any]], generation: int) -> None:
        pull = asyncio.ensure_future(self._pull(plan, generation))
        futures = [asyncio.ensure_future(_answer(call)) for call in calls]
        try:
            await asyncio.gather(pull, *futures)
        except Exception as error:
            if generation == self._generation:
                self.burst = None
                self._events.on_failure(plan, error)
            return
        finally:
            pull.cancel()
            for future in futures:
                future.cancel()
        if generation == self._generation:
            self.burst = None
            self._events.on_burst_end(futures[0].result())

    async def _pull(self, plan: BurstPlan, generation: int) -> None:
        """Fetch results until the burst is over: those of a step in one message, of several when this process is slower."""
        is_over = False
        while not is_over:
            call = self._stages[0].take_results.options(**RESULTS).remote(plan.epoch, plan.step)
            results, is_over = await call
            if generation != self._generation:
                return
            if results:
                self._events.on_results(results)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _wait_for_all(calls: Sequence[Awaitable[Any]]) -> None:
    """Until they are done; one that fails met a stage that is lost, which others notice."""
    await asyncio.gather(*map(_answer, calls), return_exceptions=True)


async def _answer(reference: Awaitable[Any]) -> Any:
    """Await an object reference as a coroutine, which asyncio's helpers want."""
    return await reference
