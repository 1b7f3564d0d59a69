"""`minmax`: a slice is scored by an upper bound of q.k from its keys' per-channel minimum and maximum.

Source: Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", 2024, arXiv 2406.10774.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qsa.kernels.registry import register
from qsa.kernels.summaries.base import Summary, join


class MinMaxSummary(Summary):
    """Per slice minimum and maximum of its keys, float32 [num_kv_heads, 2, head_dim]."""

    dtype = torch.float32

    def init(  # type: ignore[override]
        self, *, num_kv_heads: int, head_dim: int, slice_size: int, **sizes: Any
    ) -> None:
        self._set_sizes(num_kv_heads, head_dim, slice_size, 2 * 4 * num_kv_heads * head_dim)

    def summarise(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        bounds = torch.cat((keys.amin(2), keys.amax(2)), -1)  # [num_kv_heads, num_slices, 2 * head_dim]
        return bounds.float().transpose(0, 1).flatten(1)

    def scan(
        self, layer: int, store: torch.Tensor, q: torch.Tensor, chunks: Sequence[int], first: int, last: int, sm_scale: float
    ) -> torch.Tensor:
        """sum_d max(q[d] * k_min[d], q[d] * k_max[d]): each q[d] meets the minimum when negative, else the maximum."""
        query = q.float() * sm_scale
        signed = torch.cat((query.clamp(max=0.0), query.clamp(min=0.0)), -1)  # [num_kv_heads, num_rows, 2 * head_dim]
        parts = []
        for bounds in self.read(store, chunks, last):
            per_head = bounds.unflatten(1, (self.num_kv_heads, 2 * self.head_dim)).permute(1, 2, 0)
            parts.append(torch.bmm(signed, per_head))
        return join(parts)


register("minmax_summary", "torch", MinMaxSummary)
