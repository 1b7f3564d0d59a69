"""KVCache: K, V and slice summaries of one stage's layers. Joins the chunk pool, the page table and its tensor form.

Layers are local to the stage here, 0 .. num_layers - 1. A chunk's bytes are uninitialised when a sequence gets it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from qsa.memory.chunk_pool import ChunkPool
from qsa.memory.layout import CHUNK_BYTES, KVLayout, SummaryLayout
from qsa.memory.page_table import PageTable
from qsa.memory.pool_stats import PoolStats

NO_CHUNK = -1
NO_ADDRESS = 0


class KVCache:
    """The KV memory of one stage. The state: pool, open slots, and the tables that operators read.

    Attributes:
        pool:           where every chunk comes from.
        pages:          [num_chunks, num_kv_heads, 2, page_size, head_dim], a view on the pool; dim 2 is K, V. The chunk
                        stride is exactly 1 MiB.
        page_table:     int64 [num_layers, max_sequences, max_pages], address of each page, 0 where there is none.
        page_chunks:    int64, same shape, chunk number of each page, -1 where there is none.
        summary_table:  int64 [num_layers, max_sequences, max_summary_chunks], addresses of summary chunks.
        summary_chunks: int64, same shape, their chunk numbers.

    The summary tables are replaced by wider ones when a slot is opened with a layout that `summaries` did not announce:
    read them from the cache for each step, and announce every layout where an address must not change.
    """

    def __init__(
        self,
        kv: KVLayout,
        dtype: torch.dtype,
        *,
        num_layers: int,
        num_chunks: int,
        max_sequences: int,
        max_seq_len: int,
        device: torch.device,
        summaries: Iterable[SummaryLayout] = (),
    ) -> None:
        if dtype.itemsize != kv.element_bytes:
            raise ValueError(f"dtype {dtype} has {dtype.itemsize} bytes, but the KV layout says {kv.element_bytes}")
        if kv.token_bytes > CHUNK_BYTES:
            raise ValueError(f"one token of K and V takes {kv.token_bytes} bytes in a layer, a chunk holds {CHUNK_BYTES}")
        for name, value in (("num_layers", num_layers), ("max_sequences", max_sequences), ("max_seq_len", max_seq_len)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.kv, self.dtype, self.num_layers, self.device = kv, dtype, num_layers, device
        self.max_sequences, self.max_seq_len = max_sequences, max_seq_len
        self.pool = ChunkPool(num_chunks, device)
        self.pages = _pages_view(self.pool.buffer, kv, dtype)
        self._slots = PageTable(kv, num_layers, max_sequences)
        self.page_table, self.page_chunks = self._new_tables(kv.num_pages(max_seq_len))
        width = max((layout.num_chunks(max_seq_len) for layout in summaries), default=0)
        self.summary_table, self.summary_chunks = self._new_tables(width)

    def open(self, slot: int, summary: SummaryLayout) -> None:
        """Start an empty sequence in a free slot; its summaries are laid out by `summary`."""
        self._slots.open(slot, summary)
        width = summary.num_chunks(self.max_seq_len)
        old_width = self.summary_table.shape[2]
        if width > old_width:
            old = self.summary_table, self.summary_chunks
            self.summary_table, self.summary_chunks = self._new_tables(width)
            self.summary_table[:, :, :old_width] = old[0]
            self.summary_chunks[:, :, :old_width] = old[1]

    def has_room(self, slot: int, seq_len: int) -> bool:
        """Whether the slot can `extend` to so many tokens without a chunk more."""
        return seq_len <= self.max_seq_len and self._slots.growth(slot, seq_len).per_layer == 0

    def extend(self, slot: int, seq_len: int) -> None:
        """Make room for tokens [0, seq_len) in every layer, all or none; room that is there already stays.

        Raises:
            ValueError:       seq_len is above max_seq_len.
            OutOfChunksError: the pool has too few free chunks; nothing has changed.
        """
        owned = self._slots[slot]
        if seq_len <= owned.seq_len:
            return
        if seq_len > self.max_seq_len:
            raise ValueError(f"seq_len {seq_len} exceeds max_seq_len {self.max_seq_len}")
        growth = self._slots.growth(slot, seq_len)
        if growth.per_layer:
            chunks = self.pool.allocate(growth.per_layer * self.num_layers)
            self._slots.add(slot, growth, chunks)
            new = torch.tensor(chunks, dtype=torch.int64).view(self.num_layers, growth.per_layer)
            new = new.to(self.device, non_blocking=True)  # the driver has a copy when this returns
            pages = slice(growth.first_page, growth.first_page + growth.num_pages)
            summaries = slice(growth.first_summary, growth.first_summary + growth.num_summaries)
            addresses = new * CHUNK_BYTES + self.pool.address(0)
            self.page_chunks[:, slot, pages] = new[:, : growth.num_pages]
            self.page_table[:, slot, pages] = addresses[:, : growth.num_pages]
            self.summary_chunks[:, slot, summaries] = new[:, growth.num_pages :]
            self.summary_table[:, slot, summaries] = addresses[:, growth.num_pages :]
        owned.seq_len = seq_len

    def release(self, slot: int) -> None:
        """Give every chunk of the slot back and close it. Releasing a free slot does nothing."""
        owned = self._slots.close(slot)
        if owned is None:
            return
        self.pool.free(owned.chunks())
        self.page_chunks[:, slot] = NO_CHUNK
        self.page_table[:, slot] = NO_ADDRESS
        self.summary_chunks[:, slot] = NO_CHUNK
        self.summary_table[:, slot] = NO_ADDRESS

    def seq_len(self, slot: int) -> int:
        """Tokens there is room for, as last extended; 0 for a slot that is not open."""
        return self._slots[slot].seq_len if slot in self._slots else 0

    def held(self, slot: int) -> int:
        """Chunks the slot holds; 0 for a slot that is not open."""
        return self._slots[slot].num_chunks if slot in self._slots else 0

    def is_open(self, slot: int) -> bool:
        return slot in self._slots

    def stats(self) -> PoolStats:
        return self.pool.stats(num_sequences=len(self._slots))

    def close(self) -> None:
        """Release every slot and the pool's buffer. Calling it again does nothing."""
        for slot in self._slots.slots():
            self.release(slot)
        self.pages = self.pages[:0].clone()
        self.pool.close()

    def _new_tables(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (self.num_layers, self.max_sequences, width)
        addresses = torch.full(shape, NO_ADDRESS, dtype=torch.int64, device=self.device)
        return addresses, torch.full(shape, NO_CHUNK, dtype=torch.int64, device=self.device)


def _pages_view(buffer: torch.Tensor, kv: KVLayout, dtype: torch.dtype) -> torch.Tensor:
    """Every chunk as a page: [num_chunks, num_kv_heads, 2, page_size, head_dim], what a page leaves of its chunk is skipped."""
    flat = buffer.view(dtype)  # [num_chunks, CHUNK_BYTES / element_bytes]
    used = kv.num_kv_heads * 2 * kv.page_size * kv.head_dim
    return flat[:, :used].view(len(flat), kv.num_kv_heads, 2, kv.page_size, kv.head_dim)
