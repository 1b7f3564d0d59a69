"""Places: who waits, who runs, and which slot and chunks everyone who runs holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from qsa.scheduler.admission import Candidate, admit, queue_key
from qsa.scheduler.growth import ChunkMeter
from qsa.scheduler.policy import Decision, SequenceView
from qsa.scheduler.sequence import SequenceState
from qsa.scheduler.slots import SlotLedger, add_chunks


class Places:
    """The state: the queue, the sequences that have a slot, and the ledger of slots and chunks.

    Attributes:
        waiting, running: by request id; those that run have a slot.
        num_preempted:    how often a sequence had to give its slot back.
    """

    def __init__(self, meter: ChunkMeter, max_sequences: int, growth_horizon: int) -> None:
        self.waiting: dict[str, SequenceState] = {}
        self.running: dict[str, SequenceState] = {}
        self.slots = SlotLedger(meter.pools, max_sequences)
        self.num_preempted = 0
        self._ended: list[SequenceState] = []  # these have a slot in flight, and nobody waits for them
        self._meter, self._growth_horizon = meter, growth_horizon

    @property
    def is_empty(self) -> bool:
        """Nobody waits or runs, and no slot is in use or still to be released."""
        return not (self.waiting or self.running or self._ended or self.slots.has_releases)

    def get(self, request_id: str) -> SequenceState | None:
        """A sequence that waits or runs."""
        return self.waiting.get(request_id) or self.running.get(request_id)

    def admit(self, now: float) -> list[SequenceState]:
        """Give slots to waiting sequences. None fits while one that runs lacks chunks: its prediction exceeds the pool."""
        if not self.waiting or not self.slots.num_free_slots:
            return []
        queue = sorted(self.waiting.values(), key=lambda s: _queue_key(s, now))
        ended = self._returning()
        running = self._add_chunks([ended, *(self._predicted(s) for s in self.running.values())])
        final = self._add_chunks([ended, *(self._final(s) for s in self.running.values())])
        candidates = (
            Candidate(s.request_id, self._predicted(s), self._final(s), s.is_protected, not s.must_replay, s.num_bypassed)
            for s in queue
        )
        admission = admit(candidates, running, final, self._meter.pools, self.slots.num_free_slots)
        for request_id, count in admission.bypassed:
            self.waiting[request_id].num_bypassed += count
        admitted = [self.waiting.pop(request_id) for request_id in admission.admitted]
        for sequence in admitted:
            sequence.slot = self.slots.take_slot()
            sequence.held = (0,) * len(self._meter.pools)
            self.running[sequence.request_id] = sequence
        return admitted

    def decide(
        self,
        next_len: Callable[[SequenceState], int | None],
        decide: Callable[[Sequence[SequenceView], Sequence[int], Sequence[int]], Decision],
    ) -> list[SequenceState]:
        """Decide who goes on, and preempt whom the decision preempts; returns the chosen.

        Args:
            next_len: a sequence's planned_len after what is decided about; None when it cannot be planned now.
            decide:   gets all views, free chunks, and chunks that come back from sequences that have ended.
        """
        views = [self._view(sequence, next_len(sequence)) for sequence in self.running.values()]
        decision = decide(views, self.slots.free_chunks, self._returning())
        for sequence in self.running.values():
            sequence.is_stalled = sequence.request_id in decision.stalled
            sequence.is_leaving |= sequence.request_id in decision.preempt_later
        for request_id in decision.preempt:
            self._preempt(self.running[request_id])
        return [self.running[request_id] for request_id in decision.chosen]

    def has_room(self, chosen: Sequence[SequenceState], num_steps: int) -> bool:
        """Chunks are free for a burst of so many steps, and no weaker sequence gets what a stalled one waits for."""
        needs = [self._growth(s, s.burst_end(num_steps)) for s in chosen]
        stalled = [s.rank for s in self.running.values() if s.is_stalled]
        if stalled and any(any(need) and s.rank > min(stalled) for s, need in zip(chosen, needs, strict=True)):
            return False
        return all(need <= free for need, free in zip(self._add_chunks(needs), self.slots.free_chunks, strict=True))

    def fits(self, sequence: SequenceState, end: int) -> bool:
        """It can grow to `end` tokens without anybody giving way."""
        growth = self._growth(sequence, end)
        return all(need <= free for need, free in zip(growth, self.slots.free_chunks, strict=True))

    def book(self, sequence: SequenceState, end: int) -> None:
        """A plan lets the sequence grow to `end` tokens."""
        added = self._growth(sequence, end)
        if any(added):
            self.slots.book(added)
            sequence.held = tuple(old + new for old, new in zip(sequence.held, added, strict=True))
        sequence.in_flight += 1

    def land(self, sequence: SequenceState) -> None:
        """A plan of it is no longer in flight: chunks that were booked and not used go back, and all when it is to go."""
        sequence.in_flight -= 1
        if not sequence.is_ended:
            used = self._meter.chunks(sequence.request.sparse_id, sequence.planned_len)
            if used != sequence.held:
                self.slots.give_back([held - need for held, need in zip(sequence.held, used, strict=True)])
                sequence.held = used
        self._settle(sequence)

    def leave(self, sequence: SequenceState) -> None:
        """It has ended. Its slot follows when nothing of it is in flight."""
        self.waiting.pop(sequence.request_id, None)
        if self.running.pop(sequence.request_id, None) is not None:
            self._ended.append(sequence)
            self._settle(sequence)

    def restart(self) -> list[SequenceState]:
        """Everyone who runs goes back to the queue, for stages that hold nothing; returns them."""
        moved = list(self.running.values())
        for sequence in moved:
            sequence.in_flight = 0
            sequence.forget_cache()
            self.waiting[sequence.request_id] = sequence
        self.running.clear()
        self._ended.clear()
        self.slots.clear()
        return moved

    def _view(self, s: SequenceState, next_len: int | None) -> SequenceView:
        return SequenceView(
            request_id=s.request_id,
            rank=s.rank,
            can_step=next_len is not None,
            is_busy=s.in_flight > 0,
            is_leaving=s.is_leaving,
            is_stalled=s.is_stalled,
            need=() if next_len is None else self._growth(s, next_len),
            held=s.held,
            remaining=max(0, s.prompt_len - s.planned_len),
        )

    def _growth(self, s: SequenceState, end: int) -> tuple[int, ...]:
        return self._meter.growth(s.request.sparse_id, s.held, s.planned_len, end)

    def _predicted(self, s: SequenceState) -> tuple[int, ...]:
        seq_len = s.seq_len + self._growth_horizon
        return self._meter.predicted(s.request.sparse_id, seq_len, s.final_len, s.hit_rate.value)

    def _final(self, s: SequenceState) -> tuple[int, ...]:
        return self._meter.chunks(s.request.sparse_id, s.final_len)

    def _returning(self) -> list[int]:
        """Chunks of sequences that have ended, and are still in flight."""
        return self._add_chunks(sequence.held for sequence in self._ended)

    def _add_chunks(self, rows: Iterable[Sequence[int]]) -> list[int]:
        return add_chunks(rows, len(self._meter.pools))

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
        self.running.pop(sequence.request_id)
        self._vacate(sequence)
        sequence.forget_cache()
        sequence.num_preemptions += 1
        self.num_preempted += 1
        self.waiting[sequence.request_id] = sequence

    def _vacate(self, sequence: SequenceState) -> None:
        assert sequence.slot is not None and sequence.in_flight == 0
        if sequence.is_open:
            self.slots.release(sequence.slot, sequence.held)
        else:
            self.slots.return_slot(sequence.slot)


def _queue_key(s: SequenceState, now: float) -> tuple[bool, int, bool, int]:
    waited_s = now - s.arrival_s
    return queue_key(s.request.priority, waited_s, s.arrival, is_protected=s.is_protected, must_replay=s.must_replay)
