"""SchedulerActor: the step loop. Keeps a plan of every lane in flight through the stages, and clients told.

Nothing here polls: a lane is filled again when its step comes back, or when a request or an abort arrives. The only clock
is the watchdog's, once a second.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from qsa.actors.ray_errors import describe, is_actor_death
from qsa.actors.telemetry import EngineStats, Health, StageStats
from qsa.actors.watchdog import TICK_S, Watchdog
from qsa.errors import EngineDeadError, RequestError
from qsa.kernels.registry import SparseConfig
from qsa.scheduler.growth import StageCapacity
from qsa.scheduler.plan import SequenceStep, StepPlan, StepResult
from qsa.scheduler.request import Request, RequestOutput, SamplingParams
from qsa.scheduler.scheduler import Scheduler

POLL_S = 3.0  # longest silence of a poll; then it returns empty
LEASE_S = 30.0  # a client that has not polled for so long is gone, and its requests are aborted,
FORGET_LEASES = 20  # and after so many times that, it is forgotten
STATS_TIMEOUT_S = 2.0
CONTROL = {"concurrency_group": "control"}
WARM_UP_SAMPLING = (  # every way the sampler can take
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_p=0.9, logprobs=5),
    SamplingParams(temperature=0.8, top_k=40, min_p=0.05),
    SamplingParams(
        temperature=1.0, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1, logit_bias=((0, 1.0),)
    ),
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SchedulerSpec:
    """The settings of a SchedulerActor; plain values. Names as in `Scheduler`.

    Attributes:
        vocab_size: token ids of a request must be below it.
    """

    max_sequences: int
    max_waiting: int
    max_model_len: int
    prefill_chunk: int
    growth_horizon: int
    eos_token_ids: tuple[int, ...]
    lanes: int
    sparse: dict[int, SparseConfig]
    vocab_size: int
    default_sparse_id: int
    lease_s: float = LEASE_S
    tick_s: float = TICK_S


@dataclass
class _Client:
    """One process that sends requests. `request_ids`: those that have not ended."""

    seen_at: float
    request_ids: set[str] = field(default_factory=set)
    outputs: list[RequestOutput] = field(default_factory=list)
    waiter: asyncio.Future[None] | None = None


class SchedulerActor:
    """Plain class; as an actor it is async, so that polls, submissions and steps interleave. `stages`: actor handles."""

    def __init__(self, spec: SchedulerSpec, stages: Sequence[Any]) -> None:
        self._spec, self._stages = spec, list(stages)
        self._scheduler: Scheduler | None = None
        self._capacities: tuple[StageCapacity, ...] = ()
        self._idle_lanes = set(range(spec.lanes))
        self._clients: dict[str, _Client] = {}
        self._owners: dict[str, _Client] = {}  # by request id
        self._steps: set[asyncio.Task[None]] = set()
        self._dead: str | None = None
        self._watchdog = Watchdog([self._ping_of(stage) for stage in self._stages], self._die, tick_s=spec.tick_s)
        self._began_at = time.monotonic()

    def __repr__(self) -> str:
        return f"Scheduler({len(self._stages)} stages, {self._spec.lanes} lanes)"

    async def begin(self, capacities: Sequence[StageCapacity], prompt_lengths: Sequence[int] = (64,)) -> None:
        """Send first prompts through the stages, then take requests.

        prompt_lengths: of these prompts, as far as a prefill chunk and the model's context allow them.

        Raises:
            QSAError: a stage could not run one.
        """
        await self._warm_up(prompt_lengths)
        self._capacities = tuple(capacities)
        self._scheduler = self._new_scheduler()
        self._began_at = time.monotonic()
        self._watchdog.start()
        self._leases = asyncio.get_running_loop().create_task(self._watch_leases())

    def _new_scheduler(self) -> Scheduler:
        spec = self._spec
        return Scheduler(
            self._capacities,
            max_sequences=spec.max_sequences,
            max_waiting=spec.max_waiting,
            max_model_len=spec.max_model_len,
            prefill_chunk=spec.prefill_chunk,
            growth_horizon=spec.growth_horizon,
            eos_token_ids=spec.eos_token_ids,
            lanes=spec.lanes,
            sparse=spec.sparse,
        )

    async def _warm_up(self, prompt_lengths: Sequence[int]) -> None:
        """Prompts, and a decode step of every kind of sampling, through all stages, before the first request pays for what
        happens once."""
        spec = self._spec
        most = max(1, min(spec.prefill_chunk, spec.max_model_len - len(WARM_UP_SAMPLING)))
        lengths = sorted({max(1, min(length, most)) for length in prompt_lengths})
        greedy = WARM_UP_SAMPLING[0]
        steps = [SequenceStep("warm-up", 0, 0, (0,) * length, is_prefill=True, sampling=greedy) for length in lengths]
        for position, sampling in zip(range(lengths[-1], spec.max_model_len), WARM_UP_SAMPLING, strict=False):
            counts = ((0, 1),) if sampling.presence_penalty else ()
            steps.append(SequenceStep("warm-up", 0, position, (0,), is_prefill=False, sampling=sampling, counts=counts))
        first = -len(steps) - 1  # so that the first real step is number 0
        for number, step in enumerate(steps):
            opened = ((0, spec.default_sparse_id),) if step.is_prefill else ()
            released = (0,) if step.is_prefill and number else ()
            await self._send(StepPlan(0, first + number, 0, (step,), opened, released))
        await self._send(StepPlan(0, -1, 0, release_slots=(0,)))
        await self._reset_stages()

    async def _reset_stages(self) -> None:
        await asyncio.gather(*(_answer(stage.reset_stats.options(**CONTROL).remote()) for stage in self._stages))

    async def reset_stats(self) -> None:
        """Count from zero, and forget what was learned about load, once the requests so far have left every stage."""
        scheduler = self._alive()
        while not scheduler.is_idle or len(self._idle_lanes) < self._spec.lanes:
            await asyncio.sleep(0.002)
            self._alive()
        fresh = self._new_scheduler()
        fresh.epoch = scheduler.epoch + 1
        self._scheduler = fresh
        await self._reset_stages()
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
        for ids, param in (
            (prompt, "prompt"),
            (np.array(sampling.stop_token_ids), "stop_token_ids"),
            (np.array([token for token, _ in sampling.logit_bias]), "logit_bias"),
        ):
            _check_ids(ids, self._spec.vocab_size, param)
        _check_travels(request_id, sampling)
        scheduler.add(Request(request_id, tuple(prompt.tolist()), sampling, sparse_id, priority))
        client = self._client(client_id)
        client.seen_at = time.monotonic()
        client.request_ids.add(request_id)
        self._owners[request_id] = client
        self._fill()

    async def abort(self, request_id: str, submitted: None = None) -> None:
        """End a request, in whatever state it is; its chunks are free within two steps. Unknown ids are ignored.

        `submitted`: what `submit` returned, when that may still be on its way: Ray then runs this after it.
        """
        if self._dead is None and self._scheduler is not None:
            self._scheduler.abort(request_id)
            self._fill()

    async def poll(self, client_id: str) -> list[RequestOutput]:
        """All outputs of the client's requests since its last poll; waits for the first one, at most POLL_S.

        Raises:
            EngineDeadError: a part has died, and there are no more outputs: it ends every open request.
        """
        client = self._client(client_id)
        client.seen_at = time.monotonic()
        if not client.outputs and self._dead is None:
            loop = asyncio.get_running_loop()
            waiter = client.waiter = loop.create_future()
            timer = loop.call_later(POLL_S, _wake, waiter)
            await waiter
            timer.cancel()
        outputs, client.outputs = client.outputs, []
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
        calls = [_answer(stage.stats.options(**CONTROL).remote()) for stage in self._stages]
        try:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                stages: list[StageStats] = await asyncio.gather(*calls)
        except TimeoutError:
            raise EngineDeadError(f"a stage has not answered within {STATS_TIMEOUT_S:g} s") from None
        return EngineStats(scheduler.counters(), tuple(stages), time.monotonic() - self._began_at)

    async def health(self) -> Health:
        """What the watchdog knows; never waits for a stage."""
        reason = self._dead or self._watchdog.complaint()
        if self._scheduler is None and reason is None:
            reason = "the engine is starting"
        return Health(reason is None, reason, self._watchdog.heartbeat_age_s)

    # steps

    def _fill(self) -> None:
        """Start a step in every idle lane that has something to do, and hand outputs out."""
        scheduler = self._scheduler
        if self._dead is not None or scheduler is None:
            return
        try:
            for lane in sorted(self._idle_lanes):
                plan = scheduler.next_plan(lane)
                if plan is not None:
                    self._idle_lanes.discard(lane)
                    task = asyncio.get_running_loop().create_task(self._step(plan, self._send(plan)))
                    self._steps.add(task)
                    task.add_done_callback(self._steps.discard)
            self._deliver(scheduler.take_outputs())
        except Exception as error:  # a bug in the planning must not leave everybody waiting
            logger.exception("planning failed")
            self._die(f"planning failed: {describe(error)}")

    def _send(self, plan: StepPlan) -> Awaitable[StepResult]:
        """Send a plan through all stages. What one returns goes to the next by reference, never through this process's
        hands; a stage runs its calls in the order they are made here."""
        data = plan.to_bytes()
        message = None
        for stage in self._stages:
            message = stage.forward.remote(data, message)
        assert message is not None
        return message

    async def _step(self, plan: StepPlan, result: Awaitable[StepResult]) -> None:
        scheduler = self._scheduler
        assert scheduler is not None
        try:
            outputs = scheduler.apply(await result)
        except Exception as error:
            if is_actor_death(error):
                self._die(f"a stage has died: {describe(error)}")
                return
            logger.exception("step %d failed", plan.step)
            scheduler.fail_plan(plan, f"the model failed in this step: {describe(error)}")
            outputs = scheduler.take_outputs()
        else:
            self._watchdog.beat()
        self._idle_lanes.add(plan.lane)
        self._deliver(outputs)
        self._fill()

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            client = self._owners.get(output.request_id)
            if client is None:
                continue
            client.outputs.append(output)
            if output.finish_reason is not None:
                del self._owners[output.request_id]
                client.request_ids.discard(output.request_id)
            if client.waiter is not None:
                _wake(client.waiter)

    # life and death

    def _alive(self) -> Scheduler:
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        if self._scheduler is None:
            raise EngineDeadError("the engine is starting")
        return self._scheduler

    def _die(self, reason: str) -> None:
        """A part is gone for good: tell everybody who waits, and refuse what comes."""
        if self._dead is not None:
            return
        logger.error("the engine is dead: %s", reason)
        self._dead = reason
        self._owners.clear()
        for client in self._clients.values():
            client.request_ids.clear()
            if client.waiter is not None:
                _wake(client.waiter)

    def _client(self, client_id: str) -> _Client:
        client = self._clients.get(client_id)
        if client is None:
            client = self._clients[client_id] = _Client(time.monotonic())
        return client

    async def _watch_leases(self) -> None:
        """Abort the requests of clients that no longer poll. A client is forgotten later, so that one which was only
        asleep, and comes back, hears how its requests ended."""
        lease_s = self._spec.lease_s
        while self._dead is None:
            await asyncio.sleep(lease_s / 4)
            now = time.monotonic()
            for client_id, client in list(self._clients.items()):
                if now - client.seen_at > lease_s:
                    for request_id in list(client.request_ids):
                        await self.abort(request_id)
                if now - client.seen_at > FORGET_LEASES * lease_s:
                    del self._clients[client_id]

    def _ping_of(self, stage: Any) -> Any:
        return lambda: _answer(stage.ping.options(**CONTROL).remote())


async def _answer(reference: Awaitable[Any]) -> Any:
    """Await an object reference as a coroutine, which asyncio's helpers want."""
    return await reference


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _check_travels(request_id: str, sampling: SamplingParams) -> None:
    """Refuse what a plan cannot carry to the stages, such as a number of more than 64 bits: the plan has others in it."""
    try:
        StepPlan(0, 0, 0, (SequenceStep(request_id, 0, 0, (), is_prefill=False, sampling=sampling),)).to_bytes()
    except (OverflowError, TypeError, ValueError) as error:
        raise RequestError(f"the sampling parameters cannot be sent to the stages: {error}", param="sampling") from None


def _check_ids(ids: np.ndarray, vocab_size: int, param: str) -> None:
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if len(wrong):
        raise RequestError(f"{param} holds token {wrong[0]}, but the model has tokens 0 to {vocab_size - 1}", param=param)
