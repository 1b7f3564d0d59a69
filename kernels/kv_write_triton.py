"""Write the new K and V of decoding sequences into their pages, and their codes into the summaries, in one pass.

A token's code depends on its own key alone, so it is written with the key; a slice whose last token is written is complete.

Reference: kernels/kv_write_ref.py, and kernels/summaries/code_ref.py for the codes.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from qsa.kernels.checks import FLOATS, check_tensor
from qsa.kernels.registry import Operator, register
from qsa.kernels.split_triton import kv_type

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class CodeWrite:
    """How codes are made and where they go, in one layer.

    Attributes:
        project:       float32 [num_kv_heads * head_dim, code_dim]
        bias:          float32 [code_dim], what the mean key projects to, negated.
        summary_table: int64 [batch, max_summary_chunks], addresses.
        slice_size:    tokens of a slice.
    """

    project: torch.Tensor
    bias: torch.Tensor
    summary_table: torch.Tensor
    slice_size: int


def slices_per_chunk(slice_bytes: int) -> int:
    """The largest power of two of slices that fits a chunk, as the memory layout has it."""
    return 1 << ((CHUNK_BYTES // slice_bytes).bit_length() - 1)


@triton.jit
def round_to_even(x):
    """The nearest whole number of a float32 below 2^22; halves go to the even one."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _kv_write_kernel(
    k_ptr, v_ptr, page_table_ptr, seq_lens_ptr, project_ptr, bias_ptr, summary_table_ptr,
    stride_k_b, stride_k_h, stride_v_b, stride_v_h, stride_pt_b, stride_st_b,
    KV_TYPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,     # HEAD_DIM rounded up to a power of two
    CODE_DIM: tl.constexpr,
    CHUNK_TOKENS: tl.constexpr,  # tokens whose codes one summary chunk holds
    BLOCK_W: tl.constexpr,     # numbers of the joint key multiplied at a time
    BLOCK_C: tl.constexpr,     # columns of the code made by one program
):  # fmt: skip
    # grid: (batch, num_kv_heads + cdiv(code_dim, BLOCK_C))
    batch = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    position = tl.load(seq_lens_ptr + batch).to(tl.int32) - 1
    if position >= 0:
        if part < NUM_KV_HEADS:
            offs_d = tl.arange(0, BLOCK_D)
            mask_d = offs_d < HEAD_DIM
            address = tl.load(page_table_ptr + batch * stride_pt_b + position // PAGE_SIZE)
            base = tl.multiple_of(address.to(tl.pointer_type(KV_TYPE)), 16)
            row = part.to(tl.int64) * (2 * PAGE_SIZE) + position % PAGE_SIZE
            k = tl.load(k_ptr + batch * stride_k_b + part * stride_k_h + offs_d, mask=mask_d)
            v = tl.load(v_ptr + batch * stride_v_b + part * stride_v_h + offs_d, mask=mask_d)
            tl.store(base + row * HEAD_DIM + offs_d, k.to(KV_TYPE), mask=mask_d)
            tl.store(base + (row + PAGE_SIZE) * HEAD_DIM + offs_d, v.to(KV_TYPE), mask=mask_d)
        else:
            offs_c = (part - NUM_KV_HEADS) * BLOCK_C + tl.arange(0, BLOCK_C)
            mask_c = offs_c < CODE_DIM
            code = tl.load(bias_ptr + offs_c, mask=mask_c, other=0.0)
            for first in tl.range(0, NUM_KV_HEADS * HEAD_DIM, BLOCK_W):
                offs_w = first + tl.arange(0, BLOCK_W)
                mask_w = offs_w < NUM_KV_HEADS * HEAD_DIM
                offs_k = batch * stride_k_b + (offs_w // HEAD_DIM) * stride_k_h + offs_w % HEAD_DIM
                key = tl.load(k_ptr + offs_k, mask=mask_w, other=0.0).to(KV_TYPE).to(tl.float32)  # as it is stored
                offs_p = offs_w[:, None] * CODE_DIM + offs_c[None, :]
                project = tl.load(project_ptr + offs_p, mask=mask_w[:, None] & mask_c[None, :], other=0.0)
                code += tl.sum(key[:, None] * project, 0)
            code = round_to_even(tl.minimum(tl.maximum(code, -127.0), 127.0)).to(tl.int8)
            address = tl.load(summary_table_ptr + batch * stride_st_b + position // CHUNK_TOKENS)
            out = address.to(tl.pointer_type(tl.int8)) + (position % CHUNK_TOKENS).to(tl.int64) * CODE_DIM
            tl.store(out + offs_c, code, mask=mask_c)


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_dtype: torch.dtype,
    page_size: int,
    code: CodeWrite | None = None,
    block_c: int = 16,
) -> None:
    """Write the last token of every sequence.

    Args:
        k, v:       [batch, num_kv_heads, head_dim], after RoPE
        page_table: int64 [batch, max_pages], address of each page `[num_kv_heads][K|V][page_size][head_dim]` of this layer.
        seq_lens:   int32 or int64 [batch], the new token included; 0 for a row that writes nothing.
        kv_dtype:   type of K and V in the pages.
        code:       None: no codes are kept.
    """
    batch, num_kv_heads, head_dim = k.shape
    check_tensor("k", k, (batch, num_kv_heads, head_dim), FLOATS)
    check_tensor("v", v, (batch, num_kv_heads, head_dim), FLOATS, k.device)
    check_tensor("page_table", page_table, (batch, None), (torch.int64,), k.device)
    check_tensor("seq_lens", seq_lens, (batch,), (torch.int32, torch.int64), k.device)
    if k.stride(2) != 1 or v.stride(2) != 1 or page_table.stride(1) != 1:
        raise ValueError("the last axis of k, v and page_table must be contiguous")
    code_dim = chunk_tokens = 1
    project, bias, summary_table = k, k, page_table  # not read without codes
    if code is not None:
        project, bias, summary_table = code.project, code.bias, code.summary_table
        code_dim = project.shape[1]
        check_tensor("code.project", project, (num_kv_heads * head_dim, code_dim), (torch.float32,), k.device)
        check_tensor("code.bias", bias, (code_dim,), (torch.float32,), k.device)
        check_tensor("code.summary_table", summary_table, (batch, None), (torch.int64,), k.device)
        if not (project.is_contiguous() and bias.is_contiguous()) or summary_table.stride(1) != 1:
            raise ValueError("code.project and code.bias must be contiguous, code.summary_table in its last axis")
        chunk_tokens = slices_per_chunk(code.slice_size * code_dim) * code.slice_size
    num_parts = num_kv_heads + (0 if code is None else triton.cdiv(code_dim, block_c))
    _kv_write_kernel[(batch, num_parts)](
        k, v, page_table, seq_lens, project, bias, summary_table,
        *k.stride()[:2], *v.stride()[:2], page_table.stride(0), summary_table.stride(0),
        KV_TYPE=kv_type(kv_dtype), PAGE_SIZE=page_size, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim), CODE_DIM=code_dim, CHUNK_TOKENS=chunk_tokens,
        BLOCK_W=min(128, triton.next_power_of_2(num_kv_heads * head_dim)), BLOCK_C=block_c, num_warps=4,
    )  # fmt: skip


class KVWrite(Operator):
    """kv_write of decoding sequences on a GPU."""

    forward = staticmethod(kv_write)


register("kv_write", "triton", KVWrite)
