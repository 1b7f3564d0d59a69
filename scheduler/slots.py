"""SlotLedger: which slots and how many chunks of every stage are free, counted where plans are made.

A stage may run a chunk of a prompt after a burst that was planned later, but every plan was booked when it was made, and a
release reaches a stage before every plan made after it. So at no moment does a stage hold more than was booked, and no plan
can make it run out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class SlotLedger:
    """The state: free slots, free chunks a stage, and slots that the stages must release before the next plan."""

    def __init__(self, pools: Sequence[int], max_sequences: int) -> None:
        self.pools = tuple(pools)
        self.max_sequences = max_sequences
        self.clear()

    def clear(self) -> None:
        """Everything is free, as on new stages."""
        self.free_chunks = list(self.pools)
        self._free_slots = list(range(self.max_sequences - 1, -1, -1))
        self._to_release: list[int] = []

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def num_slots(self) -> int:
        """Slots in use."""
        return self.max_sequences - len(self._free_slots)

    @property
    def held_chunks(self) -> tuple[int, ...]:
        return tuple(pool - free for pool, free in zip(self.pools, self.free_chunks, strict=True))

    @property
    def has_releases(self) -> bool:
        return bool(self._to_release)

    def take_slot(self) -> int:
        return self._free_slots.pop()

    def return_slot(self, slot: int) -> None:
        """Take back a slot that no plan has opened."""
        self._free_slots.append(slot)

    def book(self, added: Sequence[int]) -> None:
        """A sequence gets chunks, one number a stage."""
        self.free_chunks = [free - new for free, new in zip(self.free_chunks, added, strict=True)]
        assert min(self.free_chunks) >= 0, f"a plan would leave {self.free_chunks} chunks"

    def give_back(self, surplus: Sequence[int]) -> None:
        """Take back chunks that were booked, but are not used; one number a stage."""
        self.free_chunks = [free + more for free, more in zip(self.free_chunks, surplus, strict=True)]

    def release(self, slot: int, held: Sequence[int]) -> None:
        """Take back an open slot with its chunks, for plans that are made from now on. Nothing of it may be in flight."""
        self._to_release.append(slot)
        self._free_slots.append(slot)
        self.give_back(held)

    def take_releases(self) -> tuple[int, ...]:
        """Slots that every stage must release before it gets any plan that was made since the last call."""
        slots = tuple(self._to_release)
        self._to_release.clear()
        return slots


def add_chunks(rows: Iterable[Sequence[int]], num_stages: int) -> list[int]:
    """Sum numbers of chunks stage by stage."""
    total = [0] * num_stages
    for row in rows:
        total = [a + b for a, b in zip(total, row, strict=True)]
    return total
