"""`sketch`: a slice is scored by the log-sum-exp over a 4-bit copy of every key. Needs no calibration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qsa.kernels.registry import register
from qsa.kernels.summaries.base import Summary, group_blocks, join, mask_tokens, quantise_rows

ZERO = 8  # added to every number, -7 .. 7, so that it fits four bits


class SketchSummary(Summary):
    """Per slice `[num_kv_heads][slice_size][head_dim / 2]` bytes of two numbers, then `[num_kv_heads][slice_size]` float16.

    Number d of a key's first half is in the low bits of byte d, number d of the second half in the high bits. The float16
    is the key's scale.
    """

    dtype = torch.uint8

    def init(  # type: ignore[override]
        self, *, num_kv_heads: int, head_dim: int, slice_size: int, **sizes: Any
    ) -> None:
        if head_dim % 2:
            raise ValueError(f"sketch needs an even head_dim, got {head_dim}")
        self._set_sizes(num_kv_heads, head_dim, slice_size, num_kv_heads * slice_size * (head_dim // 2 + 2))
        self._packed_bytes = num_kv_heads * slice_size * head_dim // 2

    def summarise(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        wide = keys.float()
        scale = (wide.abs().amax(-1, keepdim=True) / 7.0).clamp(min=2.0**-24, max=65504.0).half()
        numbers = (wide / scale.float()).round_().clamp_(-7.0, 7.0).add_(ZERO).to(torch.uint8)
        low, high = numbers.chunk(2, -1)
        packed = torch.bitwise_or(low, high << 4).transpose(0, 1).flatten(1)
        return torch.cat((packed, scale.transpose(0, 1).flatten(1).view(torch.uint8)), 1)

    def scan(
        self, layer: int, store: torch.Tensor, q: torch.Tensor, chunks: Sequence[int], first: int, last: int, sm_scale: float
    ) -> torch.Tensor:
        """Scores of int8 queries against the 4-bit numbers, exact in int32; a query's rounding is far below a key's."""
        query, query_scale = quantise_rows(q)
        factor = query_scale * sm_scale
        zero = query.sum(-1, keepdim=True, dtype=torch.int32) * ZERO
        parts = []
        for base, part in self.read_blocks(store, chunks, last, q.shape[0] * q.shape[1]):
            scores = self._token_scores(query, zero, factor, part)
            parts.append(torch.logsumexp(mask_tokens(scores, first - base, last - base, self.slice_size), -1))
        return join(parts)

    def _token_scores(
        self, query: torch.Tensor, zero: torch.Tensor, factor: torch.Tensor, slices: torch.Tensor
    ) -> torch.Tensor:
        """Approximate q.k of every token, float32 [num_kv_heads, num_rows, num_slices * slice_size]."""
        packed = slices[:, : self._packed_bytes].unflatten(1, (self.num_kv_heads, self.slice_size, -1))
        key_scale = slices[:, self._packed_bytes :].contiguous().view(torch.float16)
        key_scale = key_scale.view(-1, self.num_kv_heads, self.slice_size).transpose(0, 1).reshape(self.num_kv_heads, 1, -1)
        products = []
        for head in range(self.num_kv_heads):
            two = packed[:, head]  # [num_slices, slice_size, head_dim / 2]
            numbers = torch.cat((two & 15, two >> 4), -1).view(torch.int8).view(-1, self.head_dim)
            products.append(torch._int_mm(query[head], numbers.t()))
        scores = (torch.stack(products) - zero).float()
        return scores.mul_(key_scale.float()).mul_(factor)

    def block_scores(self, slice_scores: torch.Tensor, slices_per_block: int) -> torch.Tensor:
        return torch.logsumexp(group_blocks(slice_scores, slices_per_block), -1)


register("sketch_summary", "torch", SketchSummary)
