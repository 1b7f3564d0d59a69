"""What stands for a slice when it is scored: one interface for code, sketch, minmax and mean.

A slice is summarised once, when its last token has been written: until then the window holds it. Summaries of one layer
of a sequence lie in chunks, `slice_bytes` a slice, end to end from the start of a chunk. Scores are float32, in nats.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from qsa.kernels.registry import Operator

SCORES = 1 << 20  # token scores held at once


class Summary(Operator, ABC):
    """Summaries of some layers (numbered from 0). `store` arguments are the whole pool, uint8 [num_chunks, chunk bytes].

    Attributes:
        dtype:       of the numbers a summary is made of.
        slice_bytes: bytes that summarise one slice in one layer, all KV heads.
    """

    dtype: torch.dtype

    def _set_sizes(self, num_kv_heads: int, head_dim: int, slice_size: int, slice_bytes: int) -> None:
        self.num_kv_heads, self.head_dim, self.slice_size, self.slice_bytes = num_kv_heads, head_dim, slice_size, slice_bytes

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The same as `scan`."""
        return self.scan(*args, **kwargs)

    @abstractmethod
    def summarise(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        """Keys after RoPE [num_kv_heads, num_slices, slice_size, head_dim] -> [num_slices, slice_bytes / itemsize]."""

    @abstractmethod
    def scan(
        self, layer: int, store: torch.Tensor, q: torch.Tensor, chunks: Sequence[int], first: int, last: int, sm_scale: float
    ) -> torch.Tensor:
        """Score the slices that hold tokens [0, last), leaving the tokens [0, first) out where the summary is per token.

        Args:
            q:      [num_kv_heads, num_rows, head_dim]; a row is one query of one head of the group.
            chunks: summary chunks of the sequence in this layer.

        Returns:
            float32 [num_kv_heads, num_rows, cdiv(last, slice_size)], in nats up to a constant per row.
        """

    def update(self, layer: int, store: torch.Tensor, keys: torch.Tensor, chunks: torch.Tensor, offsets: torch.Tensor) -> None:
        """Store the summaries of slices whose keys are complete. chunks, offsets: int64 [num_slices], chunk and place in it."""
        self.slices(store)[chunks, offsets] = self.summarise(layer, keys)

    def block_scores(self, slice_scores: torch.Tensor, slices_per_block: int) -> torch.Tensor:
        """Scores of blocks from those of their slices: [.., num_slices] -> [.., num_blocks]."""
        return group_blocks(slice_scores, slices_per_block).amax(-1)

    def slices(self, store: torch.Tensor) -> torch.Tensor:
        """Every chunk as slices: [num_chunks, slices_per_chunk, slice_bytes / itemsize], a view."""
        per_chunk = slices_per_chunk(store.shape[1], self.slice_bytes)
        size = self.slice_bytes // self.dtype.itemsize
        strides = (store.shape[1] // self.dtype.itemsize, size, 1)
        return store.view(self.dtype).as_strided((store.shape[0], per_chunk, size), strides)

    def read(self, store: torch.Tensor, chunks: Sequence[int], last: int) -> list[torch.Tensor]:
        """Views of the summaries of tokens [0, last): one [num_slices, slice_bytes / itemsize] a chunk."""
        return [part for _, part in self.read_blocks(store, chunks, last, 1)]

    def read_blocks(
        self, store: torch.Tensor, chunks: Sequence[int], last: int, num_rows: int
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Like `read`, cut so that `num_rows` scores of each of a view's tokens stay in the cache; with the first token."""
        slices = self.slices(store)
        wanted, per_chunk = -(-last // self.slice_size), slices.shape[1]
        step = max(1, min(per_chunk, SCORES // (num_rows * self.slice_size)))
        for number, first in enumerate(range(0, wanted, per_chunk)):
            used = slices[chunks[number], : min(per_chunk, wanted - first)]
            for start in range(0, len(used), step):
                yield (first + start) * self.slice_size, used[start : start + step]


def slices_per_chunk(chunk_bytes: int, slice_bytes: int) -> int:
    """The largest power of two of slices that fits a chunk, as the memory layout has it."""
    return 1 << ((chunk_bytes // slice_bytes).bit_length() - 1)


def group_blocks(slice_scores: torch.Tensor, slices_per_block: int) -> torch.Tensor:
    """[.., num_slices] -> [.., num_blocks, slices_per_block], the last block filled up with -inf."""
    missing = -slice_scores.shape[-1] % slices_per_block
    padded = torch.nn.functional.pad(slice_scores, (0, missing), value=-torch.inf)
    return padded.unflatten(-1, (-1, slices_per_block))


def join(parts: list[torch.Tensor]) -> torch.Tensor:
    """Scores of consecutive chunks, side by side on the last axis."""
    return torch.cat(parts, -1) if len(parts) > 1 else parts[0]


def mask_tokens(scores: torch.Tensor, first: int, last: int, slice_size: int) -> torch.Tensor:
    """Cut token scores [.., n] into slices, with the tokens outside [first, last) at the lowest value, in place.

    n must be a multiple of slice_size; first may be negative and last beyond n. Returns [.., n / slice_size, slice_size].
    """
    lowest = -torch.inf if scores.dtype.is_floating_point else torch.iinfo(scores.dtype).min
    if first > 0:
        scores[..., :first] = lowest
    if last < scores.shape[-1]:
        scores[..., last:] = lowest
    return scores.unflatten(-1, (-1, slice_size))


def quantise_rows(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 numbers and the float32 scale of every row: q is about numbers * scale. A row of zeros stays one."""
    scale = torch.linalg.vector_norm(q, torch.inf, -1, keepdim=True, dtype=torch.float32).mul_(1 / 127.0)
    return q.div(scale).nan_to_num_().round_().to(torch.int8), scale
