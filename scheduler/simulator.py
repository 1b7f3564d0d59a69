"""Run the real Scheduler against a made-up load and stages that only count, on a clock of its own.

Each stage runs its calls in the order in which the pipeline makes them, with bursts driven as stage 0 drives them: chunks of
prompts on all stages at once, lanes of a burst one behind the other.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from qsa.errors import QSAError
from qsa.scheduler.burst import Burst
from qsa.scheduler.growth import StageCapacity
from qsa.scheduler.plan import BurstPlan, SequenceStep, StepPlan, StepResult
from qsa.scheduler.request import FinishReason, Request, RequestOutput
from qsa.scheduler.scheduler import Scheduler
from qsa.scheduler.simulated_stages import SimulatedStage, StageCalls, choose_token, scripted_result


@dataclass(frozen=True)
class Arrival:
    """A request and when it comes; `abort_s`: when its client leaves."""

    time_s: float
    request: Request
    abort_s: float | None = None


@dataclass(frozen=True)
class CostModel:
    """Time of a step on one stage: a constant, and an amount for every token of a prompt and every decoded one.

    `notice_ms`: until the scheduler hears of a result or of the end of a burst, and its next plan has arrived.
    """

    step_ms: float = 1.0
    prefill_token_ms: float = 0.6
    decode_token_ms: float = 2.0
    notice_ms: float = 0.0

    def stage_ms(self, plan: StepPlan) -> float:
        token_ms = self.prefill_token_ms if plan.items[0].is_prefill else self.decode_token_ms
        return self.step_ms + plan.num_tokens * token_ms


@dataclass
class RequestLog:
    """What one request lived through; times on the simulated clock."""

    arrival_s: float
    token_ids: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    finish_s: float | None = None
    error: str | None = None

    @property
    def first_token_s(self) -> float | None:
        return self.token_times_s[0] - self.arrival_s if self.token_times_s else None

    @property
    def gaps_s(self) -> list[float]:
        """Times between two tokens."""
        return [later - time for time, later in itertools.pairwise(self.token_times_s)]

    @property
    def longest_gap_s(self) -> float:
        return max(self.gaps_s, default=0.0)


@dataclass(frozen=True)
class Report:
    """The outcome of a run. `refused`: requests that `add` did not take, with the message."""

    requests: dict[str, RequestLog]
    refused: dict[str, str]
    plans: tuple[StepPlan | BurstPlan, ...]
    duration_s: float
    max_held: tuple[int, ...]
    num_preempted: int


@dataclass
class _TimedStage:
    """What a stage is at.

    `lanes`: on stage 0, lanes of the burst that may begin a step. `frames`: on the others, steps of the burst to compute.
    """

    counts: SimulatedStage
    is_busy: bool = False
    burst: Burst | None = None
    lanes: deque[int] = field(default_factory=deque)
    frames: deque[StepPlan] = field(default_factory=deque)


class Simulation:
    """Scheduler, stages and clock. The state: what is under way, and the log of every request."""

    def __init__(
        self,
        stages: Sequence[StageCapacity],
        *,
        max_sequences: int = 8,
        max_waiting: int = 64,
        max_model_len: int = 8192,
        prefill_chunk: int = 512,
        busy_chunk: int | None = None,
        growth_horizon: int = 256,
        eos_token_ids: Iterable[int] = (0,),
        lanes: int = 2,
        burst_steps: int = 32,
        cost: CostModel | None = None,
        choose: Callable[[SequenceStep], int] = choose_token,
    ) -> None:
        self.now_s = 0.0
        self.stages = [_TimedStage(SimulatedStage(stage)) for stage in stages]
        self.scheduler = Scheduler(
            stages,
            max_sequences=max_sequences,
            max_waiting=max_waiting,
            max_model_len=max_model_len,
            prefill_chunk=prefill_chunk,
            busy_chunk=busy_chunk,
            growth_horizon=growth_horizon,
            eos_token_ids=eos_token_ids,
            lanes=lanes,
            burst_steps=burst_steps,
            clock=lambda: self.now_s,
        )
        self.log: dict[str, RequestLog] = {}
        self.refused: dict[str, str] = {}
        self.plans: list[StepPlan | BurstPlan] = []
        self._cost = cost or CostModel()
        self._choose = choose
        self._calls = StageCalls(len(stages))
        self._burst: Burst | None = None
        self._burst_began_s = 0.0
        self._has_chunk = False  # one was sent since the burst under way
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._counter = itertools.count()

    def run(self, load: Iterable[Arrival], limit_s: float = 1e6) -> Report:
        """Play the load to its end.

        Raises:
            RuntimeError: work is left, but nothing is under way or to come: the scheduler is stuck.
        """
        for arrival in load:
            self._at(arrival.time_s, partial(self._add, arrival.request))
            if arrival.abort_s is not None:
                self._at(arrival.abort_s, partial(self._abort, arrival.request))
        while self._events:
            self.now_s = self._events[0][0]
            if self.now_s > limit_s:
                raise RuntimeError(f"not done after {limit_s} simulated seconds: {self.scheduler.counters()}")
            while self._events and self._events[0][0] <= self.now_s:
                heapq.heappop(self._events)[2]()
        if not (self.scheduler.is_idle and self._calls.is_empty):
            raise RuntimeError(f"stuck: {self.scheduler.counters()}")
        max_held = tuple(stage.counts.max_held for stage in self.stages)
        preempted = self.scheduler.counters().preempted
        return Report(self.log, self.refused, tuple(self.plans), self.now_s, max_held, preempted)

    def _at(self, time_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._counter), event))

    def _plan(self) -> None:
        """Give the stages what they can do now, as the scheduler's actor does."""
        scheduler, calls = self.scheduler, self._calls
        if self._burst is None:
            plan = scheduler.next_burst()
            self._release()
            if plan is not None:
                self.plans.append(plan)
                self._burst, self._has_chunk = Burst(BurstPlan.from_bytes(plan.to_bytes())), False
                calls.send_burst(self._burst)
            else:
                calls.flush()
        while self._burst is None or not self._has_chunk:
            chunk = scheduler.next_chunk()
            self._release()
            if chunk is None:
                break
            self.plans.append(chunk)
            calls.send_chunk(chunk, in_round=self._burst is not None)
            self._has_chunk = True
        if self._burst is not None and scheduler.should_cut():
            self._burst.cut()
        self._take(scheduler.take_outputs())
        for number in range(len(self.stages)):
            self._work(number)

    def _release(self) -> None:
        slots = self.scheduler.take_releases()
        if slots:
            self._calls.release(slots)

    def _work(self, number: int) -> None:
        """Let a stage go on with its calls until it is busy or has to wait."""
        stage = self.stages[number]
        while not stage.is_busy:
            if stage.burst is not None:
                step = self._next_burst_step(number, stage.burst)
                if step is None:
                    return
                self._compute(number, step, self._burst_step_done)
                return
            call = self._calls.head(number)
            if call is None:
                return
            self._calls.take(number)
            if isinstance(call, StepPlan):
                self._compute(number, call, self._chunk_done)
            elif isinstance(call, Burst):
                if number == 0 or not call.is_over:  # it may have been cut before a later stage came to it
                    self._begin_burst(number, call)
            else:
                stage.counts.release(call)

    def _begin_burst(self, number: int, burst: Burst) -> None:
        self.stages[number].burst = burst
        if number == 0:
            self._burst_began_s = self.now_s
            self.stages[0].lanes.extend(range(len(burst.plan.lanes)))

    def _next_burst_step(self, number: int, burst: Burst) -> StepPlan | None:
        stage = self.stages[number]
        if number:
            return stage.frames.popleft() if stage.frames else None
        while stage.lanes:
            step = burst.next_step(stage.lanes.popleft())
            if step is not None:
                return step
        if burst.is_over:
            self._end_burst(burst)
        return None

    def _compute(self, number: int, plan: StepPlan, done: Callable[[int, StepPlan], None]) -> None:
        self.stages[number].counts.run(plan)
        self.stages[number].is_busy = True
        self._at(self.now_s + self._cost.stage_ms(plan) / 1e3, lambda: self._computed(number, plan, done))

    def _computed(self, number: int, plan: StepPlan, done: Callable[[int, StepPlan], None]) -> None:
        self.stages[number].is_busy = False
        done(number, plan)
        for other in range(len(self.stages)):
            self._work(other)

    def _chunk_done(self, number: int, plan: StepPlan) -> None:
        if self._calls.chunk_done(plan, number):
            self._notify(plan)

    def _burst_step_done(self, number: int, plan: StepPlan) -> None:
        if number + 1 < len(self.stages):
            self.stages[number + 1].frames.append(plan)
            return
        assert self._burst is not None
        self._burst.apply(self._result(plan))
        self.stages[0].lanes.append(plan.lane)
        self._notify(plan)

    def _end_burst(self, burst: Burst) -> None:
        for stage in self.stages:
            stage.burst = None
        end = burst.end((self.now_s - self._burst_began_s) * 1e3)

        def hear() -> None:
            self._burst = None
            self._take(self.scheduler.end_burst(end))
            self._plan()

        self._at(self.now_s + self._cost.notice_ms / 1e3, hear)

    def _notify(self, plan: StepPlan) -> None:
        """The scheduler hears of a step's result."""

        def hear() -> None:
            self._take(self.scheduler.apply(self._result(plan)))
            self._plan()

        self._at(self.now_s + self._cost.notice_ms / 1e3, hear)

    def _result(self, plan: StepPlan) -> StepResult:
        result = scripted_result(plan, self._choose, [self._cost.stage_ms(plan)] * len(self.stages))
        return StepResult.from_bytes(result.to_bytes())

    def _add(self, request: Request) -> None:
        try:
            self.scheduler.add(request)
        except QSAError as error:
            self.refused[request.request_id] = str(error)
        else:
            self.log[request.request_id] = RequestLog(self.now_s)
            self._plan()

    def _abort(self, request: Request) -> None:
        self.scheduler.abort(request.request_id)
        self._plan()

    def _take(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            log = self.log[output.request_id]
            assert log.finish_reason is None, f"{output.request_id} has an output after its last one"
            log.token_ids += [token.token_id for token in output.tokens]
            log.token_times_s += [self.now_s] * len(output.tokens)
            if output.finish_reason is not None:
                log.finish_reason, log.finish_s, log.error = output.finish_reason, self.now_s, output.error
