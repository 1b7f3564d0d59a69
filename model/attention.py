"""StageAttention: writes K, V and summaries of a stage's layers, selects slices, attends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from qsa.kernels.dense_attention import dense_decode, dense_prefill, gather_tokens
from qsa.kernels.kv_write import kv_write
from qsa.kernels.registry import SparseConfig
from qsa.memory.kv_cache import KVCache
from qsa.memory.layout import SummaryLayout
from qsa.model.batch import Segment


@dataclass(frozen=True)
class AttentionStep:
    """What is the same for every layer of a step: made by `prepare`, read by `forward`."""

    segments: tuple[Segment, ...]
    chunks: torch.Tensor  # int64 [num_layers, num_tokens], where each new token is written
    offsets: torch.Tensor  # int64 [num_tokens]

    @property
    def is_prefill(self) -> bool:
        return self.segments[0].is_prefill


@dataclass(frozen=True)
class SlotSelection:
    """What selection did for one slot since it was last asked; summed over the stage's layers.

    attended, context: tokens, attended being the mean over heads. num_selected, newly_hit: slices in the lists, and how
    many of them the step before did not have. margin: gap between the last kept and the first dropped score, in nats.
    """

    slot: int
    attended: float
    context: float
    num_selected: int
    newly_hit: int
    margin: float


class StageAttention:
    """Attention of layers [first_layer, first_layer + num_layers) over one KV cache.

    The state: per slot its sparse configuration and what selection remembers between steps.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        first_layer: int,
        num_layers: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        sm_scale: float,
        sparse: Mapping[int, SparseConfig],
        calibration: object | None = None,
        backend: str = "torch",
    ) -> None:
        self.cache, self.first_layer, self.num_layers = cache, first_layer, num_layers
        self.num_q_heads, self.num_kv_heads, self.head_dim, self.sm_scale = num_q_heads, num_kv_heads, head_dim, sm_scale
        self.sparse = dict(sparse)

    def summary_layout(self, sparse_id: int) -> SummaryLayout:
        return SummaryLayout(64, 0)

    def open(self, slot: int, sparse_id: int) -> None:
        """Start an empty sequence in a free slot."""
        self.cache.open(slot, self.summary_layout(sparse_id))

    def release(self, slot: int) -> None:
        """Give the slot's memory back. Releasing a free slot does nothing."""
        self.cache.release(slot)

    def prepare(self, segments: Sequence[Segment]) -> AttentionStep:
        """Make room for the tokens of one group: either decode segments, or exactly one prefill segment.

        Raises:
            OutOfChunksError: the pool is short of chunks.
        """
        if len(segments) != 1 and any(segment.is_prefill for segment in segments):
            raise ValueError(f"a group is decode segments or one prefill segment, got {len(segments)} segments")
        page_size = self.cache.kv.page_size
        for segment in segments:
            self.cache.extend(segment.slot, segment.end)
        positions = torch.cat([torch.arange(segment.start, segment.end) for segment in segments])
        slots = torch.tensor([segment.slot for segment in segments for _ in range(segment.extend_len)])
        chunks = self.cache.page_chunks[:, slots, positions // page_size]
        return AttentionStep(tuple(segments), chunks, positions % page_size)

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """Write the new tokens' K and V, then attend.

        Args:
            layer: number in the whole model.
            q:     [num_tokens, num_q_heads, head_dim], after RoPE; rows in the order of the step's segments.
            k, v:  [num_tokens, num_kv_heads, head_dim]

        Returns:
            [num_tokens, num_q_heads * head_dim]
        """
        local = layer - self.first_layer
        pages = self.cache.pages
        kv_write(k, v, pages, step.chunks[local], step.offsets)
        if step.is_prefill:
            segment = step.segments[0]
            keys, values = gather_tokens(pages, self.cache.page_chunks[local, segment.slot], segment.end)
            return dense_prefill(q, keys, values, self.sm_scale).reshape(len(q), -1)
        rows = []
        for row, segment in enumerate(step.segments):
            chunks = self.cache.page_chunks[local, segment.slot].tolist()
            rows.append(dense_decode(q[row], pages, chunks, segment.end, self.sm_scale))
        return torch.stack(rows).view(len(q), -1)

    def take_stats(self) -> list[SlotSelection]:
        """What selection did since the last call, one entry a slot that was computed."""
        return []

    def close(self) -> None:
        """Give the workspace back. Calling it again does nothing."""
