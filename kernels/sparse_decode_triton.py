"""Attention of one query token over an index list of slices, the sink and the window, through page addresses, in one pass.

The list is cut in `num_splits` parts, each attended by a program of its own, which knows all its addresses before it reads
the first token; the last program of a list adds up the parts. A page lies wherever its address points to: in device memory
or in pinned host memory.

Reference: kernels/sparse_decode_ref.py
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from qsa.kernels.paged_kv import PagedKV
from qsa.kernels.registry import Operator, register
from qsa.kernels.sparse_decode import num_near_slices
from qsa.kernels.split_triton import (
    LOG2_E,
    attend_tile,
    check_decode,
    check_lists,
    entry,
    finish_split,
    head_constants,
    kv_constants,
    launch_overlap,
    load_rows,
    load_scale,
    load_table,
    locate_slices,
    row_pointer,
    split_workspace,
    table_block,
)

TUNE = [  # the 7B shape with 8 sequences has 32 lists: two, three or four programs on a multiprocessor, all at once
    dict(),
    dict(num_splits=8, block_n=64, num_warps=2, num_stages=4),
    dict(num_splits=8, block_n=64, num_warps=4, num_stages=3),
    dict(num_splits=12, block_n=64, num_warps=2, num_stages=3),
    dict(num_splits=16, block_n=64, num_warps=2, num_stages=2),
    dict(num_splits=16, block_n=32, num_warps=2, num_stages=4),
    dict(num_splits=8, block_n=32, num_warps=2, num_stages=5),
]


@triton.jit
def _sparse_decode_kernel(
    q_ptr, page_table_ptr, seq_lens_ptr, slots_ptr, pools_ptr, scale_ptr, parts_ptr, stats_ptr, arrivals_ptr, out_ptr,
    num_listed, window_size, sink_size, qk_scale, max_pages,
    stride_q_b, stride_q_h, stride_pt_b, stride_p_s, stride_p_h,
    STORED: tl.constexpr,
    TYPE: tl.constexpr,
    E4M3: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SLICE: tl.constexpr,       # tokens of a slice
    NUM_NEAR: tl.constexpr,    # the sink's slice and those that a window can touch
    NUM_SPLITS: tl.constexpr,
    GROUP: tl.constexpr,       # query heads per KV head
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,     # GROUP rounded up to what a product needs
    BLOCK_D: tl.constexpr,     # HEAD_DIM rounded up to a power of two
    BLOCK_S: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,     # places of a split, rounded up to a power of two
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,     # tokens attended at a time, a part of a slice
    NUM_STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    # grid: (num_splits, num_kv_heads, batch)
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    offs_n = tl.arange(0, BLOCK_N)
    offs_p = tl.arange(0, BLOCK_P)
    first_place = (NUM_NEAR + num_listed) * split // NUM_SPLITS
    num_places = (NUM_NEAR + num_listed) * (split + 1) // NUM_SPLITS - first_place
    places = first_place + offs_p
    slot = tl.load(slots_ptr + batch).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + batch).to(tl.int32)
    table = load_table(page_table_ptr + batch * stride_pt_b, max_pages, BLOCK_T)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    mask_q = (offs_m < GROUP)[:, None] & (offs_d < HEAD_DIM)[None, :]
    offs_q = batch * stride_q_b + (kv_head * GROUP + offs_m)[:, None] * stride_q_h + offs_d[None, :]
    q = tl.load(q_ptr + offs_q, mask=mask_q, other=0.0).to(TYPE)  # [BLOCK_M, BLOCK_D]
    qk_scale *= load_scale(scale_ptr, kv_head, 0, HAS_SCALE, E4M3)
    listed = tl.load(pools_ptr + slot * stride_p_s + kv_head * stride_p_h + places, mask=places < num_listed, other=-1)
    addresses, firsts, ends = locate_slices(
        places, listed, num_listed, seq_len, table, kv_head, window_size, sink_size,
        STORED, PAGE_SIZE, SLICE, HEAD_DIM, BLOCK_T,
    )  # fmt: skip
    spans = (ends << 16) | firsts

    top = tl.full([BLOCK_M], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    TILES: tl.constexpr = SLICE // BLOCK_N
    for tile in tl.range(0, num_places * TILES, num_stages=NUM_STAGES):
        base = row_pointer(entry(addresses, offs_p, tile // TILES), STORED)
        span = entry(spans, offs_p, tile // TILES)
        rows = (tile % TILES) * BLOCK_N + offs_n
        mask_n = (rows >= (span & 65535)) & (rows < (span >> 16))
        k = load_rows(base, rows, mask_n, offs_d, TYPE, E4M3, HEAD_DIM, BLOCK_D)
        v = load_rows(base + PAGE_SIZE * HEAD_DIM, rows, mask_n, offs_d, TYPE, E4M3, HEAD_DIM, BLOCK_D)
        top, total, acc = attend_tile(q, k, v, mask_n, qk_scale, top, total, acc, TYPE, PRECISION)

    finish_split(
        acc, top, total, load_scale(scale_ptr, kv_head, 1, HAS_SCALE, E4M3), batch * tl.num_programs(1) + kv_head, split,
        parts_ptr, stats_ptr, arrivals_ptr, out_ptr,
        NUM_SPLITS, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D, BLOCK_S, BLOCK_G, BLOCK_C,
    )  # fmt: skip


def sparse_decode(
    q: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    slots: torch.Tensor,
    pools: torch.Tensor,
    *,
    kv: PagedKV,
    num_kv_heads: int,
    slice_size: int,
    sink_size: int,
    window_size: int,
    sm_scale: float,
    num_splits: int = 8,
    block_n: int | None = None,
    num_warps: int | None = None,
    num_stages: int = 3,
    overlaps: bool | None = None,
) -> torch.Tensor:
    """Attend to sink, window and the slices of a list; no token twice.

    Args:
        q:          [batch, num_q_heads, head_dim]
        page_table: int64 [batch, max_pages], address of each page `[num_kv_heads][K|V][page_size][head_dim]` of this layer;
                    entries of pages that are not attended are not read through.
        seq_lens:   int32 or int64 [batch], the query's token included; 0 for a row that attends to nothing.
        slots:      int32 or int64 [batch], which lists are a row's.
        pools:      int32 [slots, num_kv_heads or 1, num_listed], padded with -1.
        num_splits: programs that share a list.
        block_n:    tokens attended at a time; None: what suits the type of K and V, like num_warps.
        overlaps:   start before the launch before has ended; None: on cards that can, from Hopper on. What the launch
                    before writes may be q, K, V and pools, but not page_table, seq_lens or slots.

    Returns:
        [batch, num_q_heads, head_dim]; zeros for a row that attends to nothing.
    """
    batch, num_q_heads, head_dim = check_decode(q, page_table, seq_lens, kv, num_kv_heads)
    check_lists(slots, pools, kv, num_kv_heads, slice_size, sink_size, batch)
    num_near, num_listed = num_near_slices(window_size, slice_size), pools.shape[2]
    num_splits = min(num_splits, num_near + num_listed)
    num_warps = num_warps or (2 if kv.dtype.itemsize == 2 else 4)
    block_n = min(block_n or (64 if kv.dtype.itemsize <= 2 else 16), slice_size)
    heads = head_constants(num_q_heads, num_kv_heads, head_dim, num_splits, num_warps)
    parts, stats, arrivals = split_workspace(batch * num_kv_heads, num_splits, heads["GROUP"], head_dim, q.device)
    out = torch.empty(batch, num_q_heads, head_dim, dtype=q.dtype, device=q.device)
    _sparse_decode_kernel[(num_splits, num_kv_heads, batch)](
        q, page_table, seq_lens, slots, pools, q if kv.scale is None else kv.scale, parts, stats, arrivals, out,
        num_listed, window_size, sink_size, sm_scale * LOG2_E, page_table.shape[1],
        q.stride(0), q.stride(1), page_table.stride(0), pools.stride(0), pools.stride(1) if pools.shape[1] > 1 else 0,
        SLICE=slice_size, NUM_NEAR=num_near, BLOCK_P=triton.next_power_of_2(triton.cdiv(num_near + num_listed, num_splits)),
        BLOCK_T=table_block(page_table), BLOCK_N=block_n, NUM_STAGES=num_stages, num_warps=num_warps,
        **kv_constants(kv, q.device), **heads, **launch_overlap(overlaps, q.device),
    )  # fmt: skip
    return out


class SparseDecode(Operator):
    """sparse_decode on a GPU. Unlike the torch backend's it takes a final list, and addresses instead of rows."""

    def init(self, **sizes: Any) -> None:
        """Nothing is kept between calls: the splits' partial results come from torch's allocator."""

    forward = staticmethod(sparse_decode)


register("sparse_decode", "triton", SparseDecode)
