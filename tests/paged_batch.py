"""K and V of several sequences scattered over a pool, read through a table of addresses: for tests of the Triton operators."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles here")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
DTYPES = [torch.float16, torch.float32]  # the interpreter's bfloat16 products are wrong


@dataclass
class PagedBatch:
    """k, v: [num_kv_heads, seq_len, head_dim] of each sequence; pool: [num_pages, num_kv_heads, 2, page_size, head_dim].

    Every second page of the pool, and what sequences leave of their last page, is NaN. Table entries that no token needs
    point to such a page.
    """

    k: list[torch.Tensor]
    v: list[torch.Tensor]
    pool: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor

    @property
    def page_size(self) -> int:
        return self.pool.shape[3]

    @property
    def num_kv_heads(self) -> int:
        return self.pool.shape[1]


def make_batch(
    seq_lens: list[int],
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: str,
    *,
    page_size: int = 128,
    pinned: bool = False,
) -> PagedBatch:
    """Random sequences. pinned: the pool lies in pinned host memory."""
    pages = [-(-seq_len // page_size) for seq_len in seq_lens]
    shape = (2 * sum(pages) + 1, num_kv_heads, 2, page_size, head_dim)
    pool = torch.full(shape, float("nan"), dtype=dtype)
    ks, vs, places, used = [], [], [], 0
    for seq_len, count in zip(seq_lens, pages):
        k, v = (torch.randn(num_kv_heads, seq_len, head_dim).to(dtype) for _ in "kv")
        own = [2 * (used + count - page) - 1 for page in range(count)]  # falling, odd
        for page, place in enumerate(own):
            first, last = page * page_size, min(seq_len, (page + 1) * page_size)
            pool[place, :, 0, : last - first], pool[place, :, 1, : last - first] = k[:, first:last], v[:, first:last]
        used += count
        ks.append(k.to(device))
        vs.append(v.to(device))
        places.append(own)
    pool = pool.pin_memory() if pinned else pool.to(device)
    table = torch.full((len(seq_lens), max(pages) + 2), pool.data_ptr(), dtype=torch.int64)
    for row, own in enumerate(places):
        table[row, : len(own)] = pool.data_ptr() + torch.tensor(own, dtype=torch.int64) * pool[0].nbytes
    return PagedBatch(ks, vs, pool, table.to(device), torch.tensor(seq_lens, dtype=torch.int32, device=device))
