"""K and V of several sequences scattered over a pool, read through a table of addresses: for tests of the Triton operators."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import pytest
import torch

from qsa.kernels.paged_kv import PagedKV

FP8 = torch.float8_e4m3fn
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles here")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
DTYPES = [torch.float16, torch.float32]  # the interpreter's bfloat16 products are wrong


@dataclass
class PagedBatch:
    """k, v: [num_kv_heads, seq_len, head_dim] of each sequence; pool: [num_pages, num_kv_heads, 2, page_size, head_dim].

    Every second page of the pool, and what sequences leave of their last page, is NaN. Table entries that no token needs
    point to such a page. scale: of a pool in float8, [num_kv_heads, 2]; k and v are then what its numbers mean, in float32.
    """

    k: list[torch.Tensor]
    v: list[torch.Tensor]
    pool: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    scale: torch.Tensor | None = None

    @property
    def kv(self) -> PagedKV:
        return PagedKV(self.pool.dtype, self.page_size, self.scale)

    def rows(self, rows: slice) -> PagedBatch:
        """Some of the sequences, at the same places."""
        return replace(self, k=self.k[rows], v=self.v[rows], page_table=self.page_table[rows], seq_lens=self.seq_lens[rows])

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
    pool = torch.full(shape, float("nan")).to(dtype)
    scale = 0.02 * (torch.rand(num_kv_heads, 2) + 0.5) if dtype == FP8 else None
    ks, vs, places, used = [], [], [], 0
    for seq_len, count in zip(seq_lens, pages):
        k, v = (torch.randn(num_kv_heads, seq_len, head_dim) for _ in "kv")
        if scale is not None:
            k, v = k / scale[:, :1, None], v / scale[:, 1:, None]
        k, v = k.to(dtype), v.to(dtype)
        own = [2 * (used + count - page) - 1 for page in range(count)]  # falling, odd
        for page, place in enumerate(own):
            first, last = page * page_size, min(seq_len, (page + 1) * page_size)
            pool[place, :, 0, : last - first], pool[place, :, 1, : last - first] = k[:, first:last], v[:, first:last]
        used += count
        if scale is not None:
            k, v = k.float() * scale[:, :1, None], v.float() * scale[:, 1:, None]
        ks.append(k.to(device))
        vs.append(v.to(device))
        places.append(own)
    pool = pool.pin_memory() if pinned else pool.to(device)
    table = torch.full((len(seq_lens), max(pages) + 2), pool.data_ptr(), dtype=torch.int64)
    for row, own in enumerate(places):
        table[row, : len(own)] = pool.data_ptr() + torch.tensor(own, dtype=torch.int64) * pool[0].nbytes
    lengths = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    return PagedBatch(ks, vs, pool, table.to(device), lengths, None if scale is None else scale.to(device))
