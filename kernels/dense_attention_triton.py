"""Dense attention of one query token over paged K and V: the baseline that the sparse step is measured against.

The sequence is cut in `num_splits` equal parts, each attended by a program of its own, and one small kernel combines them.

Reference: kernels/dense_attention_ref.py
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qsa.kernels.checks import FLOATS, check_tensor
from qsa.kernels.registry import Operator, register
from qsa.kernels.split_triton import attend_tile, combine_splits, kv_type, merge_kernel_sizes


@triton.jit
def _dense_decode_kernel(
    q_ptr, page_table_ptr, seq_lens_ptr, out_ptr, lse_ptr,
    qk_scale,
    stride_q_b, stride_q_h, stride_pt_b, stride_o_b, stride_o_h, stride_o_s,
    KV_TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,       # query heads per KV head
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,     # GROUP rounded up to what a product needs
    BLOCK_N: tl.constexpr,     # tokens attended at a time, a part of a page
    BLOCK_D: tl.constexpr,     # HEAD_DIM rounded up to a power of two
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    # grid: (num_splits, num_kv_heads, batch)
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + batch).to(tl.int32)
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    offs_n = tl.arange(0, BLOCK_N)
    mask_q = (offs_m < GROUP)[:, None] & (offs_d < HEAD_DIM)[None, :]
    offs_q = batch * stride_q_b + (kv_head * GROUP + offs_m)[:, None] * stride_q_h + offs_d[None, :]
    q = tl.load(q_ptr + offs_q, mask=mask_q, other=0.0).to(KV_TYPE)  # [BLOCK_M, BLOCK_D]
    top = tl.full([BLOCK_M], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    num_tiles = tl.cdiv(seq_len, BLOCK_N)
    per_split = tl.cdiv(num_tiles, tl.num_programs(0))
    for tile in tl.range(split * per_split, tl.minimum((split + 1) * per_split, num_tiles), num_stages=NUM_STAGES):
        start = tile * BLOCK_N
        address = tl.load(page_table_ptr + batch * stride_pt_b + start // PAGE_SIZE)
        in_page = (start % PAGE_SIZE) + kv_head.to(tl.int64) * (2 * PAGE_SIZE)
        top, total, acc = attend_tile(
            q, address, in_page, start + offs_n < seq_len, qk_scale, top, total, acc, offs_n, offs_d,
            KV_TYPE, PRECISION, PAGE_SIZE, HEAD_DIM,
        )  # fmt: skip

    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    lse = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), -1.0e30)
    offs_o = batch * stride_o_b + (kv_head * GROUP + offs_m) * stride_o_h + split * stride_o_s
    tl.store(out_ptr + offs_o[:, None] * HEAD_DIM + offs_d[None, :], out, mask=mask_q)
    tl.store(lse_ptr + offs_o, lse, mask=offs_m < GROUP)


def dense_decode(
    q: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_dtype: torch.dtype,
    num_kv_heads: int,
    page_size: int,
    sm_scale: float,
    num_splits: int = 32,
    block_n: int = 64,
    num_warps: int = 4,
    num_stages: int = 3,
) -> torch.Tensor:
    """Attend to every token.

    Args:
        q:          [batch, num_q_heads, head_dim]
        page_table: int64 [batch, max_pages], address of each page `[num_kv_heads][K|V][page_size][head_dim]` of this layer.
        seq_lens:   int32 or int64 [batch], the query's token included; 0 for a row that attends to nothing.
        kv_dtype:   type of K and V.
        num_splits: programs that share a sequence and KV head.

    Returns:
        [batch, num_q_heads, head_dim]; zeros for a row that attends to nothing.
    """
    batch, num_q_heads, head_dim = q.shape
    check_tensor("q", q, (batch, num_q_heads, head_dim), FLOATS)
    check_tensor("page_table", page_table, (batch, None), (torch.int64,), q.device)
    check_tensor("seq_lens", seq_lens, (batch,), (torch.int32, torch.int64), q.device)
    if q.stride(2) != 1 or page_table.stride(1) != 1:
        raise ValueError("the last axis of q and page_table must be contiguous")
    block_n = min(block_n, page_size)
    group, block_m, block_d = merge_kernel_sizes(num_q_heads, num_kv_heads, head_dim)
    out = torch.empty(batch, num_q_heads, num_splits, head_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(batch, num_q_heads, num_splits, dtype=torch.float32, device=q.device)
    _dense_decode_kernel[(num_splits, num_kv_heads, batch)](
        q, page_table, seq_lens, out, lse, sm_scale * 1.4426950408889634,
        q.stride(0), q.stride(1), page_table.stride(0), *lse.stride(),
        KV_TYPE=kv_type(kv_dtype), PRECISION="ieee" if kv_dtype == torch.float32 else "tf32", PAGE_SIZE=page_size,
        GROUP=group, HEAD_DIM=head_dim, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d,
        NUM_STAGES=num_stages, num_warps=num_warps,
    )  # fmt: skip
    return combine_splits(out, lse, q.dtype)


class DenseAttention(Operator):
    """Dense decode attention on a GPU."""

    forward = staticmethod(dense_decode)


register("dense_attention", "triton", DenseAttention)
