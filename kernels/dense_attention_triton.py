"""Dense attention of one query token over paged K and V: the baseline that the sparse step is measured against.

The sequence is cut in `num_splits` equal parts, each attended by a program of its own; the last program of a sequence and KV
head adds them up.

Reference: kernels/dense_attention_ref.py
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qsa.kernels.paged_kv import PagedKV
from qsa.kernels.registry import Operator, register
from qsa.kernels.split_triton import (
    LOG2_E,
    attend_tile,
    check_decode,
    finish_split,
    head_constants,
    kv_constants,
    launch_overlap,
    load_rows,
    load_scale,
    row_pointer,
    split_workspace,
)

TUNE = [
    dict(num_splits=32, block_n=64, num_stages=3),
    dict(num_splits=33, block_n=64, num_stages=3),
    dict(num_splits=16, block_n=64, num_stages=3),
    dict(num_splits=64, block_n=64, num_stages=3),
    dict(num_splits=32, block_n=64, num_stages=5),
    dict(num_splits=16, block_n=64, num_stages=5),
    dict(num_splits=32, block_n=128, num_stages=3),
    dict(num_splits=16, block_n=128, num_stages=5),
    dict(num_splits=32, block_n=32, num_stages=5),
]


@triton.jit
def _dense_decode_kernel(
    q_ptr, page_table_ptr, seq_lens_ptr, scale_ptr, parts_ptr, stats_ptr, arrivals_ptr, out_ptr,
    qk_scale,
    stride_q_b, stride_q_h, stride_pt_b,
    STORED: tl.constexpr,
    TYPE: tl.constexpr,
    E4M3: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    GROUP: tl.constexpr,       # query heads per KV head
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,     # GROUP rounded up to what a product needs
    BLOCK_D: tl.constexpr,     # HEAD_DIM rounded up to a power of two
    BLOCK_S: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,     # tokens attended at a time, a part of a page
    NUM_STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    # grid: (num_splits, num_kv_heads, batch)
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + batch).to(tl.int32)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    offs_n = tl.arange(0, BLOCK_N)
    mask_q = (offs_m < GROUP)[:, None] & (offs_d < HEAD_DIM)[None, :]
    offs_q = batch * stride_q_b + (kv_head * GROUP + offs_m)[:, None] * stride_q_h + offs_d[None, :]
    q = tl.load(q_ptr + offs_q, mask=mask_q, other=0.0).to(TYPE)  # [BLOCK_M, BLOCK_D]
    qk_scale *= load_scale(scale_ptr, kv_head, 0, HAS_SCALE, E4M3)
    top = tl.full([BLOCK_M], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    num_tiles = tl.cdiv(seq_len, BLOCK_N)
    per_split = tl.cdiv(num_tiles, NUM_SPLITS)
    for tile in tl.range(split * per_split, tl.minimum((split + 1) * per_split, num_tiles), num_stages=NUM_STAGES):
        start = tile * BLOCK_N
        address = tl.load(page_table_ptr + batch * stride_pt_b + start // PAGE_SIZE)
        base = row_pointer(address, STORED) + kv_head.to(tl.int64) * (2 * PAGE_SIZE * HEAD_DIM)
        rows = start % PAGE_SIZE + offs_n
        mask_n = start + offs_n < seq_len
        k = load_rows(base, rows, mask_n, offs_d, TYPE, E4M3, HEAD_DIM, BLOCK_D)
        v = load_rows(base + PAGE_SIZE * HEAD_DIM, rows, mask_n, offs_d, TYPE, E4M3, HEAD_DIM, BLOCK_D)
        top, total, acc = attend_tile(q, k, v, mask_n, qk_scale, top, total, acc, TYPE, PRECISION)

    finish_split(
        acc, top, total, load_scale(scale_ptr, kv_head, 1, HAS_SCALE, E4M3), batch * tl.num_programs(1) + kv_head, split,
        parts_ptr, stats_ptr, arrivals_ptr, out_ptr,
        NUM_SPLITS, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D, BLOCK_S, BLOCK_G, BLOCK_C,
    )  # fmt: skip


def dense_decode(
    q: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv: PagedKV,
    num_kv_heads: int,
    sm_scale: float,
    num_splits: int = 32,
    block_n: int = 64,
    num_warps: int = 4,
    num_stages: int = 3,
    overlaps: bool | None = None,
) -> torch.Tensor:
    """Attend to every token.

    Args:
        q:          [batch, num_q_heads, head_dim]
        page_table: int64 [batch, max_pages], address of each page `[num_kv_heads][K|V][page_size][head_dim]` of this layer.
        seq_lens:   int32 or int64 [batch], the query's token included; 0 for a row that attends to nothing.
        num_splits: programs that share a sequence and KV head.
        overlaps:   start before the launch before has ended; None: on cards that can, from Hopper on. What
                    it writes may not be seq_lens.

    Returns:
        [batch, num_q_heads, head_dim]; zeros for a row that attends to nothing.
    """
    batch, num_q_heads, head_dim = check_decode(q, page_table, seq_lens, kv, num_kv_heads)
    heads = head_constants(num_q_heads, num_kv_heads, head_dim, num_splits, num_warps)
    parts, stats, arrivals = split_workspace(batch * num_kv_heads, num_splits, heads["GROUP"], head_dim, q.device)
    out = torch.empty(batch, num_q_heads, head_dim, dtype=q.dtype, device=q.device)
    _dense_decode_kernel[(num_splits, num_kv_heads, batch)](
        q, page_table, seq_lens, q if kv.scale is None else kv.scale, parts, stats, arrivals, out, sm_scale * LOG2_E,
        q.stride(0), q.stride(1), page_table.stride(0),
        BLOCK_N=min(block_n, kv.page_size), NUM_STAGES=num_stages, num_warps=num_warps,
        **kv_constants(kv, q.device), **heads, **launch_overlap(overlaps, q.device),
    )  # fmt: skip
    return out


class DenseAttention(Operator):
    """Dense decode attention on a GPU."""

    forward = staticmethod(dense_decode)


register("dense_attention", "triton", DenseAttention)
