"""What GPU operators share: how K and V lie in pages, what a decode step hands to a scan, what the card can do."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class PagedKV:
    """K and V of one layer in pages `[num_kv_heads][K|V][page_size][head_dim]`, reached through a table of addresses.

    Attributes:
        dtype:     of K and V as stored: float16, bfloat16, float32 or float8_e4m3fn.
        page_size: tokens of a page.
        scale:     float32 [num_kv_heads, 2], what stored K and V are multiplied with; None: 1, and required for float8.
    """

    dtype: torch.dtype
    page_size: int
    scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.dtype == torch.float8_e4m3fn and self.scale is None:
            raise ValueError("K and V in float8_e4m3fn need a scale a head, got none")


@dataclass(frozen=True)
class DecodeInputs:
    """Queries of a decode step after RoPE, and the same on the directions of the `code` summary.

    Attributes:
        q:       [batch, num_q_heads, head_dim]
        numbers: int8 [batch, num_q_heads, code_dim], or None where no codes are kept.
        scales:  float32 [batch, num_q_heads]: a query is about numbers * scale.
    """

    q: torch.Tensor
    numbers: torch.Tensor | None = None
    scales: torch.Tensor | None = None


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of the card that holds a tensor, such as (8, 9); (0, 0) on the CPU."""
    if device.type != "cuda":
        return 0, 0
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the card; a small number on the CPU, where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
