"""What kernels that write K, V and codes share: how codes are made and where they go, rotation, and types as they are stored.

A token's code depends on its own key alone, so it is written with the key; a slice whose last token is written is complete.

Reference: kernels/decode_prepare_ref.py
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from qsa.kernels.checks import FLOATS, check_tensor
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
