"""Scheduler: queues, lanes and bookkeeping. Turns requests into step plans, and step results into outputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from qsa.errors import OverloadedError, QSAError, RequestError
from qsa.kernels.registry import SparseConfig
from qsa.scheduler.admission import Candidate, admit, check_request, queue_key
from qsa.scheduler.counters import SchedulerCounters
from qsa.scheduler.growth import PRIOR_HIT_RATE, ChunkMeter, HitRate, StageCapacity, merge_selection
from qsa.scheduler.plan import SelectionStats, SequenceResult, SequenceStep, StepPlan, StepResult
from qsa.scheduler.policy import SequenceView, decode_turns, plan_step
from qsa.scheduler.rates import Rates, RunningMean
from qsa.scheduler.request import FinishReason, Request, RequestOutput, TokenOutput
from qsa.scheduler.sequence import SequenceState
from qsa.scheduler.slots import SlotLedger, add_chunks

__all__ = ["Scheduler", "SchedulerCounters", "StageCapacity"]


@dataclass(frozen=True)
class _InFlight:
    plan: StepPlan
    sequences: tuple[SequenceState, ...]


class Scheduler:
    """Ask `next_plan` again for every idle lane after each `add`, `abort`, `apply` and `fail_plan`, until it gives None."""

    def __init__(
        self,
        stages: Sequence[StageCapacity],
        *,
        max_sequences: int,
        max_waiting: int,
        max_model_len: int,
        prefill_chunk: int,
        growth_horizon: int,
        eos_token_ids: Iterable[int],
        lanes: int = 2,
        clock: Callable[[], float] = time.monotonic,
        sparse: Mapping[int, SparseConfig] | None = None,
    ) -> None:
        self._meter = ChunkMeter(stages, sparse)
        self._max_sequences, self._max_waiting, self._max_model_len = max_sequences, max_waiting, max_model_len
        self._prefill_chunk, self._growth_horizon, self._lanes = prefill_chunk, growth_horizon, lanes
        self._eos_token_ids = frozenset(eos_token_ids)
        self._clock = clock
        self.epoch = 0
        self._waiting: dict[str, SequenceState] = {}
        self._running: dict[str, SequenceState] = {}  # these have a slot
        self._ended: list[SequenceState] = []  # these have a slot in flight, and nobody waits for them
        self._in_flight: dict[int, _InFlight] = {}  # by step
        self._slots = SlotLedger(self._meter.pools, max_sequences)
        self._outputs: list[RequestOutput] = []
        self._rates = Rates()
        self._prior_hit_rate = RunningMean()
        self._prefill_turn = self._decodes_since_chunk = self._step = self._arrivals = 0
        self._totals = dict.fromkeys(("finished", "aborted", "failed", "refused", "preempted", "generated", "computed"), 0)

    # requests

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError, ContextLengthError, CapacityError: it can never be answered.
            OverloadedError: the queue is full; `retry_after_s` comes from the current load.
        """
        try:
            self._check(request)
        except QSAError:
            self._totals["refused"] += 1
            raise
        prior = self._prior_hit_rate.value
        hit_rate = HitRate(PRIOR_HIT_RATE if prior is None else prior)
        self._waiting[request.request_id] = SequenceState(request, self._arrivals, self._clock(), hit_rate)
        self._arrivals += 1

    def abort(self, request_id: str) -> None:
        """End a request in whatever state it is; unknown and ended ids are ignored. Its memory follows within two plans."""
        sequence = self._waiting.get(request_id) or self._running.get(request_id)
        if sequence is not None:
            self._outputs.append(self._end(sequence, FinishReason.ABORT))

    def take_outputs(self) -> list[RequestOutput]:
        """Outputs since the last call or `apply`: admissions, aborts, failed plans."""
        outputs, self._outputs = self._outputs, []
        return outputs

    @property
    def is_idle(self) -> bool:
        """Nothing waits, runs, is in flight, or is still to be released."""
        return not (self._waiting or self._running or self._in_flight or self._slots.has_releases)

    # plans

    def next_plan(self, lane: int) -> StepPlan | None:
        """The lane's next step; None while it has one in flight or there is nothing for it to do.

        A plan without items only releases slots; its result is an empty one.
        """
        assert 0 <= lane < self._lanes, f"lane {lane} of {self._lanes}"
        if any(flight.plan.lane == lane for flight in self._in_flight.values()):
            return None
        released = self._slots.take_releases()
        self._admit()
        self._balance(lane)
        decision = plan_step(
            [self._view(sequence) for sequence in self._running.values()],
            lane,
            self._slots.free_chunks,
            returning=self._add_chunks(sequence.held for sequence in self._ended),
            prefill_turn=self._prefill_turn,
            prefill_due=self._decodes_since_chunk >= decode_turns(self._rates.chunk_ms.value, self._rates.decode_ms.value),
            decodes_elsewhere=any(not item.is_prefill for flight in self._in_flight.values() for item in flight.plan.items),
        )
        for sequence in self._running.values():
            sequence.is_stalled = sequence.request_id in decision.stalled
            sequence.is_leaving |= sequence.request_id in decision.preempt_later
        for request_id in decision.preempt:
            self._preempt(self._running[request_id])
        released += self._slots.take_releases()
        chosen = [self._running[request_id] for request_id in (*decision.decodes, *filter(None, [decision.prefill]))]
        if not chosen and not released:
            return None
        opened = tuple((s.slot, s.request.sparse_id) for s in chosen if not s.is_open and s.slot is not None)
        items = tuple(self._take_step(sequence) for sequence in chosen)
        self._count_turns(bool(decision.decodes), decision.prefill, lane)
        plan = StepPlan(self.epoch, self._step, lane, items, opened, tuple(released))
        self._in_flight[plan.step] = _InFlight(plan, tuple(chosen))
        self._step += 1
        return plan

    def apply(self, result: StepResult) -> list[RequestOutput]:
        """Take a step's result; returns every output not taken yet, in order.

        Results of an older epoch, and second ones, are dropped.
        """
        if result.epoch != self.epoch or result.step not in self._in_flight:
            return self.take_outputs()
        flight = self._in_flight.pop(result.step)
        results = {entry.request_id: entry for entry in result.results}
        selection = merge_selection(result.selection)
        plan = flight.plan
        if plan.items:
            has_prefill = any(item.is_prefill for item in plan.items)
            self._rates.add_step(self._clock(), plan.num_tokens, has_prefill, sum(result.compute_ms))
            self._totals["computed"] += plan.num_tokens
        for item, sequence in zip(plan.items, flight.sequences, strict=True):
            sequence.in_flight -= 1
            if not sequence.is_ended:
                stats = selection.get(item.request_id)
                self._outputs.append(self._advance(sequence, item, results.get(item.request_id), stats))
            self._settle(sequence)
        return self.take_outputs()

    def fail_plan(self, plan: StepPlan, message: str) -> None:
        """A plan did not run to its end: its sequences end with an error, and what it released is released again."""
        flight = self._in_flight.pop(plan.step, None) if plan.epoch == self.epoch else None
        if flight is None:
            return
        for sequence in flight.sequences:
            sequence.in_flight -= 1
            if not sequence.is_ended:
                self._outputs.append(self._end(sequence, FinishReason.ERROR, error=message))
            self._settle(sequence)
        unopened = {s.slot for s in self._running.values() if s.slot is not None and not s.is_open}
        self._slots.release_again(plan.release_slots, unopened)

    def restart(self) -> int:
        """Start a new epoch on empty stages: everything alive is computed again, results under way will be dropped."""
        self.epoch += 1
        self._in_flight.clear()
        self._ended.clear()
        for sequence in self._running.values():
            sequence.in_flight = 0
            sequence.forget_cache()
            self._waiting[sequence.request_id] = sequence
        self._running.clear()
        self._slots.clear()
        return self.epoch

    def counters(self) -> SchedulerCounters:
        totals = self._totals
        return SchedulerCounters(
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            num_in_flight=len(self._in_flight),
            num_slots=self._slots.num_slots,
            held_chunks=self._slots.held_chunks,
            pool_chunks=self._meter.pools,
            added=self._arrivals,
            finished=totals["finished"],
            aborted=totals["aborted"],
            failed=totals["failed"],
            refused=totals["refused"],
            preempted=totals["preempted"],
            generated_tokens=totals["generated"],
            computed_tokens=totals["computed"],
            steps=self._step,
            tokens_per_s=self._rates.tokens_per_s(self._clock()),
        )

    # steps of the above

    def _check(self, request: Request) -> None:
        if request.request_id in self._waiting or request.request_id in self._running:
            raise RequestError(f"request id {request.request_id} is in use; every request needs its own", param="request_id")
        check_request(request, self._max_model_len, self._meter)
        alive = len(self._waiting) + len(self._running)
        if alive >= self._max_sequences + self._max_waiting:
            retry_after_s = self._rates.retry_after_s(self._clock(), self._backlog_tokens(), alive)
            raise OverloadedError(
                f"{len(self._running)} requests run and {len(self._waiting)} wait, at most {self._max_waiting} may wait"
                f" for {self._max_sequences} places; try again in {retry_after_s:.0f} s, or raise limits.max_waiting",
                retry_after_s,
            )

    def _backlog_tokens(self) -> float:
        return sum(
            max(s.prompt_len - s.computed_len, 0)
            + max(self._rates.expected_completion(s.request.sampling.max_tokens) - len(s.generated), 1)
            for s in (*self._waiting.values(), *self._running.values())
        )

    def _admit(self) -> None:
        """Give slots to waiting sequences. None fits while one that runs lacks chunks: its prediction exceeds the pool."""
        if not self._waiting or not self._slots.num_free_slots:
            return
        now = self._clock()
        queue = sorted(self._waiting.values(), key=lambda s: self._queue_key(s, now))
        ended = self._add_chunks(sequence.held for sequence in self._ended)
        running = self._add_chunks([ended, *(self._predicted(s) for s in self._running.values())])
        final = self._add_chunks([ended, *(self._final(s) for s in self._running.values())])
        candidates = (
            Candidate(s.request_id, self._predicted(s), self._final(s), s.is_protected, not s.must_replay, s.num_bypassed)
            for s in queue
        )
        admission = admit(candidates, running, final, self._meter.pools, self._slots.num_free_slots)
        for request_id, count in admission.bypassed:
            self._waiting[request_id].num_bypassed += count
        for request_id in admission.admitted:
            sequence = self._waiting.pop(request_id)
            sequence.slot = self._slots.take_slot()
            sequence.held = (0,) * len(self._meter.pools)
            self._running[request_id] = sequence
            self._outputs.append(sequence.output())

    def _queue_key(self, s: SequenceState, now: float) -> tuple[bool, int, bool, int]:
        waited_s = now - s.arrival_s
        return queue_key(s.request.priority, waited_s, s.arrival, is_protected=s.is_protected, must_replay=s.must_replay)

    def _predicted(self, s: SequenceState) -> tuple[int, ...]:
        seq_len = s.seq_len + self._growth_horizon
        return self._meter.predicted(s.request.sparse_id, seq_len, s.final_len, s.hit_rate.value)

    def _final(self, s: SequenceState) -> tuple[int, ...]:
        return self._meter.chunks(s.request.sparse_id, s.final_len)

    def _add_chunks(self, rows: Iterable[Sequence[int]]) -> list[int]:
        return add_chunks(rows, len(self._meter.pools))

    def _lane_sizes(self) -> list[int]:
        sizes = [0] * self._lanes
        for sequence in self._running.values():
            if sequence.lane is not None:
                sizes[sequence.lane] += 1
        return sizes

    def _balance(self, lane: int) -> None:
        """Hand decodes of a lane that has more than its share to the emptiest lane."""
        sizes = self._lane_sizes()
        movable = [s for s in self._running.values() if s.lane == lane and s.in_flight == 0]
        while movable and sizes[lane] - min(sizes) >= 2:
            other = sizes.index(min(sizes))
            movable.pop().lane = other
            sizes[lane] -= 1
            sizes[other] += 1

    def _view(self, s: SequenceState) -> SequenceView:
        need = self._meter.growth(s.request.sparse_id, s.held, s.planned_len, s.next_end(self._prefill_chunk))
        return SequenceView(
            request_id=s.request_id,
            rank=s.rank,
            lane=s.lane,
            is_prefill=s.is_prefill,
            can_step=s.can_step,
            is_busy=s.in_flight > 0,
            is_leaving=s.is_leaving,
            is_stalled=s.is_stalled,
            need=need,
            held=s.held,
            remaining=max(0, s.prompt_len - s.planned_len),
        )

    def _take_step(self, sequence: SequenceState) -> SequenceStep:
        """Plan the sequence's next step and book its chunks."""
        step = sequence.next_step(self._prefill_chunk)
        added = self._meter.growth(sequence.request.sparse_id, sequence.held, step.start, step.end)
        if any(added):
            self._slots.book(added)
            sequence.held = tuple(old + new for old, new in zip(sequence.held, added, strict=True))
        sequence.is_open = True
        sequence.planned_len = step.end
        sequence.in_flight += 1
        return step

    def _count_turns(self, has_decodes: bool, prefill: str | None, lane: int) -> None:
        self._decodes_since_chunk += has_decodes
        if prefill is None:
            return
        self._decodes_since_chunk = 0
        self._prefill_turn += 1
        sequence = self._running[prefill]
        if not sequence.is_prefill:  # that was the last chunk of its prompt
            sizes = self._lane_sizes()
            sequence.lane = lane if sizes[lane] == min(sizes) else sizes.index(min(sizes))

    def _advance(
        self, sequence: SequenceState, item: SequenceStep, result: SequenceResult | None, stats: SelectionStats | None
    ) -> RequestOutput:
        """Take one sequence's part of a result."""
        sequence.computed_len = item.end
        share = None
        if stats is not None and stats.context > 0:
            share = stats.attended / stats.context
            if stats.num_selected and not item.is_prefill:
                sequence.hit_rate.add(stats.hit_rate)
        error = result.error if result is not None else None
        token = result.token if result is not None else None
        if error is None and item.sampling is not None and token is None:
            error = "the last stage gave no token for this step"
        if error is not None:
            return self._end(sequence, FinishReason.ERROR, error=error)
        tokens: tuple[TokenOutput, ...] = ()
        if item.sampling is not None and token is not None:
            sequence.generated.append(token.token_id)
            self._totals["generated"] += 1
            tokens = (token,)
            reason = sequence.finish_reason(self._eos_token_ids)
            if reason is not None:
                return self._end(sequence, reason, tokens if reason is FinishReason.LENGTH else (), share=share)
        return sequence.output(tokens, share=share)

    def _end(
        self,
        sequence: SequenceState,
        reason: FinishReason,
        tokens: tuple[TokenOutput, ...] = (),
        *,
        error: str | None = None,
        share: float | None = None,
    ) -> RequestOutput:
        """The last output. The slot follows when nothing of the sequence is in flight."""
        sequence.is_ended = True
        self._totals[{FinishReason.ABORT: "aborted", FinishReason.ERROR: "failed"}.get(reason, "finished")] += 1
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._rates.completion_len.add(len(sequence.generated))
            self._prior_hit_rate.add(sequence.hit_rate.value)
        self._waiting.pop(sequence.request_id, None)
        if self._running.pop(sequence.request_id, None) is not None:
            self._ended.append(sequence)
            self._settle(sequence)
        return sequence.output(tokens, reason, error, share)

    def _settle(self, sequence: SequenceState) -> None:
        """Give a sequence's slot back, if it is to go and nothing of it is in flight."""
        if sequence.in_flight:
            return
        if sequence.is_ended:
            if sequence in self._ended:
                self._ended.remove(sequence)
                self._vacate(sequence)
        elif sequence.is_leaving:
            self._preempt(sequence)

    def _preempt(self, sequence: SequenceState) -> None:
        self._running.pop(sequence.request_id)
        self._vacate(sequence)
        sequence.forget_cache()
        sequence.num_preemptions += 1
        self._totals["preempted"] += 1
        self._waiting[sequence.request_id] = sequence

    def _vacate(self, sequence: SequenceState) -> None:
        assert sequence.slot is not None and sequence.in_flight == 0
        if sequence.is_open:
            self._slots.release_later(sequence.slot, sequence.held)
        else:
            self._slots.return_slot(sequence.slot)
