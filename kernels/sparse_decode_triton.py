"""Attention of one query token over an index list of slices, the sink and the window, through page addresses, in one pass.

The list is cut in `num_splits` parts, each attended by a program of its own, and one small kernel combines them. An item
of the list is a slice: number 0 is the sink, then the slices that the window touches, then the selected ones. A page lies
wherever its address points to: in device memory or in pinned host memory.

Reference: kernels/sparse_decode_ref.py
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from qsa.kernels.checks import FLOATS, check_tensor
from qsa.kernels.registry import Operator, register
from qsa.kernels.sparse_decode import num_near_slices
from qsa.kernels.split_triton import attend_tile, combine_splits, kv_type, merge_kernel_sizes


@triton.jit
def _sparse_decode_kernel(
    q_ptr, page_table_ptr, seq_lens_ptr, slices_ptr, out_ptr, lse_ptr,
    num_selected, items_per_split, window_size, sink_size, qk_scale,
    stride_q_b, stride_q_h, stride_pt_b, stride_s_b, stride_s_h, stride_o_b, stride_o_h, stride_o_s,
    KV_TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SLICE: tl.constexpr,       # tokens of a slice
    NUM_NEAR: tl.constexpr,    # the sink's slice and those that a window can touch
    GROUP: tl.constexpr,       # query heads per KV head
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,     # GROUP rounded up to what a product needs
    BLOCK_D: tl.constexpr,     # HEAD_DIM rounded up to a power of two
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    # grid: (num_splits, num_kv_heads, batch)
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + batch).to(tl.int32)
    window_start = tl.maximum(seq_len - window_size, 0)
    first_near = window_start // SLICE
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    offs_n = tl.arange(0, SLICE)
    mask_q = (offs_m < GROUP)[:, None] & (offs_d < HEAD_DIM)[None, :]
    offs_q = batch * stride_q_b + (kv_head * GROUP + offs_m)[:, None] * stride_q_h + offs_d[None, :]
    q = tl.load(q_ptr + offs_q, mask=mask_q, other=0.0).to(KV_TYPE)  # [BLOCK_M, BLOCK_D]
    top = tl.full([BLOCK_M], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    last = tl.minimum((split + 1) * items_per_split, NUM_NEAR + num_selected)
    for item in tl.range(split * items_per_split, last, num_stages=NUM_STAGES):
        is_far = item >= NUM_NEAR
        far = tl.load(slices_ptr + batch * stride_s_b + kv_head * stride_s_h + tl.maximum(item - NUM_NEAR, 0))
        index = tl.where(is_far, far, tl.where(item == 0, 0, first_near + item - 1))
        # sink: [0, sink_size) before the window; window: from its start; selected: what neither of the two holds
        first = tl.where(is_far, sink_size, tl.where(item == 0, 0, window_start))
        end = tl.where(is_far, window_start, tl.where(item == 0, tl.minimum(sink_size, window_start), seq_len))
        start = index * SLICE
        is_read = (index >= 0) & (start < end)
        address = tl.load(page_table_ptr + batch * stride_pt_b + start // PAGE_SIZE, mask=is_read, other=0)
        tokens = start + offs_n
        mask_n = (tokens >= first) & (tokens < end)  # false for a padded place, whose tokens are negative
        in_page = (start % PAGE_SIZE) + kv_head.to(tl.int64) * (2 * PAGE_SIZE)
        top, total, acc = attend_tile(
            q, address, in_page, mask_n, qk_scale, top, total, acc, offs_n, offs_d,
            KV_TYPE, PRECISION, PAGE_SIZE, HEAD_DIM,
        )  # fmt: skip

    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    lse = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), -1.0e30)
    offs_o = batch * stride_o_b + (kv_head * GROUP + offs_m) * stride_o_h + split * stride_o_s
    tl.store(out_ptr + offs_o[:, None] * HEAD_DIM + offs_d[None, :], out, mask=mask_q)
    tl.store(lse_ptr + offs_o, lse, mask=offs_m < GROUP)


def sparse_decode(
    q: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    slice_indices: torch.Tensor,
    *,
    kv_dtype: torch.dtype,
    num_kv_heads: int,
    page_size: int,
    slice_size: int,
    sink_size: int,
    window_size: int,
    sm_scale: float,
    num_splits: int = 16,
    num_warps: int = 4,
    num_stages: int = 2,
) -> torch.Tensor:
    """Attend to sink, window and the slices of a list; no token twice.

    Args:
        q:             [batch, num_q_heads, head_dim]
        page_table:    int64 [batch, max_pages], address of each page `[num_kv_heads][K|V][page_size][head_dim]` of this
                       layer; entries of pages that are not attended are not read through.
        seq_lens:      int32 or int64 [batch], the query's token included; 0 for a row that attends to nothing.
        slice_indices: int32 [batch, num_kv_heads or 1, num_selected], padded with -1.
        kv_dtype:      type of K and V.
        num_splits:    programs that share a list.

    Returns:
        [batch, num_q_heads, head_dim]; zeros for a row that attends to nothing.
    """
    batch, num_q_heads, head_dim = q.shape
    num_selected = slice_indices.shape[2]
    check_tensor("q", q, (batch, num_q_heads, head_dim), FLOATS)
    check_tensor("page_table", page_table, (batch, None), (torch.int64,), q.device)
    check_tensor("seq_lens", seq_lens, (batch,), (torch.int32, torch.int64), q.device)
    check_tensor("slice_indices", slice_indices, (batch, None, num_selected), (torch.int32,), q.device)
    if slice_indices.shape[1] not in (1, num_kv_heads):
        raise ValueError(f"slice_indices must have 1 or {num_kv_heads} lists a sequence, got {slice_indices.shape[1]}")
    if num_selected < 1:
        raise ValueError("slice_indices must have at least one place a list, -1 where there is nothing to attend to")
    if page_size % slice_size:
        raise ValueError(f"page_size ({page_size}) must be a multiple of slice_size ({slice_size})")
    if q.stride(2) != 1 or page_table.stride(1) != 1 or slice_indices.stride(2) != 1:
        raise ValueError("the last axis of q, page_table and slice_indices must be contiguous")
    group, block_m, block_d = merge_kernel_sizes(num_q_heads, num_kv_heads, head_dim)
    num_near = num_near_slices(window_size, slice_size)
    num_splits = min(num_splits, num_near + num_selected)
    out = torch.empty(batch, num_q_heads, num_splits, head_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(batch, num_q_heads, num_splits, dtype=torch.float32, device=q.device)
    _sparse_decode_kernel[(num_splits, num_kv_heads, batch)](
        q, page_table, seq_lens, slice_indices, out, lse,
        num_selected, triton.cdiv(num_near + num_selected, num_splits), window_size, sink_size, sm_scale * 1.4426950408889634,
        q.stride(0), q.stride(1), page_table.stride(0), slice_indices.stride(0),
        slice_indices.stride(1) if slice_indices.shape[1] > 1 else 0, *lse.stride(),
        KV_TYPE=kv_type(kv_dtype), PRECISION="ieee" if kv_dtype == torch.float32 else "tf32", PAGE_SIZE=page_size,
        SLICE=slice_size, NUM_NEAR=num_near, GROUP=group, HEAD_DIM=head_dim, BLOCK_M=block_m, BLOCK_D=block_d,
        NUM_STAGES=num_stages, num_warps=num_warps,
    )  # fmt: skip
    return combine_splits(out, lse, q.dtype)


class SparseDecode(Operator):
    """sparse_decode on a GPU. Unlike the torch backend's it takes a final list, and addresses instead of rows."""

    def init(self, **sizes: Any) -> None:
        """Nothing is kept between calls: the splits' partial results come from torch's allocator."""

    forward = staticmethod(sparse_decode)


register("sparse_decode", "triton", SparseDecode)
