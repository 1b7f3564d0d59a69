"""Which sequences go on next, how far, and who gives way when chunks run short. Pure functions.

Chunks go by rank (protected, priority, age). A sequence that lacks chunks takes them from lower ranks, the lowest first;
when nothing is left to take it stalls, and while it does nobody of a lower rank may grow. The highest rank can always go
on, because alone it fits: so every sequence ends.

While prompts are read beside decodes there are rounds: a burst of a few steps, then a chunk of a prompt on every stage at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

DECODE_SHARE = 0.4  # of the time, at most, while prompts are read beside decodes; bursts cost more than their steps
MIN_DECODE_TURNS = 3  # so that most gaps between tokens are those without a chunk in between
MAX_DECODE_TURNS = 16

Rank = tuple[bool, int, int]


@dataclass(frozen=True)
class SequenceView:
    """What the decision needs to know of a sequence that has a slot.

    Attributes:
        rank:       claim on chunks, smaller is stronger.
        can_step:   what is asked about can be planned now: a chunk of its prompt, or a decode step.
        is_busy:    a plan in flight holds it, so its chunks cannot be taken now.
        is_leaving: it gives way as soon as it is not busy.
        need, held: chunks that its next step adds; chunks that it has; one number a stage.
        remaining:  prompt tokens not planned yet.
    """

    request_id: str
    rank: Rank
    can_step: bool
    is_busy: bool
    is_leaving: bool
    is_stalled: bool
    need: tuple[int, ...]
    held: tuple[int, ...]
    remaining: int = 0


@dataclass(frozen=True)
class Decision:
    """Who goes on, who gives way now or when it is no longer busy, and who found no room."""

    chosen: tuple[str, ...] = ()
    preempt: tuple[str, ...] = ()
    preempt_later: tuple[str, ...] = ()
    stalled: tuple[str, ...] = ()


def plan_decodes(views: Sequence[SequenceView], free: Sequence[int], returning: Sequence[int]) -> Decision:
    """Decide who takes part in a burst: every sequence that can decode, as far as one step of all of them has room.

    Args:
        free:      free chunks, one number a stage.
        returning: chunks that come back once a plan in flight is done, of sequences that have ended.
    """
    room = _Room(views, free, returning)
    return room.decision(view.request_id for view in room.by_rank if view.can_step and room.take(view))


def plan_chunk(views: Sequence[SequenceView], free: Sequence[int], returning: Sequence[int], turn: int) -> Decision:
    """Decide whose prompt goes on by a chunk; `turn`: see `prefill_order`."""
    room = _Room(views, free, returning)
    prompts = prefill_order([view for view in views if view.can_step], turn)
    prompt = next((view.request_id for view in prompts if room.take(view)), None)
    return room.decision([] if prompt is None else [prompt])


def prefill_order(prompts: Sequence[SequenceView], turn: int) -> list[SequenceView]:
    """Even turns take the most urgent and shortest prompt first, odd turns the oldest, so neither kind starves."""
    if turn % 2:
        return sorted(prompts, key=lambda view: (view.rank[0], view.rank[2]))
    return sorted(prompts, key=lambda view: (view.rank[1], view.remaining, view.rank[2]))


def decode_turns(chunk_ms: float | None, decode_ms: float | None) -> int:
    """Steps of a burst between two chunks of prompts, so that decodes take at most DECODE_SHARE of the time.

    Args:
        chunk_ms:  time of a chunk on the slowest stage, since all stages run one at once; None while unknown.
        decode_ms: time of a decode step of all lanes.
    """
    if not chunk_ms or not decode_ms:
        return MIN_DECODE_TURNS
    turns = int(chunk_ms * DECODE_SHARE / (1 - DECODE_SHARE) / decode_ms)
    return max(MIN_DECODE_TURNS, min(MAX_DECODE_TURNS, turns))


def longest_burst(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number of steps up to `most` that fits; one step is known to, and shorter ones than one that fits do too."""
    if most <= 1 or fits(most):
        return most
    low, high = 1, most  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


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

    def decision(self, chosen: Iterable[str]) -> Decision:
        """What has come of it, once `chosen` has taken what it needs."""
        names = tuple(chosen)
        return Decision(names, tuple(self.preempted), tuple(self.leaving), tuple(sorted(self.stalled)))

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
