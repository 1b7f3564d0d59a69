"""Arithmetic of the KV layout: bytes per token, tokens per page, chunks per sequence. Integers only, no torch.

A chunk is 1 MiB and holds one page: K and V of `page_size` consecutive tokens of one sequence in one layer, laid out
`[num_kv_heads][K|V][page_size][head_dim]`. Slice summaries live in chunks of their own, `[slice][bytes]` a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

CHUNK_BYTES = 1 << 20


def cdiv(a: int, b: int) -> int:
    """Integer division rounded up."""
    return -(-a // b)


def floor_power_of_two(n: int) -> int:
    """The largest power of two that is at most n; n must be positive."""
    return 1 << (n.bit_length() - 1)


@dataclass(frozen=True)
class KVLayout:
    """How K and V of one layer lie in a chunk. `element_bytes` is the size of one number of K or V."""

    num_kv_heads: int
    head_dim: int
    element_bytes: int

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.element_bytes

    @property
    def page_size(self) -> int:
        """Tokens per page: the largest power of two that fits a chunk."""
        return floor_power_of_two(CHUNK_BYTES // self.token_bytes)

    def num_pages(self, seq_len: int) -> int:
        """Pages of one layer that `seq_len` tokens take."""
        return cdiv(seq_len, self.page_size)


@dataclass(frozen=True)
class SummaryLayout:
    """How the slice summaries of one layer lie in chunks. `slice_bytes` is 0 for a configuration without summaries."""

    slice_size: int
    slice_bytes: int

    @property
    def slices_per_chunk(self) -> int:
        """Slices whose summaries one chunk holds: the largest power of two that fits."""
        return floor_power_of_two(CHUNK_BYTES // self.slice_bytes)

    def num_chunks(self, seq_len: int) -> int:
        """Summary chunks of one layer that `seq_len` tokens take."""
        if self.slice_bytes == 0:
            return 0
        return cdiv(cdiv(seq_len, self.slice_size), self.slices_per_chunk)


def sequence_chunks(kv: KVLayout, summary: SummaryLayout, num_layers: int, seq_len: int) -> int:
    """Chunks that one sequence of `seq_len` tokens takes on a stage with `num_layers` layers."""
    return num_layers * (kv.num_pages(seq_len) + summary.num_chunks(seq_len))
