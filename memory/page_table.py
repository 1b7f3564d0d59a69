"""Which chunks each sequence owns, per layer: pages of K and V, and summary chunks. Plain integers, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from qsa.memory.layout import KVLayout, SummaryLayout


@dataclass
class SlotPages:
    """The chunks of one sequence on one stage; the first index of the lists is the layer."""

    summary: SummaryLayout
    seq_len: int = 0
    pages: list[list[int]] = field(default_factory=list)
    summary_chunks: list[list[int]] = field(default_factory=list)

    @property
    def num_chunks(self) -> int:
        return sum(map(len, self.pages)) + sum(map(len, self.summary_chunks))

    def chunks(self) -> list[int]:
        """Every chunk of the slot, once per ownership."""
        return [chunk for owned in (self.pages, self.summary_chunks) for layer in owned for chunk in layer]


@dataclass(frozen=True)
class Growth:
    """What a slot needs before it has room for `seq_len` tokens: new pages and new summary chunks in every layer."""

    first_page: int
    num_pages: int
    first_summary: int
    num_summaries: int

    @property
    def per_layer(self) -> int:
        return self.num_pages + self.num_summaries


class PageTable:
    """The slots of one stage. The state: which are open, with what chunks."""

    def __init__(self, kv: KVLayout, num_layers: int, max_sequences: int) -> None:
        self._kv = kv
        self._num_layers = num_layers
        self._max_sequences = max_sequences
        self._slots: dict[int, SlotPages] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, slot: int) -> bool:
        return slot in self._slots

    def __getitem__(self, slot: int) -> SlotPages:
        assert slot in self._slots, f"slot {slot} is not open; open slots: {sorted(self._slots)}"
        return self._slots[slot]

    def open(self, slot: int, summary: SummaryLayout) -> None:
        """Start an empty sequence in a free slot."""
        assert 0 <= slot < self._max_sequences, f"slot {slot} is outside the table of {self._max_sequences}"
        assert slot not in self._slots, f"slot {slot} is already open"
        layers = range(self._num_layers)
        self._slots[slot] = SlotPages(summary, 0, [[] for _ in layers], [[] for _ in layers])

    def growth(self, slot: int, seq_len: int) -> Growth:
        """What the slot lacks for tokens [0, seq_len); nothing when it has room already."""
        owned = self[slot]
        num_pages, num_summaries = len(owned.pages[0]), len(owned.summary_chunks[0])
        return Growth(
            num_pages,
            max(0, self._kv.num_pages(seq_len) - num_pages),
            num_summaries,
            max(0, owned.summary.num_chunks(seq_len) - num_summaries),
        )

    def add(self, slot: int, growth: Growth, chunks: list[int]) -> None:
        """Hand the slot the chunks it lacked, `growth.per_layer` for one layer after the other, pages first."""
        owned = self[slot]
        assert len(chunks) == growth.per_layer * self._num_layers, "a slot grows in every layer alike"
        for layer in range(self._num_layers):
            new = chunks[layer * growth.per_layer : (layer + 1) * growth.per_layer]
            owned.pages[layer] += new[: growth.num_pages]
            owned.summary_chunks[layer] += new[growth.num_pages :]

    def close(self, slot: int) -> SlotPages | None:
        """Forget the slot and return what it owned; None when it is not open."""
        return self._slots.pop(slot, None)

    def slots(self) -> list[int]:
        """Open slots in rising order."""
        return sorted(self._slots)
