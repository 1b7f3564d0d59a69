"""Run the real Scheduler against a made-up load and stages that only count, on a clock of its own: seconds in milliseconds.

The simulated stages check every plan as a real one would suffer it: slots, positions and tokens must follow on, and a
chunk that is not there is an error. Tokens come from a hash of (seed, position), so a text does not depend on timing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from qsa.errors import OutOfChunksError, QSAError
from qsa.memory.layout import sequence_chunks
from qsa.scheduler.growth import StageCapacity
from qsa.scheduler.plan import SelectionStats, SequenceResult, SequenceStep, StepPlan, StepResult
from qsa.scheduler.request import FinishReason, Request, RequestOutput, SamplingParams, TokenOutput
from qsa.scheduler.scheduler import Scheduler

VOCAB_SIZE = 1000


@dataclass(frozen=True)
class Arrival:
    """A request and when it comes; `abort_s`: when its client leaves."""

    time_s: float
    request: Request
    abort_s: float | None = None


@dataclass(frozen=True)
class CostModel:
    """Time of a plan on one stage: a constant, and an amount for every prefilled and every decoded token."""

    step_ms: float = 1.0
    prefill_token_ms: float = 0.6
    decode_token_ms: float = 2.0

    def stage_ms(self, plan: StepPlan) -> float:
        prefill = sum(len(item.token_ids) for item in plan.items if item.is_prefill)
        decode = sum(1 for item in plan.items if not item.is_prefill)
        return self.step_ms + prefill * self.prefill_token_ms + decode * self.decode_token_ms


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
    def longest_gap_s(self) -> float:
        """Longest time between two tokens."""
        return max((b - a for a, b in zip(self.token_times_s, self.token_times_s[1:], strict=False)), default=0.0)


@dataclass(frozen=True)
class Report:
    """The outcome of a run. `refused`: requests that `add` did not take, with the message."""

    requests: dict[str, RequestLog]
    refused: dict[str, str]
    plans: tuple[StepPlan, ...]
    duration_s: float
    max_held: tuple[int, ...]
    num_preempted: int


class SimulatedStage:
    """Counts the chunks of one stage exactly, and holds plans to what a real stage needs."""

    def __init__(self, capacity: StageCapacity) -> None:
        self._capacity = capacity
        self._slots: dict[int, tuple[int, list[int]]] = {}  # sparse id, tokens computed so far
        self.max_held = 0

    @property
    def held(self) -> int:
        return sum(self._chunks(sparse_id, len(tokens)) for sparse_id, tokens in self._slots.values())

    @property
    def num_sequences(self) -> int:
        return len(self._slots)

    def run(self, plan: StepPlan) -> None:
        """Release, open, extend.

        Raises:
            OutOfChunksError: the pool would have to hold more chunks than it has.
        """
        for slot in plan.release_slots:
            self._slots.pop(slot, None)
        for slot, sparse_id in plan.open_slots:
            assert slot not in self._slots, f"slot {slot} is opened twice"
            self._slots[slot] = (sparse_id, [])
        slots = [item.slot for item in plan.items]
        assert len(slots) == len(set(slots)), f"a plan holds a slot twice: {slots}"
        assert [item.is_prefill for item in plan.items] == sorted(item.is_prefill for item in plan.items)
        for item in plan.items:
            assert item.slot in self._slots, f"slot {item.slot} of {item.request_id} is not open"
            tokens = self._slots[item.slot][1]
            assert item.token_ids and item.start == len(tokens), f"{item.request_id} starts at {item.start} of {len(tokens)}"
            assert item.is_prefill or len(item.token_ids) == 1
            tokens.extend(item.token_ids)
            if self.held > self._capacity.num_chunks:
                raise OutOfChunksError(f"step {plan.step} needs {self.held} chunks of {self._capacity.num_chunks}")
        self.max_held = max(self.max_held, self.held)

    def tokens(self, slot: int) -> list[int]:
        """Tokens computed in an open slot."""
        return self._slots[slot][1]

    def _chunks(self, sparse_id: int, seq_len: int) -> int:
        c = self._capacity
        return sequence_chunks(c.kv, c.summaries[sparse_id], c.num_layers, seq_len)


def next_token(sampling: SamplingParams, position: int) -> int:
    """The scripted model: a token that depends on the seed and the position alone; never 0, which tests use as end."""
    return 1 + (sampling.seed * 2654435761 + position * 40503 + (position * position) % 7919) % (VOCAB_SIZE - 1)


def scripted_result(plan: StepPlan, choose: Callable[[SequenceStep], int], stage_ms: Sequence[float] = ()) -> StepResult:
    """What the last stage answers to a plan."""
    results = tuple(
        SequenceResult(item.request_id, TokenOutput(choose(item)) if item.sampling is not None else None) for item in plan.items
    )
    selection = tuple(
        SelectionStats(item.request_id, attended=min(item.end, 1056), context=item.end, num_selected=16, newly_hit=4)
        for item in plan.items
    )
    return StepResult(plan.epoch, plan.step, plan.lane, results, selection, tuple(stage_ms))


def choose_token(item: SequenceStep) -> int:
    """The scripted model's answer to a step that samples."""
    assert item.sampling is not None
    return next_token(item.sampling, item.end)


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
        growth_horizon: int = 256,
        eos_token_ids: Iterable[int] = (0,),
        lanes: int = 2,
        cost: CostModel | None = None,
        choose: Callable[[SequenceStep], int] = choose_token,
    ) -> None:
        self.now_s = 0.0
        self.lanes = lanes
        self.stages = [SimulatedStage(stage) for stage in stages]
        self.scheduler = Scheduler(
            stages,
            max_sequences=max_sequences,
            max_waiting=max_waiting,
            max_model_len=max_model_len,
            prefill_chunk=prefill_chunk,
            growth_horizon=growth_horizon,
            eos_token_ids=eos_token_ids,
            lanes=lanes,
            clock=lambda: self.now_s,
        )
        self.log: dict[str, RequestLog] = {}
        self.refused: dict[str, str] = {}
        self.plans: list[StepPlan] = []
        self._cost = cost or CostModel()
        self._choose = choose
        self._stage_free_s = [0.0] * len(stages)
        self._under_way: list[tuple[float, int, StepResult]] = []

    def run(self, load: Iterable[Arrival], limit_s: float = 1e6) -> Report:
        """Play the load to its end.

        Raises:
            RuntimeError: work is left, but nothing is under way or to come: the scheduler is stuck.
        """
        events: list[tuple[float, int, Callable[[], None]]] = []
        for number, arrival in enumerate(load):
            events.append((arrival.time_s, 2 * number, lambda a=arrival: self._add(a.request)))  # type: ignore[misc]
            if arrival.abort_s is not None:
                events.append((arrival.abort_s, 2 * number + 1, lambda a=arrival: self._abort(a.request)))  # type: ignore[misc]
        heapq.heapify(events)
        while True:
            self._start_plans()
            times = [queue[0][0] for queue in (events, self._under_way) if queue]
            if not times:
                break
            self.now_s = min(times)
            if self.now_s > limit_s:
                raise RuntimeError(f"not done after {limit_s} simulated seconds: {self.scheduler.counters()}")
            while events and events[0][0] <= self.now_s:
                heapq.heappop(events)[2]()
            while self._under_way and self._under_way[0][0] <= self.now_s:
                self._take(self.scheduler.apply(heapq.heappop(self._under_way)[2]))
        if not self.scheduler.is_idle:
            raise RuntimeError(f"stuck: {self.scheduler.counters()}")
        max_held = tuple(stage.max_held for stage in self.stages)
        preempted = self.scheduler.counters().preempted
        return Report(self.log, self.refused, tuple(self.plans), self.now_s, max_held, preempted)

    def _start_plans(self) -> None:
        """Every idle lane gets a plan; each stage works through plans in order, one at a time."""
        for lane in range(self.lanes):
            plan = self.scheduler.next_plan(lane)
            self._take(self.scheduler.take_outputs())
            if plan is None:
                continue
            self.plans.append(plan)
            done_s, stage_ms = self.now_s, self._cost.stage_ms(plan)
            for number, stage in enumerate(self.stages):
                stage.run(plan)
                done_s = max(done_s, self._stage_free_s[number]) + stage_ms / 1e3
                self._stage_free_s[number] = done_s
            result = scripted_result(plan, self._choose, [stage_ms] * len(self.stages))
            heapq.heappush(self._under_way, (done_s, plan.step, result))

    def _add(self, request: Request) -> None:
        try:
            self.scheduler.add(request)
        except QSAError as error:
            self.refused[request.request_id] = str(error)
        else:
            self.log[request.request_id] = RequestLog(self.now_s)

    def _abort(self, request: Request) -> None:
        self.scheduler.abort(request.request_id)
        self._take(self.scheduler.take_outputs())

    def _take(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            log = self.log[output.request_id]
            assert log.finish_reason is None, f"{output.request_id} has an output after its last one"
            log.token_ids += [token.token_id for token in output.tokens]
            log.token_times_s += [self.now_s] * len(output.tokens)
            if output.finish_reason is not None:
                log.finish_reason, log.finish_s, log.error = output.finish_reason, self.now_s, output.error
