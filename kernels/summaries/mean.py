"""`mean`: a slice is scored by its mean key (the article's summary)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qsa.kernels.registry import register
from qsa.kernels.summaries.base import Summary, group_blocks, join


class MeanSummary(Summary):
    """Per slice and KV head the mean of its keys, float32 [num_kv_heads, head_dim]."""

    dtype = torch.float32

    def init(  # type: ignore[override]
        self, *, num_kv_heads: int, head_dim: int, slice_size: int, **sizes: Any
    ) -> None:
        self._set_sizes(num_kv_heads, head_dim, slice_size, 4 * num_kv_heads * head_dim)

    def summarise(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        return keys.float().mean(2).transpose(0, 1).flatten(1)

    def scan(
        self, layer: int, store: torch.Tensor, q: torch.Tensor, chunks: Sequence[int], first: int, last: int, sm_scale: float
    ) -> torch.Tensor:
        query = q.float() * sm_scale
        parts = []
        for means in self.read(store, chunks, last):
            keys = means.unflatten(1, (self.num_kv_heads, self.head_dim)).permute(1, 2, 0)
            parts.append(torch.bmm(query, keys))
        return join(parts)

    def block_scores(self, slice_scores: torch.Tensor, slices_per_block: int) -> torch.Tensor:
        """The score of the block's mean key: the mean over its slices, since q.k is linear."""
        blocks = group_blocks(slice_scores, slices_per_block)
        known = blocks > -torch.inf
        count = known.sum(-1)
        mean = blocks.masked_fill(~known, 0.0).sum(-1) / count
        return mean.masked_fill(count == 0, -torch.inf)


register("mean_summary", "torch", MeanSummary)
