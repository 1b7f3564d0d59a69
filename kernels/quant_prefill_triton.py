"""Products of many rows with weights of 8 or 4 bits: activations brought to 8 bits, or weights to the activations' type.

A matrix library multiplies; what is here are the passes before and after it. Rows of activations get a scale each
(`quantise_rows`), their columns in the order in which the weights lie. The sums are scaled back by row and column
(`scale_sums`). `dequantise_bytes` and `dequantise_nibbles` make a piece of the weight in the activations' type.

Reference: kernels/quant_linear_ref.py
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from qsa.kernels.skinny_launch_triton import weight_ptrs
from qsa.kernels.skinny_quant_triton import BYTE_RUN, added_to_number, is_compiled, unpack_bytes, unpack_nibbles

PIECE_BYTES = 256 << 20  # weights made, and 32-bit sums kept, at a time
FP8_MAX = 448.0
BLOCK_WORDS = 1024
ROWS = tl.constexpr(8)  # of a weight that a program dequantises


@triton.jit
def _quantise_rows_kernel(
    x_ptr, out_ptr, scale_ptr, in_features, columns, stride_x, LIMIT: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    # grid: (num_rows,)
    row = tl.program_id(0).to(tl.int64)
    offs_w = tl.arange(0, BLOCK)
    offs_k = offs_w // BYTE_RUN * (2 * BYTE_RUN) + offs_w % BYTE_RUN
    largest = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, columns, 2 * BLOCK):
        at = start + offs_k
        x0 = tl.load(x_ptr + row * stride_x + at, mask=at < in_features, other=0.0).to(tl.float32)
        x1 = tl.load(x_ptr + row * stride_x + at + BYTE_RUN, mask=at + BYTE_RUN < in_features, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.maximum(tl.abs(x0), tl.abs(x1)))
    scale = tl.maximum(tl.max(largest, 0), 1.0e-30) / LIMIT
    tl.store(scale_ptr + row, scale)
    for start in tl.range(0, columns, 2 * BLOCK):
        at = start + offs_k
        x0 = tl.load(x_ptr + row * stride_x + at, mask=at < in_features, other=0.0).to(tl.float32) / scale
        x1 = tl.load(x_ptr + row * stride_x + at + BYTE_RUN, mask=at + BYTE_RUN < in_features, other=0.0).to(tl.float32) / scale
        both = tl.interleave(x0, x1)
        if KIND == "int8":
            both = tl.floor(both + 0.5)
        both = tl.minimum(tl.maximum(both, -LIMIT), LIMIT)
        offs = start + tl.arange(0, 2 * BLOCK)
        tl.store(out_ptr + row * columns + offs, both.to(out_ptr.dtype.element_ty), mask=offs < columns)


def quantise_rows(x: torch.Tensor, columns: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations in 8 bits with a scale a row.

    Args:
        x:       [num_rows, in_features]
        columns: of the weight as stored: in_features rounded up to whole blocks.
        kind:    int8, or fp8 for float8_e4m3fn (Ada or newer).

    Returns:
        Numbers [num_rows, columns] in the order of `byte_columns`, and float32 scales [num_rows].
    """
    out = torch.empty(len(x), columns, dtype=torch.int8 if kind == "int8" else torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(len(x), dtype=torch.float32, device=x.device)
    _quantise_rows_kernel[(len(x),)](
        x, out, scale, x.shape[1], columns, x.stride(0),
        LIMIT=127.0 if kind == "int8" else FP8_MAX, KIND=kind, BLOCK=BLOCK_WORDS, num_warps=8,
    )  # fmt: skip
    return out, scale


@triton.jit
def _scale_sums_kernel(
    sum_ptr, row_scale_ptr, column_scale_ptr, bias_ptr, out_ptr, width, stride_s, stride_o,
    HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # grid: (num_rows, blocks of columns); a chunk may have more rows than a grid's second axis
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < width
    scale = tl.load(row_scale_ptr + row) * tl.load(column_scale_ptr + offs, mask=mask, other=0.0)
    out = tl.load(sum_ptr + row * stride_s + offs, mask=mask, other=0).to(tl.float32) * scale
    if HAS_BIAS:
        out += tl.load(bias_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * stride_o + offs, out.to(out_ptr.dtype.element_ty), mask=mask)


def scale_sums(
    sums: torch.Tensor, row_scale: torch.Tensor, column_scale: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """out = sums * row_scale * column_scale + bias; sums int32 or float32 [num_rows, width], out like it in any float type."""
    num_rows, width = sums.shape
    _scale_sums_kernel[(num_rows, triton.cdiv(width, 2048))](
        sums, row_scale, column_scale, sums if bias is None else bias, out, width, sums.stride(0), out.stride(0),
        HAS_BIAS=bias is not None, BLOCK=2048, num_warps=8,
    )  # fmt: skip


def linear_in_8_bits(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype, by_row: bool
) -> torch.Tensor:
    """x @ (weight * scale).T + bias with x brought to the weight's 8-bit type, a scale a row.

    Args:
        x:      [num_rows, in_features]
        weight: int8 or float8_e4m3fn [out_features, columns], columns in the order of `byte_columns`.
        scale:  float32 [out_features]
        by_row: of float8: whether the library scales rows and columns itself (Hopper, bfloat16 results).
    """
    kind = "int8" if weight.dtype == torch.int8 else "fp8"
    numbers, row_scale = quantise_rows(x, weight.shape[1], kind)
    if kind == "fp8" and by_row and out_dtype == torch.bfloat16:
        return torch._scaled_mm(
            numbers,
            weight.T,
            scale_a=row_scale.unsqueeze(1),
            scale_b=scale.unsqueeze(0),
            bias=bias,
            out_dtype=out_dtype,
            use_fast_accum=True,
        )
    out = torch.empty(len(x), len(weight), dtype=out_dtype, device=x.device)
    one = torch.ones((), dtype=torch.float32, device=x.device)
    step = max(256, PIECE_BYTES // (4 * max(1, len(x))) // 256 * 256)
    for first in range(0, len(weight), step):
        piece = weight[first : first + step]
        if kind == "int8":
            sums = torch._int_mm(numbers, piece.T)
        else:
            sums = torch._scaled_mm(numbers, piece.T, scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=True)
        part = slice(first, first + step)
        scale_sums(sums, row_scale, scale[part], None if bias is None else bias[part], out[:, part])
    return out


@triton.jit
def _dequantise_bytes_kernel(
    w_ptr, scale_ptr, out_ptr, first_row, last_row, in_features, stride_w, stride_step,
    KIND: tl.constexpr, IN_ASSEMBLY: tl.constexpr, TILE_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # grid: (steps of a row, blocks of ROWS rows)
    step = tl.program_id(0)
    rows = first_row + tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    mask_n = (rows < last_row)[:, None]
    offs_p = tl.arange(0, BLOCK_K)
    at = step * (2 * BLOCK_K) + offs_p // BYTE_RUN * (2 * BYTE_RUN) + offs_p % BYTE_RUN
    stored = (at - offs_p % BYTE_RUN < in_features)[None, :]
    p = tl.load(weight_ptrs(w_ptr, rows, offs_p, stride_w, TILE_N, BLOCK_K) + step * stride_step, mask=mask_n & stored, other=0)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    scale = tl.load(scale_ptr + rows, mask=rows < last_row, other=0.0)[:, None]
    low, high = unpack_bytes(p, KIND, DTYPE, IN_ASSEMBLY)
    out_ptrs = out_ptr + ((rows - first_row).to(tl.int64) * in_features)[:, None] + at[None, :]
    tl.store(out_ptrs, (low.to(tl.float32) * scale).to(DTYPE), mask=mask_n & (at < in_features)[None, :])
    tl.store(out_ptrs + BYTE_RUN, (high.to(tl.float32) * scale).to(DTYPE), mask=mask_n & (at + BYTE_RUN < in_features)[None, :])


@triton.jit
def _store_run(out_ptrs, w, term, upper: tl.constexpr, at, in_features, mask_n, SCALE: tl.constexpr, ZEROS: tl.constexpr):
    half = term >> 16 if upper else term
    scale = half.to(tl.int16).to(SCALE, bitcast=True).to(tl.float32)[:, None]
    out = w.to(tl.float32) * scale
    if ZEROS == "minimum":
        out += (term >> 16).to(tl.int16).to(SCALE, bitcast=True).to(tl.float32)[:, None] + 8.0 * scale
    tl.store(out_ptrs, out.to(out_ptrs.dtype.element_ty), mask=mask_n & (at < in_features)[None, :])


@triton.jit
def _negative_zero(term, IS_ODD: tl.constexpr, ZEROS: tl.constexpr, RUN: tl.constexpr, DTYPE: tl.constexpr):
    if ZEROS == "integer":
        return tl.broadcast_to((term >> 16).to(tl.int16).to(DTYPE, bitcast=True)[:, None], [ROWS, RUN])
    return tl.full([ROWS, RUN], -8.0 - added_to_number(DTYPE, IS_ODD), DTYPE)


@triton.jit
def _dequantise_nibbles_kernel(
    w_ptr, term_ptr, out_ptr, first_row, last_row, in_features, out_features, stride_w, stride_step,
    ZEROS: tl.constexpr, SCALE: tl.constexpr, IN_ASSEMBLY: tl.constexpr, TILE_N: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    # grid: (steps of a row, blocks of ROWS rows)
    step = tl.program_id(0)
    rows = first_row + tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    mask = rows < last_row
    mask_n = mask[:, None]
    offs_p = tl.arange(0, RUN)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    PAIRED: tl.constexpr = ZEROS == "none"
    p = tl.load(weight_ptrs(w_ptr, rows, offs_p, stride_w, TILE_N, RUN) + step * stride_step, mask=mask_n, other=0)
    term_ptrs = term_ptr + (step * (2 if PAIRED else 4)).to(tl.int64) * out_features + rows
    t0 = tl.load(term_ptrs, mask=mask, other=0)
    t1 = t0 if PAIRED else tl.load(term_ptrs + out_features, mask=mask, other=0)
    t2 = tl.load(term_ptrs + (out_features if PAIRED else 2 * out_features), mask=mask, other=0)
    t3 = t2 if PAIRED else tl.load(term_ptrs + 3 * out_features, mask=mask, other=0)
    z0, z1 = _negative_zero(t0, False, ZEROS, RUN, DTYPE), _negative_zero(t1, True, ZEROS, RUN, DTYPE)
    z2, z3 = _negative_zero(t2, False, ZEROS, RUN, DTYPE), _negative_zero(t3, True, ZEROS, RUN, DTYPE)
    w0, w1, w2, w3 = unpack_nibbles(p, z0, z1, z2, z3, DTYPE, IN_ASSEMBLY)
    at = step * (4 * RUN) + offs_p
    out_ptrs = out_ptr + ((rows - first_row).to(tl.int64) * in_features)[:, None] + at[None, :]
    _store_run(out_ptrs, w0, t0, False, at, in_features, mask_n, SCALE, ZEROS)
    _store_run(out_ptrs + RUN, w1, t1, PAIRED, at + RUN, in_features, mask_n, SCALE, ZEROS)
    _store_run(out_ptrs + 2 * RUN, w2, t2, False, at + 2 * RUN, in_features, mask_n, SCALE, ZEROS)
    _store_run(out_ptrs + 3 * RUN, w3, t3, PAIRED, at + 3 * RUN, in_features, mask_n, SCALE, ZEROS)


def dequantise_bytes(
    words: torch.Tensor, scale: torch.Tensor, kind: str, first: int, last: int, in_features: int, dtype: torch.dtype,
    tile_n: int, block_k: int,
) -> torch.Tensor:  # fmt: skip
    """Rows [first, last) of a weight packed by `pack_bytes`, [last - first, in_features]."""
    out = torch.empty(last - first, in_features, dtype=dtype, device=words.device)
    _dequantise_bytes_kernel[(triton.cdiv(words.shape[1], block_k), triton.cdiv(last - first, ROWS.value))](
        words, scale, out, first, last, in_features, words.shape[1] * tile_n, block_k * tile_n,
        KIND=kind, IN_ASSEMBLY=is_compiled(), TILE_N=tile_n, BLOCK_K=block_k,
    )  # fmt: skip
    return out


def dequantise_nibbles(
    words: torch.Tensor, terms: torch.Tensor, zeros: str, scale_dtype: tl.dtype, first: int, last: int, in_features: int,
    dtype: torch.dtype, tile_n: int, run: int,
) -> torch.Tensor:  # fmt: skip
    """Rows [first, last) of a weight packed by `pack_nibbles`, [last - first, in_features]."""
    out = torch.empty(last - first, in_features, dtype=dtype, device=words.device)
    _dequantise_nibbles_kernel[(words.shape[1] // run, triton.cdiv(last - first, ROWS.value))](
        words, terms, out, first, last, in_features, len(words), words.shape[1] * tile_n, run * tile_n,
        ZEROS=zeros, SCALE=scale_dtype, IN_ASSEMBLY=is_compiled(), TILE_N=tile_n, RUN=run,
    )  # fmt: skip
    return out


def linear_in_pieces(
    x: torch.Tensor, out_features: int, bias: torch.Tensor | None, rows_of: Callable[[int, int], torch.Tensor]
) -> torch.Tensor:
    """x @ W.T + bias with W made a piece at a time; `rows_of(first, last)` gives rows of W in the type of x."""
    step = max(256, PIECE_BYTES // (x.element_size() * x.shape[1]) // 256 * 256)
    if step >= out_features:
        return F.linear(x, rows_of(0, out_features), bias)
    out = torch.empty(len(x), out_features, dtype=x.dtype, device=x.device)
    for first in range(0, out_features, step):
        last = min(first + step, out_features)
        torch.mm(x, rows_of(first, last).T, out=out[:, first:last])
    return out if bias is None else out.add_(bias)
