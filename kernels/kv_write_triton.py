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


@dataclass(frozen=True)
class PrepareSizes:
    """What follows from the arguments of decode_prepare and prefill_prepare.

    Attributes:
        chunk_tokens: tokens whose codes one summary chunk holds.
    """

    num_q_heads: int
    code_dim: int
    chunk_tokens: int


def check_prepare(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    num_kv_heads: int,
    head_dim: int,
    kv_dtype: torch.dtype,
    head_norm: torch.Tensor | None,
    kv_scale: torch.Tensor | None,
    code: CodeWrite | None,
) -> PrepareSizes:
    """Check what decode_prepare and prefill_prepare have in common."""
    device = qkv.device
    check_tensor("qkv", qkv, (None, None), FLOATS)
    num_q_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    if head_dim % 16 or qkv.shape[1] % head_dim or num_q_heads < 1 or num_q_heads % num_kv_heads:
        raise ValueError(
            f"qkv has {qkv.shape[1]} numbers a token: with {num_kv_heads} KV heads of {head_dim}, it must hold a multiple of as"
            " many query heads before K and V, and head_dim must be a multiple of 16"
        )
    for name, table in (("cos", cos), ("sin", sin)):
        check_tensor(name, table, (None, head_dim), (torch.float32,), device)
    if qkv.stride(1) != 1 or not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError("cos and sin must be contiguous, qkv in its last axis")
    if head_norm is not None:
        check_tensor("head_norm", head_norm, (num_q_heads + num_kv_heads, head_dim), (torch.float32,), device)
    if (kv_scale is not None) != (kv_dtype == torch.float8_e4m3fn):
        raise ValueError(f"kv_scale belongs to K and V in float8_e4m3fn and to no other type, got kv_dtype {kv_dtype}")
    if kv_scale is not None:
        check_tensor("kv_scale", kv_scale, (num_kv_heads, 2), (torch.float32,), device)
    if any(part is not None and not part.is_contiguous() for part in (head_norm, kv_scale)):
        raise ValueError("head_norm and kv_scale must be contiguous")
    if code is None:
        return PrepareSizes(num_q_heads, 1, 1)
    code_dim = code.project.shape[-1]
    check_tensor("code.project", code.project, (num_kv_heads * head_dim, code_dim), (torch.float32,), device)
    check_tensor("code.bias", code.bias, (code_dim,), (torch.float32,), device)
    if not (code.project.is_contiguous() and code.bias.is_contiguous()) or code.summary_table.stride(-1) != 1:
        raise ValueError("code.project and code.bias must be contiguous, code.summary_table in its last axis")
    return PrepareSizes(num_q_heads, code_dim, slices_per_chunk(code.slice_size * code_dim) * code.slice_size)


def stored_type(dtype: torch.dtype) -> tl.dtype:
    """Triton's name of a type of K and V for a kernel that writes them: float8_e4m3fn is written as its bits."""
    return tl.uint8 if dtype == torch.float8_e4m3fn else kv_type(dtype)


def key_type(kv_dtype: torch.dtype, dtype: torch.dtype) -> tl.dtype:
    """Triton's name of the type of the keys that codes are made from: as they are stored, but before float8 rounds them.

    dtype: of the activations.
    """
    return kv_type(dtype if kv_dtype == torch.float8_e4m3fn else kv_dtype)


@triton.jit
def e4m3_bits(x):
    """A float32 as the bits of the nearest float8_e4m3fn, ties to even, beyond 448 saturated: the same on every card."""
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)  # 20 bits of the fraction fall away
    small = (size + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000  # below 2^-6 numbers are multiples of 2^-9
    code = tl.where(size < 0.015625, small, normal) | ((x.to(tl.uint32, bitcast=True) >> 24) & 0x80)
    return tl.where(x != x, 0x7F, code).to(tl.uint8)


@triton.jit
def to_stored(x, KV_TYPE: tl.constexpr):
    """A float32 as it is stored; KV_TYPE is from `stored_type`."""
    return e4m3_bits(x) if tl.uint8 == KV_TYPE else x.to(KV_TYPE)


@triton.jit
def head_factor(first, second, eps, HEAD_DIM: tl.constexpr):
    """What RMSNorm multiplies a head with; its halves lie along the last axis."""
    return tl.rsqrt(tl.sum(first * first + second * second, -1, keep_dims=True) / HEAD_DIM + eps)


@triton.jit
def rotate_halves(first, second, cos, sin):
    """Rotary embedding of the pairs (first[i], second[i])."""
    return first * cos - second * sin, second * cos + first * sin


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
