"""`sketch`: a slice is scored by the log-sum-exp over a 4-bit copy of every key. Needs no calibration."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qsa.kernels.summaries.base import Summary, group_blocks, join, mask_tokens

ZERO = 8  # added to every number, -7 .. 7, so that it fits four bits


class SketchSummary(Summary):
    """Per slice `[num_kv_heads][slice_size][head_dim / 2]` bytes of two numbers, then `[num_kv_heads][slice_size]` float16.

    Number d of a key's first half is in the low bits of byte d, number d of the second half in the high bits. The float16
    is the key's scale.
    """

    dtype = torch.uint8

    def __init__(self, num_kv_heads: int, head_dim: int, slice_size: int) -> None:
        if head_dim % 2:
            raise ValueError(f"sketch needs an even head_dim, got {head_dim}")
        super().__init__(num_kv_heads, head_dim, slice_size, num_kv_heads * slice_size * (head_dim // 2 + 2))
        self._packed_bytes = num_kv_heads * slice_size * head_dim // 2

    def summarise(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        wide = keys.float()
        scale = (wide.abs().amax(-1, keepdim=True) / 7.0).clamp(min=2.0**-24, max=65504.0).half()
        numbers = (wide / scale.float()).round_().clamp_(-7.0, 7.0).add_(ZERO).to(torch.uint8)
        low, high = numbers.chunk(2, -1)
        packed = torch.bitwise_or(low, high << 4).transpose(0, 1).flatten(1)
        return torch.cat((packed, scale.transpose(0, 1).flatten(1).view(torch.uint8)), 1)

    def keys(self, slices: torch.Tensor) -> torch.Tensor:
        """Approximate keys of uint8 [num_slices, slice_bytes]: float32 [num_kv_heads, num_slices * slice_size, head_dim]."""
        packed = slices[:, : self._packed_bytes].unflatten(1, (self.num_kv_heads, self.slice_size, -1)).transpose(0, 1)
        scale = slices[:, self._packed_bytes :].contiguous().view(torch.float16)
        scale = scale.unflatten(1, (self.num_kv_heads, self.slice_size)).transpose(0, 1)
        numbers = torch.cat((packed & 15, packed >> 4), -1).float()  # [num_kv_heads, num_slices, slice_size, head_dim]
        return numbers.sub_(ZERO).mul_(scale.unsqueeze(-1).float()).flatten(1, 2)

    def scan(
        self, layer: int, store: torch.Tensor, q: torch.Tensor, chunks: Sequence[int], first: int, last: int, sm_scale: float
    ) -> torch.Tensor:
        query = q.float() * sm_scale
        scores = join([torch.bmm(query, self.keys(part).transpose(1, 2)) for part in self.read(store, chunks, last)])
        return torch.logsumexp(mask_tokens(scores, first, last, self.slice_size), -1)

    def block_scores(self, slice_scores: torch.Tensor, slices_per_block: int) -> torch.Tensor:
        return torch.logsumexp(group_blocks(slice_scores, slices_per_block), -1)
