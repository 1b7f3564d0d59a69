"""SchedulerActor: the step loop. Keeps the stages busy with chunks and bursts, and clients told.

Nothing here polls: there are new plans when results come back, or when a request or an abort arrives. The only clock is
the watchdog's, once a second.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from qsa.actors.client_desk import ClientDesk
from qsa.actors.first_steps import first_steps
from qsa.actors.links import Link, Linker
from qsa.actors.pipeline import CONTROL, Pipeline
from qsa.actors.process import ProcessId, this_process
from qsa.actors.ray_errors import describe, is_actor_death, is_card_fault, original_error
from qsa.actors.recovery import Recovery, RecoveryLimits
from qsa.actors.request_checks import check_request
from qsa.actors.scheduler_spec import SchedulerSpec
from qsa.actors.telemetry import EngineStats, Health, SchedulerPing, StageStats
from qsa.actors.transport import TransportClosed
from qsa.actors.watchdog import Trouble, Watchdog
from qsa.errors import EngineDeadError, EngineRecoveringError, StageLostError
from qsa.scheduler.growth import StageCapacity
from qsa.scheduler.plan import BurstEnd, BurstPlan, StepPlan, StepResult
from qsa.scheduler.request import Request, RequestOutput, SamplingParams
from qsa.scheduler.scheduler import Scheduler

STATS_TIMEOUT_S = 2.0
logger = logging.getLogger(__name__)


class SchedulerActor:
    """Plain class; as an actor it is async, so that polls, submissions and results interleave. `stages`: actor handles."""

    def __init__(
        self, spec: SchedulerSpec, stages: Sequence[Any], why_no_room: Callable[[int], str | None] = lambda _: None
    ) -> None:
        """why_no_room: as of `Recovery`."""
        self._spec, self._stages = spec, list(stages)
        self._scheduler: Scheduler | None = None
        self._capacities: tuple[StageCapacity, ...] = ()
        self._desk = ClientDesk(spec.lease_s)
        self._pipeline = Pipeline(self._stages, self)
        self._linker = Linker(self._stages, spec.transport, spec.device)
        self._link: Link | None = None
        self._dead: str | None = None
        processes: dict[int, ProcessId] = {}
        self._watchdog = Watchdog(
            [self._ping_of(stage) for stage in self._stages],
            self._on_trouble,
            processes=processes,
            is_busy=lambda: not self._pipeline.is_quiet,
            tick_s=spec.tick_s,
            stuck_s=spec.stuck_s,
        )
        limits = RecoveryLimits(total_s=spec.start_timeout_s)
        self._recovery = Recovery(
            self._stages, self._link_stages, processes, limits, why_no_room=why_no_room, on_no_room=self._interrupt
        )
        self._recovering: asyncio.Task[None] | None = None
        self._epoch = 0  # before there is a scheduler that counts them
        self._began_at = time.monotonic()

    def __repr__(self) -> str:
        return f"Scheduler({len(self._stages)} stages, {self._spec.lanes} lanes)"

    async def ping(self) -> SchedulerPing:
        """Which process this is, and whether it has begun."""
        return SchedulerPing(this_process(), self._scheduler is not None, self._watchdog.longest_s)

    async def begin(
        self,
        capacities: Sequence[StageCapacity],
        loads: Sequence[tuple[Any, ...]] = (),
        prompt_lengths: Sequence[int] = (64,),
    ) -> Link:
        """Link the stages, send first prompts through them, then take requests.

        Args:
            loads:          arguments of each stage's `load`, should it have to load again.
            prompt_lengths: of the first prompts, as far as a prefill chunk and the model's context allow them.

        Returns:
            How the stages are linked.

        Raises:
            QSAError: a stage could not run one, or they cannot be linked.
        """
        await self._link_stages()
        await self._warm_up(prompt_lengths)
        return self._start(capacities, loads)

    async def resume(
        self, capacities: Sequence[StageCapacity], loads: Sequence[tuple[Any, ...]], epoch: int, step_s: float
    ) -> Link:
        """Instead of `begin`, in the place of a scheduler that was lost: make the stages ready, in whatever state they are.

        Args:
            epoch:  newer than any of that scheduler's.
            step_s: a step may take so long.

        Raises:
            EngineDeadError: a stage cannot be brought back.
        """
        self._epoch = epoch
        self._watchdog.learn(step_s)
        self._recovery.loads = loads
        await self._recovery.run(Trouble("stalled", None, "the scheduler has died"), self._next_epoch, 2 * step_s)
        return self._start(capacities, loads)

    def _start(self, capacities: Sequence[StageCapacity], loads: Sequence[tuple[Any, ...]]) -> Link:
        """From now on requests are taken."""
        self._capacities, self._recovery.loads = tuple(capacities), loads
        self._scheduler = self._spec.new_scheduler(self._capacities)
        self._scheduler.epoch = self._epoch
        self._began_at = time.monotonic()
        self._watchdog.start()
        self._leases = asyncio.get_running_loop().create_task(self._watch_leases())
        assert self._link is not None
        return self._link

    async def _link_stages(self) -> None:
        before, self._link = self._link, await self._linker.link()
        if before is not None and str(before) != str(self._link):  # a stage has come back on another node
            logger.warning("%s", self._link)
        self._pipeline.forward_options = self._link.forward_options

    async def _warm_up(self, prompt_lengths: Sequence[int]) -> None:
        """First steps through all stages, before the first request pays for what happens once."""
        spec = self._spec
        for plan in first_steps(prompt_lengths, spec.prefill_chunk, spec.max_model_len, spec.default_sparse_id):
            if plan.open_slots:
                self._pipeline.release(0, (0,))
            began = time.monotonic()
            await self._pipeline.step(plan)
            self._watchdog.learn(time.monotonic() - began)
        self._pipeline.release(0, (0,))
        while not self._pipeline.is_quiet:
            await asyncio.sleep(0.002)
        await self._ask_stages("reset_stats")

    async def _ask_stages(self, method: str) -> list[Any]:
        """Call a method of every stage's control group."""
        calls = [getattr(stage, method).options(**CONTROL).remote() for stage in self._stages]
        return list(await asyncio.gather(*map(_answer, calls)))

    async def reset_stats(self) -> None:
        """Count from zero, and forget what was learned about load, once the requests so far have left every stage."""
        scheduler = self._alive()
        while not (scheduler.is_idle and self._pipeline.is_quiet and self._recovering is None):
            await asyncio.sleep(0.002)
            self._alive()
        fresh = self._spec.new_scheduler(self._capacities)
        fresh.epoch = scheduler.epoch + 1
        self._scheduler = fresh
        await self._ask_stages("reset_stats")
        self._began_at = time.monotonic()

    # requests

    async def submit(
        self, client_id: str, request_id: str, prompt: np.ndarray, sampling: SamplingParams, sparse_id: int, priority: int
    ) -> None:
        """Queue a request; its outputs come through `poll` of the same client.

        Raises:
            RequestError, OverloadedError, EngineDeadError: it is not queued.
        """
        scheduler = self._alive()
        if self._recovery.has_no_room:
            raise EngineRecoveringError(self._recovery.reason)
        check_request(request_id, prompt, sampling, priority, self._spec.vocab_size)
        scheduler.add(Request(request_id, tuple(prompt.tolist()), sampling, sparse_id, priority))
        self._desk.open(client_id, request_id)
        self._fill()

    async def abort(self, request_id: str, submitted: None = None) -> None:
        """End a request, in whatever state it is; its chunks are free within two steps. Unknown ids are ignored.

        `submitted`: what `submit` returned, when that may still be on its way: Ray then runs this after it.
        """
        self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        if self._dead is None and self._scheduler is not None:
            self._scheduler.abort(request_id)
            self._fill()

    async def poll(self, client_id: str) -> list[RequestOutput]:
        """All outputs of the client's requests since its last poll; waits for the first one, at most POLL_S.

        Raises:
            EngineDeadError: a part has died, and there are no more outputs: it ends every open request.
        """
        outputs = await self._desk.poll(client_id, wait=self._dead is None)
        if not outputs and self._dead is not None:
            raise EngineDeadError(self._dead)
        return outputs

    # statistics

    async def stats(self) -> EngineStats:
        """Counters of the scheduler and of every stage.

        Raises:
            EngineDeadError: a stage is gone or does not answer.
        """
        scheduler = self._alive()
        if self._recovering is not None:
            raise EngineRecoveringError(self._recovery.reason or "recovering")
        try:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                stages: list[StageStats] = await self._ask_stages("stats")
        except TimeoutError:
            raise EngineDeadError(f"a stage has not answered within {STATS_TIMEOUT_S:g} s") from None
        uptime_s, recovery = time.monotonic() - self._began_at, self._recovery
        return EngineStats(scheduler.counters(), tuple(stages), uptime_s, recovery.count, recovery.seconds)

    async def start_trace(self) -> None:
        """Let every stage keep the spans of its time."""
        await self._ask_stages("start_trace")

    async def take_trace(self) -> list[bytes]:
        """Every stage's spans since `start_trace`, as `StageActor.take_trace` gives them."""
        return await self._ask_stages("take_trace")

    async def health(self) -> Health:
        """What the watchdog knows; never waits for a stage."""
        reason = self._dead or self._recovery.reason or self._watchdog.complaint()
        if self._scheduler is None and reason is None:
            reason = "the engine is starting"
        return Health(reason is None, reason, self._watchdog.heartbeat_age_s, is_dead=self._dead is not None)

    # plans

    def _fill(self) -> None:
        """Give the stages what they can do now, and hand outputs out."""
        scheduler, pipeline = self._scheduler, self._pipeline
        if self._dead is not None or scheduler is None:
            return
        if self._recovering is not None:  # what comes meanwhile is queued
            self._desk.deliver(scheduler.take_outputs())
            return
        try:
            if pipeline.burst is None:
                burst = scheduler.next_burst()
                self._release()
                if burst is not None:
                    pipeline.send_burst(burst)
                else:
                    pipeline.flush()
            while pipeline.burst is None or not pipeline.has_chunk:  # one a round, or as many as there may be
                chunk = scheduler.next_chunk()
                self._release()
                if chunk is None:
                    break
                pipeline.send_chunk(chunk)
            if pipeline.burst is not None and scheduler.should_cut():
                pipeline.cut()
            self._desk.deliver(scheduler.take_outputs())
        except Exception as error:  # a bug in the planning must not leave everybody waiting
            logger.exception("planning failed")
            self._die(f"planning failed: {describe(error)}")

    def _release(self) -> None:
        assert self._scheduler is not None
        slots = self._scheduler.take_releases()
        if slots:
            self._pipeline.release(self._scheduler.epoch, slots)

    def on_results(self, results: Sequence[StepResult]) -> None:
        """Results of a chunk, or of steps of the burst under way."""
        self._watchdog.beat()
        faults = [result.error for result in results if result.error is not None and is_card_fault(result.error)]
        if faults:
            self._on_trouble(Trouble("broken", None, f"a stage's card has met a fault: {faults[0]}"))
            return
        if any(result.error is None for result in results):
            self._recovery.completed_step()
        self._note(lambda scheduler: [output for result in results for output in scheduler.apply(result)])

    def on_burst_end(self, end: BurstEnd) -> None:
        """The burst under way is over."""
        self._note(lambda scheduler: scheduler.end_burst(end))

    def on_failure(self, plan: StepPlan | BurstPlan, error: BaseException) -> None:
        """A call for a plan raised: what a chunk was for ends with an error, unless a stage has died.

        A burst carries the failures of its steps; when one of its calls raises, the stages are out of step.
        """
        cause = original_error(error)
        if is_actor_death(cause) or isinstance(cause, StageLostError):
            self._on_trouble(Trouble("died", None, "a stage has died"))
            return
        if isinstance(plan, BurstPlan) or isinstance(cause, TransportClosed):
            self._on_trouble(Trouble("stalled", None, f"the stages have lost each other ({describe(error)})"))
            return
        if is_card_fault(str(cause)):
            self._on_trouble(Trouble("broken", None, f"a stage's card has met a fault: {describe(error)}"))
            return
        logger.error("step %d failed: %s", plan.step, error)
        message = f"the model failed in this step: {describe(error)}"

        def fail(scheduler: Scheduler) -> list[RequestOutput]:
            scheduler.fail_plan(plan, message)
            return scheduler.take_outputs()

        self._note(fail)

    def _note(self, take: Callable[[Scheduler], list[RequestOutput]]) -> None:
        """Let the scheduler take what has happened, tell the clients, and go on."""
        if self._dead is not None or self._scheduler is None:
            return
        try:
            self._desk.deliver(take(self._scheduler))
        except Exception as error:  # a bug in the bookkeeping must not leave everybody waiting
            logger.exception("bookkeeping failed")
            self._die(f"bookkeeping failed: {describe(error)}")
        self._fill()

    # life and death

    def _alive(self) -> Scheduler:
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        if self._scheduler is None:
            raise EngineRecoveringError("the engine is starting")
        return self._scheduler

    def _next_epoch(self) -> int:
        """Let everything begin anew on stages that hold nothing."""
        if self._scheduler is None:
            self._epoch += 1
            return self._epoch
        epoch = self._scheduler.restart()
        self._desk.deliver(self._scheduler.take_outputs())
        return epoch

    def _on_trouble(self, trouble: Trouble) -> None:
        """The stages cannot go on: bring them back, once, however many say so."""
        if self._dead is not None or self._recovering is not None or self._scheduler is None:
            return
        self._watchdog.stop()
        self._pipeline.forget()
        work = self._recovery.run(trouble, self._next_epoch, 2 * self._watchdog.longest_s)
        self._recovering = asyncio.get_running_loop().create_task(self._recover(work))

    async def _recover(self, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception as error:  # of whatever kind: everybody waits
            if not isinstance(error, EngineDeadError):
                logger.exception("recovery failed")
            self._die(str(error) if isinstance(error, EngineDeadError) else f"recovery failed: {describe(error)}")
            return
        finally:
            self._recovering = None
        self._watchdog.start()
        self._fill()

    def _interrupt(self, reason: str) -> None:
        """It may take long until the stages are back: nobody shall wait for that."""
        if self._scheduler is not None:
            self._desk.deliver(self._scheduler.interrupt(reason))

    def _die(self, reason: str) -> None:
        """A part is gone for good: tell everybody who waits, and refuse what comes."""
        if self._dead is not None:
            return
        logger.error("the engine is dead: %s", reason)
        self._dead = reason
        self._watchdog.stop()
        self._pipeline.forget()
        self._desk.close()

    async def _watch_leases(self) -> None:
        while self._dead is None:
            await asyncio.sleep(self._spec.lease_s / 4)
            self._desk.expire(self._abort)

    def _ping_of(self, stage: Any) -> Any:
        return lambda: _answer(stage.ping.options(**CONTROL).remote())


async def _answer(reference: Awaitable[Any]) -> Any:
    """Await an object reference as a coroutine, which asyncio's helpers want."""
    return await reference
