"""SlotLedger: which slots and how many chunks of every stage are free, counted where plans are made.

Plans reach each stage in the order they were made, and a stage releases, opens and extends slots in plan order: so what
a stage will hold after a plan is known when the plan is made, and no plan can make a stage run out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


class SlotLedger:
    """The state: free slots, free chunks a stage, and slots that the next plan has to release."""

    def __init__(self, pools: Sequence[int], max_sequences: int) -> None:
        self.pools = tuple(pools)
        self.max_sequences = max_sequences
        self.clear()

    def clear(self) -> None:
        """Everything is free, as on new stages."""
        self.free_chunks = list(self.pools)
        self._free_slots = list(range(self.max_sequences - 1, -1, -1))
        self._to_release: list[tuple[int, tuple[int, ...]]] = []  # slot, chunks
        self._again: list[int] = []  # slots to release although somebody waits in them

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def num_slots(self) -> int:
        """Slots in use or still to be released."""
        return self.max_sequences - len(self._free_slots)

    @property
    def held_chunks(self) -> tuple[int, ...]:
        return tuple(pool - free for pool, free in zip(self.pools, self.free_chunks, strict=True))

    @property
    def has_releases(self) -> bool:
        return bool(self._to_release or self._again)

    def take_slot(self) -> int:
        return self._free_slots.pop()

    def return_slot(self, slot: int) -> None:
        """Take back a slot that no plan has opened."""
        self._free_slots.append(slot)

    def book(self, added: Sequence[int]) -> None:
        """A sequence gets chunks, one number a stage."""
        self.free_chunks = [free - new for free, new in zip(self.free_chunks, added, strict=True)]
        assert min(self.free_chunks) >= 0, f"a plan would leave {self.free_chunks} chunks"

    def release_later(self, slot: int, held: tuple[int, ...]) -> None:
        """The next plan shall release the slot. Nothing of it may be in flight."""
        self._to_release.append((slot, held))

    def release_again(self, slots: Iterable[int], unopened: Collection[int]) -> None:
        """Release slots a second time, after a plan that may not have done it.

        Args:
            unopened: slots in use that no plan has opened. The others in use are left alone: they were opened after a
                release, and are released at their end.
        """
        for slot in slots:
            if slot in self._free_slots:
                self._free_slots.remove(slot)
                self._to_release.append((slot, (0,) * len(self.pools)))
            elif slot in unopened:
                self._again.append(slot)

    def take_releases(self) -> list[int]:
        """Slots to release in the plan being made; for it and all later ones they and their chunks are free."""
        slots = [slot for slot, _ in self._to_release]
        self.free_chunks = add_chunks([self.free_chunks, *(held for _, held in self._to_release)], len(self.pools))
        self._free_slots += slots
        slots += self._again
        self._to_release.clear()
        self._again.clear()
        return slots


def add_chunks(rows: Iterable[Sequence[int]], num_stages: int) -> list[int]:
    """Sum numbers of chunks stage by stage."""
    total = [0] * num_stages
    for row in rows:
        total = [a + b for a, b in zip(total, row, strict=True)]
    return total
