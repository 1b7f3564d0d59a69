"""Scheduler: queues and bookkeeping. Turns requests into plans for the stages, and their results into outputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from qsa.errors import OverloadedError, QSAError, RequestError
from qsa.kernels.registry import SparseConfig
from qsa.scheduler.admission import check_request
from qsa.scheduler.counters import SchedulerCounters
from qsa.scheduler.flights import BurstFlight, ChunkFlight, Flights
from qsa.scheduler.growth import PRIOR_HIT_RATE, ChunkMeter, HitRate, StageCapacity, merge_selection
from qsa.scheduler.places import Places
from qsa.scheduler.plan import BurstEnd, BurstPlan, SelectionStats, SequenceResult, StepPlan, StepResult
from qsa.scheduler.policy import decode_turns, longest_burst, plan_chunk, plan_decodes
from qsa.scheduler.rates import Rates, RunningMean
from qsa.scheduler.request import FinishReason, Request, RequestOutput, TokenOutput
from qsa.scheduler.sequence import SequenceState
from qsa.scheduler.trials import Trials

__all__ = ["Scheduler", "SchedulerCounters", "StageCapacity"]


class Scheduler:
    """Ask after each `add`, `abort`, `apply`, `end_burst` and `fail_plan`: `next_burst`, then `next_chunk` until None.

    After each of the two, also when it gave None, and before its plan is sent, the stages must get what `take_releases` gives.
    """

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
        burst_steps: int = 32,
        busy_chunk: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        sparse: Mapping[int, SparseConfig] | None = None,
    ) -> None:
        """
        Args:
            prefill_chunk: tokens of a prompt's chunk. busy_chunk: the same while others decode; None: no less.
            lanes:         micro-batches that a burst is split into, at most.
            burst_steps:   steps of a burst while no prompt can be worked on.
        """
        self._meter = ChunkMeter(stages, sparse)
        self._max_sequences, self._max_waiting, self._max_model_len = max_sequences, max_waiting, max_model_len
        self._prefill_chunk, self._busy_chunk = prefill_chunk, prefill_chunk if busy_chunk is None else busy_chunk
        self._lanes, self._burst_steps = lanes, burst_steps
        self._eos_token_ids = frozenset(eos_token_ids)
        self._clock = clock
        self.epoch = 0
        self._places = Places(self._meter, max_sequences, growth_horizon)
        self._flights = Flights()
        self._trials = Trials(self._flights, self._places, self._prefill_chunk)
        self._outputs: list[RequestOutput] = []
        self._rates = Rates()
        self._prior_hit_rate = RunningMean()
        self._is_chunk_due = True  # no chunk of a prompt was planned since the last burst
        self._prefill_turn = self._step = self._arrivals = 0
        self._totals = dict.fromkeys(("finished", "aborted", "failed", "refused", "generated", "computed", "steps"), 0)

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
        self._places.waiting[request.request_id] = SequenceState(request, self._arrivals, self._clock(), hit_rate)
        self._arrivals += 1
        if self._flights.burst is not None and self._places.slots.num_free_slots:
            self._flights.burst.has_news = True

    def abort(self, request_id: str) -> None:
        """End a request in whatever state it is; unknown and ended ids are ignored.

        Its client hears at once; its slot follows when nothing of it is in flight.
        """
        sequence = self._places.get(request_id)
        if sequence is not None:
            burst = self._flights.burst
            if burst is not None and sequence in burst.sequences:
                burst.was_aborted = True
            self._outputs.append(self._end(sequence, FinishReason.ABORT))

    def take_outputs(self) -> list[RequestOutput]:
        """Outputs since the last call or `apply`: admissions, aborts, failed plans."""
        outputs, self._outputs = self._outputs, []
        return outputs

    @property
    def is_idle(self) -> bool:
        """Nothing waits, runs, is in flight, or is still to be released."""
        return self._places.is_empty and not len(self._flights)

    # plans

    def next_burst(self) -> BurstPlan | None:
        """Decode steps of everybody who can decode; None while a burst is in flight, or when there is nothing to decode."""
        flights, places = self._flights, self._places
        if flights.burst is not None:
            return None
        self._admit()
        on_trial = self._trials.next()
        if on_trial is not None and (len(flights) or not on_trial.can_decode):
            return None  # nothing new until it can go on alone
        decodes = [s for s in places.running.values() if s.can_decode and not self._trials.must_be_alone(s)]
        candidates = decodes if on_trial is None else [on_trial]
        if not candidates:
            return None
        chosen = places.decide(lambda s: s.burst_end(1) if s in candidates else None, plan_decodes)
        if not chosen:
            return None
        has_prompts = bool(flights.chunks) or any(s.can_chunk and not s.is_stalled for s in places.running.values())
        wanted = self._short_burst() if has_prompts else self._burst_steps
        wanted = min(wanted, max(s.final_len - s.planned_len for s in chosen))
        wanted = min(wanted, self._trials.most_steps(chosen) or wanted)
        num_steps = longest_burst(wanted, lambda steps: places.has_room(chosen, steps))
        num_lanes = min(self._lanes, len(chosen))
        lanes = [chosen[lane::num_lanes] for lane in range(num_lanes)]
        items = tuple(tuple(s.burst_item(num_steps) for s in lane) for lane in lanes)
        plan = BurstPlan(self.epoch, self._step, items, num_steps, tuple(sorted(self._eos_token_ids)))
        for sequence in chosen:
            places.book(sequence, sequence.burst_end(num_steps))
        flights.burst = BurstFlight(plan, tuple(chosen), lanes)
        self._step = plan.end_step
        self._is_chunk_due = True
        return plan

    def next_chunk(self) -> StepPlan | None:
        """The next chunk of a prompt; None when there is none, the stages have enough of them, or decodes come first."""
        self._admit()
        flights, places = self._flights, self._places
        running = places.running.values()
        if len(flights.chunks) > len(self._meter.pools) or not any(s.can_chunk for s in running):
            return None
        on_trial = self._trials.next()
        if on_trial is not None and (len(flights) or not on_trial.can_chunk):
            return None
        has_decodes = flights.burst is not None or any(s.can_decode and not s.is_stalled for s in running)
        if on_trial is None and has_decodes and not self._is_chunk_due:
            return None
        candidates = (
            [s for s in running if s.can_chunk and not self._trials.must_be_alone(s)] if on_trial is None else [on_trial]
        )
        is_busy = flights.burst is not None or any(not s.is_prefill for s in running)
        size = self._busy_chunk if is_busy else self._prefill_chunk
        chosen = places.decide(
            lambda s: s.chunk_end(size) if s in candidates else None,
            lambda views, free, returning: plan_chunk(views, free, returning, self._prefill_turn),
        )
        if not chosen:
            return None
        (sequence,) = chosen
        item = sequence.chunk_step(sequence.chunk_end(size))
        opened = () if sequence.is_open else ((item.slot, sequence.request.sparse_id),)
        plan = StepPlan(self.epoch, self._step, 0, (item,), opened)
        places.book(sequence, item.end)
        sequence.take_chunk(item.end)
        flights.chunks[plan.step] = ChunkFlight(plan, sequence)
        if flights.burst is not None:
            flights.burst.has_chunk = True
        self._step += 1
        self._prefill_turn += 1
        self._is_chunk_due = False
        return plan

    def take_releases(self) -> tuple[int, ...]:
        """Slots that every stage must release now, before any plan that is not sent yet."""
        return self._places.slots.take_releases()

    def should_cut(self) -> bool:
        """The burst in flight ought to end early: somebody waits for its chunks, for its slots, or for its end."""
        burst, places = self._flights.burst, self._places
        if burst is None:
            return False
        wants_room = bool(places.waiting) or any(s.is_stalled for s in places.running.values())
        if burst.was_aborted or any(s.is_leaving or (s.is_ended and wants_room) for s in burst.sequences):
            return True
        if burst.plan.max_steps <= self._short_burst():
            return False
        if burst.has_chunk or burst.has_news:
            return True
        return any((s.can_decode or s.can_chunk) and not s.is_stalled for s in places.running.values())

    # results

    def apply(self, result: StepResult) -> list[RequestOutput]:
        """Take the result of a chunk, or of a lane's step of the burst in flight; returns every output not taken yet, in order.

        Results of an older epoch, and second ones, are dropped.
        """
        if result.epoch == self.epoch:
            chunk = self._flights.take_chunk(result.step)
            burst = self._flights.take_burst_step(result) if chunk is None else None
            if chunk is not None:
                self._apply_chunk(chunk, result)
            elif burst is not None:
                self._apply_burst_step(burst, result)
        return self.take_outputs()

    def end_burst(self, end: BurstEnd) -> list[RequestOutput]:
        """The burst is over, and all its results have been applied: its sequences are free again. Outputs as from `apply`."""
        burst = self._flights.take_burst(end.step) if end.epoch == self.epoch else None
        if burst is not None:
            assert tuple(burst.num_steps) == end.num_steps, f"{burst.num_steps} results of {end.num_steps} steps are here"
            self._rates.add_burst_time(end.wall_ms, max(end.num_steps))
            for sequence in burst.sequences:
                self._places.land(sequence)
        return self.take_outputs()

    def fail_plan(self, plan: StepPlan | BurstPlan, message: str) -> None:
        """A plan did not run to its end: its sequences end with an error."""
        if plan.epoch != self.epoch:
            return
        chunk, burst = self._flights.take_chunk(plan.step), self._flights.take_burst(plan.step)
        sequences = [chunk.sequence] if chunk is not None else burst.sequences if burst is not None else ()
        for sequence in sequences:
            if not sequence.is_ended:
                self._outputs.append(self._end(sequence, FinishReason.ERROR, error=message))
            self._places.land(sequence)

    def restart(self, message: str | None = None) -> int:
        """Start a new epoch on empty stages: everything alive is computed again, results under way will be dropped.

        message: for sequences that were in flight in too many restarts, and end with an error.

        Returns:
            The new epoch.
        """
        self.epoch += 1
        ends = self._flights.ends()
        self._flights.clear()
        for sequence in self._places.restart():
            if id(sequence) in ends and not sequence.note_restart(ends[id(sequence)]):
                error = message or "the stages were lost again and again while this request was being computed"
                self._outputs.append(self._end(sequence, FinishReason.ERROR, error=error))
        self._is_chunk_due = True
        return self.epoch

    def interrupt(self, message: str) -> list[RequestOutput]:
        """End everything that waits or runs, through no fault of its own."""
        for sequence in (*self._places.waiting.values(), *self._places.running.values()):
            self._outputs.append(self._end(sequence, FinishReason.LOST, error=message))
        return self.take_outputs()

    def counters(self) -> SchedulerCounters:
        totals = self._totals
        return SchedulerCounters(
            num_waiting=len(self._places.waiting),
            num_running=len(self._places.running),
            num_in_flight=len(self._flights),
            num_slots=self._places.slots.num_slots,
            held_chunks=self._places.slots.held_chunks,
            pool_chunks=self._meter.pools,
            added=self._arrivals,
            finished=totals["finished"],
            aborted=totals["aborted"],
            failed=totals["failed"],
            refused=totals["refused"],
            preempted=self._places.num_preempted,
            generated_tokens=totals["generated"],
            computed_tokens=totals["computed"],
            steps=totals["steps"],
            tokens_per_s=self._rates.tokens_per_s(self._clock()),
        )

    # steps of the above

    def _check(self, request: Request) -> None:
        if self._places.get(request.request_id) is not None:
            raise RequestError(f"request id {request.request_id} is in use; every request needs its own", param="request_id")
        check_request(request, self._max_model_len, self._meter)
        alive = len(self._places.waiting) + len(self._places.running)
        if alive >= self._max_sequences + self._max_waiting:
            retry_after_s = self._rates.retry_after_s(self._clock(), self._backlog_tokens(), alive)
            raise OverloadedError(
                f"{len(self._places.running)} requests run and {len(self._places.waiting)} wait, at most {self._max_waiting}"
                f" may wait for {self._max_sequences} places; try again in {retry_after_s:.0f} s, or raise limits.max_waiting",
                retry_after_s,
            )

    def _backlog_tokens(self) -> float:
        return sum(
            max(s.prompt_len - s.computed_len, 0)
            + max(self._rates.expected_completion(s.request.sampling.max_tokens) - len(s.generated), 1)
            for s in (*self._places.waiting.values(), *self._places.running.values())
        )

    def _admit(self) -> None:
        self._outputs += [sequence.output() for sequence in self._places.admit(self._clock())]

    def _short_burst(self) -> int:
        return min(self._burst_steps, decode_turns(self._rates.chunk_ms.value, self._rates.decode_ms.value))

    def _apply_chunk(self, flight: ChunkFlight, result: StepResult) -> None:
        (item,) = flight.plan.items
        num_tokens = len(item.token_ids)
        self._count_step(num_tokens)
        self._rates.add_chunk_time(num_tokens, max(result.compute_ms, default=0.0), self._busy_chunk)
        if not flight.sequence.is_ended:
            entry, stats = _entries(result).get(item.request_id), merge_selection(result.selection).get(item.request_id)
            self._advance(flight.sequence, item.end, item.sampling is not None, result.error, entry, stats)
        self._places.land(flight.sequence)

    def _apply_burst_step(self, flight: BurstFlight, result: StepResult) -> None:
        self._count_step(len(result.results))
        entries, selection = _entries(result), merge_selection(result.selection)
        alive = [sequence for sequence in flight.lanes[result.lane] if not sequence.is_ended]
        for sequence in alive:
            name, is_sampled = sequence.request_id, sequence.planned_len + 1 == sequence.seq_len
            sequence.planned_len += 1
            self._advance(sequence, sequence.planned_len, is_sampled, result.error, entries.get(name), selection.get(name))
        flight.lanes[result.lane] = [sequence for sequence in alive if not sequence.is_ended]

    def _count_step(self, num_tokens: int) -> None:
        self._totals["steps"] += 1
        self._totals["computed"] += num_tokens
        self._rates.add_step(self._clock(), num_tokens)

    def _advance(
        self,
        sequence: SequenceState,
        end: int,
        is_sampled: bool,
        error: str | None,
        result: SequenceResult | None,
        stats: SelectionStats | None,
    ) -> None:
        """Take one sequence's part of a result."""
        sequence.note_computed(end)
        share = None
        if stats is not None and stats.context > 0:
            share = stats.attended / stats.context
            if stats.num_selected and end > sequence.prompt_len:
                sequence.hit_rate.add(stats.hit_rate)
        token = None
        if result is not None:
            token, error = result.token, error or result.error
        if error is None and is_sampled and token is None:
            error = "the last stage gave no token for this step"
        if error is not None:
            self._outputs.append(self._end(sequence, FinishReason.ERROR, error=error))
            return
        tokens: tuple[TokenOutput, ...] = ()
        if is_sampled and token is not None:
            sequence.generated.append(token.token_id)
            self._totals["generated"] += 1
            tokens = (token,)
            reason = sequence.finish_reason(self._eos_token_ids)
            if reason is not None:
                kept = tokens if reason is FinishReason.LENGTH else ()
                self._outputs.append(self._end(sequence, reason, kept, share=share))
                return
        self._outputs.append(sequence.output(tokens, share=share))

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
        kinds = {FinishReason.ABORT: "aborted", FinishReason.ERROR: "failed", FinishReason.LOST: "failed"}
        self._totals[kinds.get(reason, "finished")] += 1
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._rates.completion_len.add(len(sequence.generated))
            self._prior_hit_rate.add(sequence.hit_rate.value)
        self._places.leave(sequence)
        return sequence.output(tokens, reason, error, share)


def _entries(result: StepResult) -> dict[str, SequenceResult]:
    return {entry.request_id: entry for entry in result.results}
