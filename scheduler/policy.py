"""plan_step(): which sequences a lane computes next, and who gives way when chunks run short. Pure functions.

Chunks go by rank (protected, priority, age). A sequence that lacks chunks takes them from lower ranks, the lowest first;
when nothing is left to take it stalls, and while it does nobody of a lower rank may grow. The highest rank can always go
on, because alone it fits: so every sequence ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

DECODE_SHARE = 0.2  # of the computing time, while a prompt is prefilled beside decodes
MAX_DECODE_TURNS = 16

Rank = tuple[bool, int, int]


@dataclass(frozen=True)
class SequenceView:
    """What the decision needs to know of a sequence that has a slot.

    Attributes:
        rank:       claim on chunks, smaller is stronger.
        lane:       the lane that decodes it.
        can_step:   its next step can be planned now.
        is_busy:    a plan in flight holds it, so its chunks cannot be taken now.
        is_leaving: it gives way as soon as it is not busy.
        need, held: chunks that its next step adds; chunks that it has; one number a stage.
        remaining:  prompt tokens not planned yet.
    """

    request_id: str
    rank: Rank
    lane: int | None
    is_prefill: bool
    can_step: bool
    is_busy: bool
    is_leaving: bool
    is_stalled: bool
    need: tuple[int, ...]
    held: tuple[int, ...]
    remaining: int = 0


@dataclass(frozen=True)
class StepDecision:
    """Who decodes, whose prompt goes on, who gives way now or when it is no longer busy, and who found no room."""

    decodes: tuple[str, ...] = ()
    prefill: str | None = None
    preempt: tuple[str, ...] = ()
    preempt_later: tuple[str, ...] = ()
    stalled: tuple[str, ...] = ()


def plan_step(
    views: Sequence[SequenceView],
    lane: int,
    free: Sequence[int],
    *,
    returning: Sequence[int] | None = None,
    prefill_turn: int = 0,
    prefill_due: bool = True,
    decodes_elsewhere: bool = False,
) -> StepDecision:
    """Decide a lane's next step: all its decodes, and one chunk of one prompt when it is the prompts' turn.

    Args:
        free:              free chunks, one number a stage.
        returning:         chunks that come back once a plan in flight is done, of sequences that have ended.
        prefill_turn:      which order prompts are taken in: see `prefill_order`.
        prefill_due:       decodes have had their share since the last chunk of a prompt.
        decodes_elsewhere: other lanes have decodes in flight.
    """
    room = _Room(views, free, returning if returning is not None else [0] * len(free))
    ready = [view for view in room.by_rank if view.can_step]
    decodes = [v.request_id for v in ready if not v.is_prefill and v.lane == lane and room.take(v)]
    prefill = None
    if prefill_due or not (decodes or decodes_elsewhere):
        prompts = prefill_order([view for view in ready if view.is_prefill], prefill_turn)
        prefill = next((view.request_id for view in prompts if room.take(view)), None)
    return StepDecision(tuple(decodes), prefill, tuple(room.preempted), tuple(room.leaving), tuple(sorted(room.stalled)))


def prefill_order(prompts: Sequence[SequenceView], turn: int) -> list[SequenceView]:
    """Even turns take the most urgent and shortest prompt first, odd turns the oldest, so neither kind starves."""
    if turn % 2:
        return sorted(prompts, key=lambda view: (view.rank[0], view.rank[2]))
    return sorted(prompts, key=lambda view: (view.rank[1], view.remaining, view.rank[2]))


def decode_turns(chunk_ms: float | None, decode_ms: float | None) -> int:
    """Decode steps between two chunks of prompts, so that decodes keep DECODE_SHARE of the time; 1 while unknown."""
    if not chunk_ms or not decode_ms:
        return 1
    turns = math.ceil(chunk_ms * DECODE_SHARE / (1 - DECODE_SHARE) / decode_ms)
    return max(1, min(MAX_DECODE_TURNS, turns))


@dataclass
class _Room:
    """Free chunks while a decision is made. Each of the lists is part of the decision."""

    views: Sequence[SequenceView]
    free: Sequence[int]
    returning: Sequence[int]
    by_rank: list[SequenceView] = field(init=False)
    preempted: list[str] = field(default_factory=list)
    leaving: list[str] = field(default_factory=list)
    stalled: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.by_rank = sorted(self.views, key=lambda view: view.rank)
        self.stalled = {view.request_id for view in self.views if view.is_stalled}
        self._free = list(self.free)
        self._taken: set[str] = set()

    def take(self, view: SequenceView) -> bool:
        """Give a sequence the chunks of its next step; False when it must wait, or has just been preempted."""
        if view.request_id in self.preempted or view.request_id in self.leaving:
            return False
        if any(view.need) and (self._waits_for_stronger(view) or not (self._has(view) or self._make_room(view))):
            self.stalled.add(view.request_id)
            return False
        self._free = [free - need for free, need in zip(self._free, view.need, strict=True)]
        self._taken.add(view.request_id)
        self.stalled.discard(view.request_id)
        return True

    def _has(self, view: SequenceView) -> bool:
        return all(need <= free for need, free in zip(view.need, self._free, strict=True))

    def _waits_for_stronger(self, view: SequenceView) -> bool:
        return any(other.request_id in self.stalled and other.rank < view.rank for other in self.views)

    def _make_room(self, view: SequenceView) -> bool:
        """Preempt the lowest ranks below `view`, as few as it takes; True when it has its chunks right now."""
        expected = [a + b for a, b in zip(self._free, self.returning, strict=True)]
        for other in self.views:
            if other.is_leaving or other.request_id in self.leaving:
                expected = [a + b for a, b in zip(expected, other.held, strict=True)]
        victims = []
        for other in reversed(self.by_rank):
            if other.rank <= view.rank or all(n <= e for n, e in zip(view.need, expected, strict=True)):
                break
            gone = other.is_leaving or other.request_id in self.leaving or other.request_id in self.preempted
            if not gone and any(other.held):
                victims.append(other)
                expected = [a + b for a, b in zip(expected, other.held, strict=True)]
        if any(need > e for need, e in zip(view.need, expected, strict=True)):
            return False  # taking from all of them would not be enough: higher ranks hold the rest, and will end
        for victim in victims:
            if victim.is_busy or victim.request_id in self._taken:
                self.leaving.append(victim.request_id)
            else:
                self.preempted.append(victim.request_id)
                self.stalled.discard(victim.request_id)
                self._free = [a + b for a, b in zip(self._free, victim.held, strict=True)]
        return self._has(view)
