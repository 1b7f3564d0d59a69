"""Trials: after the stages were lost, who takes a step alone, so that a request that kills its stage is found by itself."""

from __future__ import annotations

from collections.abc import Sequence

from qsa.scheduler.flights import Flights
from qsa.scheduler.places import Places
from qsa.scheduler.sequence import SequenceState


class Trials:
    """Who may go on with whom. It keeps nothing itself: what a sequence was in flight for is in its own state."""

    def __init__(self, flights: Flights, places: Places, prefill_chunk: int) -> None:
        self._flights, self._places, self._prefill_chunk = flights, places, prefill_chunk

    def next(self) -> SequenceState | None:
        """Who must go on alone now; in flight already, or the strongest of those that can.

        Who lacks chunks lets others go first, but for the strongest of all, to whom everybody gives way.
        """
        under_way = next((s for s in self._flights.sequences() if s.is_on_trial), None)
        if under_way is not None:
            return under_way
        running = self._places.running.values()
        able = [s for s in running if self.must_be_alone(s) and (s.can_decode or s.can_chunk)]
        strongest = min(running, key=lambda s: s.rank, default=None)
        ready = [s for s in able if s is strongest or self._places.fits(s, self._next_end(s))]
        return min(ready, key=lambda s: s.rank, default=None)

    def must_be_alone(self, sequence: SequenceState) -> bool:
        return sequence.is_on_trial and len(self._places.running) > 1

    def most_steps(self, chosen: Sequence[SequenceState]) -> int | None:
        """Decode steps until one of these comes to what it must do alone; None: none of them will."""
        ahead = [s.furthest - s.planned_len for s in chosen if s.num_restarts]
        return max(1, min(ahead)) if ahead and len(self._places.running) > 1 else None

    def _next_end(self, sequence: SequenceState) -> int:
        return sequence.chunk_end(self._prefill_chunk) if sequence.can_chunk else sequence.burst_end(1)
