"""Random inputs of one layer at the reference shape: K and V of 8 sequences of 262144 tokens in pages in random order.

The shape is that of a 7B model with 28 query heads, 4 KV heads and head_dim 128. Four sets of queries, lists, codes and
projections take turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu_cases import SETS
from qsa.kernels.paged_kv import PagedKV

BATCH, SEQ_LEN, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 262144, 28, 4, 128
GROUP = NUM_Q_HEADS // NUM_KV_HEADS
SLICE, SINK, WINDOW, CODE_DIM = 64, 64, 512, 64
NUM_SLICES = SEQ_LEN // SLICE
NUM_CANDIDATES = (SEQ_LEN - WINDOW) // SLICE
SM_SCALE = HEAD_DIM**-0.5
CHUNK_BYTES = 1 << 20
SUMMARY_CHUNKS = SEQ_LEN * CODE_DIM // CHUNK_BYTES
FP8 = torch.float8_e4m3fn


def far_slices(tokens: int) -> int:
    """Listed slices of a query that attends to so many tokens, sink and window included."""
    return (tokens - SINK - WINDOW) // SLICE


@dataclass
class LayerKV:
    """K and V of one layer: `pool` [chunks, num_kv_heads, 2, page_size, head_dim], `pages` [batch, num_pages] in it."""

    kv: PagedKV
    pool: torch.Tensor
    pages: torch.Tensor
    page_table: torch.Tensor

    def keys(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a sequence in float64, [num_kv_heads, seq_len, head_dim]."""
        both = self.pool[self.pages[row]].permute(2, 1, 0, 3, 4).flatten(2, 3).double()
        if self.kv.scale is not None:
            both = both * self.kv.scale.t().double()[:, :, None, None]
        return both[0], both[1]


def make_kv(dtype: torch.dtype, batch: int = BATCH, seq_len: int = SEQ_LEN) -> LayerKV:
    page_size = CHUNK_BYTES // (2 * NUM_KV_HEADS * HEAD_DIM * dtype.itemsize)
    num_pages = seq_len // page_size
    shape = (batch * num_pages, NUM_KV_HEADS, 2, page_size, HEAD_DIM)
    pool = torch.empty(shape, dtype=dtype, device="cuda")
    for part in pool.split(256):
        part.copy_(torch.randn(part.shape, device="cuda", dtype=torch.float16))
    pages = torch.randperm(len(pool), device="cuda").view(batch, num_pages)
    scale = torch.tensor([[1.0, 0.5]] * NUM_KV_HEADS, device="cuda") if dtype == FP8 else None
    return LayerKV(PagedKV(dtype, page_size, scale), pool, pages, pool.data_ptr() + pages * CHUNK_BYTES)


@dataclass
class Step:
    """What a decode step of one layer reads beside K and V; one of SETS."""

    qkv: torch.Tensor
    q: torch.Tensor
    codes: torch.Tensor
    summary_table: torch.Tensor
    pools: dict[int, torch.Tensor]  # by slices a list: int32 [batch, num_kv_heads, slices]


def make_steps(dtype: torch.dtype, slices: tuple[int, ...]) -> list[Step]:
    steps = []
    for _ in range(SETS):
        qkv = torch.randn(BATCH, (NUM_Q_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, device="cuda").to(dtype)
        codes = torch.randint(-127, 128, (BATCH * SUMMARY_CHUNKS, CHUNK_BYTES), dtype=torch.int8, device="cuda")
        order = torch.randperm(len(codes), device="cuda").view(BATCH, SUMMARY_CHUNKS)
        pools = {}
        for count in slices:
            chosen = torch.rand(BATCH, NUM_KV_HEADS, NUM_CANDIDATES - 1, device="cuda").argsort(-1)[..., :count] + 1
            pools[count] = chosen.sort(-1).values.int()
        q = qkv.view(BATCH, -1, HEAD_DIM)[:, :NUM_Q_HEADS].contiguous()
        steps.append(Step(qkv, q, codes, codes.data_ptr() + order * CHUNK_BYTES, pools))
    return steps


def lengths(seq_len: int = SEQ_LEN) -> torch.Tensor:
    return torch.full((BATCH,), seq_len, dtype=torch.int32, device="cuda")


def rows() -> torch.Tensor:
    """Slots of the batch's rows."""
    return torch.arange(BATCH, dtype=torch.int32, device="cuda")


def projections() -> dict[str, Any]:
    """Of the `code` summary: `project` [width, code_dim], `query` [num_kv_heads, head_dim, code_dim]."""
    width = NUM_KV_HEADS * HEAD_DIM
    return {
        "project": torch.randn(width, CODE_DIM, device="cuda") * 2,
        "query": torch.randn(NUM_KV_HEADS, HEAD_DIM, CODE_DIM, device="cuda") * 0.004,  # scores of a few nats
    }
