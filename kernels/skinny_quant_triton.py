"""x @ W.T for few rows of x and weights of 8 or 4 bits, which become floats in registers, between shared memory and product.

Two bytes of a stored row, a word, hold the numbers of 2 or 4 places of the row that lie far apart. So a tile of words turns
into 2 or 4 whole tiles of weights, each with its own columns of x, and nothing has to move between threads. A word's bits are
put where a float's mantissa is, two words to an instruction, and what that adds to the number is subtracted again.

Order of a row, `pack_bytes`:    of 128 columns, word i holds columns i and 64 + i.
                `pack_nibbles`:  of 4 * run columns, word i holds columns i, run + i, 2 * run + i and 3 * run + i.

Reference: kernels/quant_linear_ref.py
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from qsa.kernels.skinny_launch_triton import begin, hand_on, weight_ptrs, weight_rows

BYTE_RUN = tl.constexpr(64)  # columns that lie side by side in the words of 8-bit weights


def pack_bytes(values: torch.Tensor) -> torch.Tensor:
    """int8 or float8 [out_features, in_features] as words, int16 [out_features, columns / 2].

    Columns are filled up to whole blocks of 128 with zeros. Seen as bytes, the result is the weight with its columns in the
    order of `byte_columns`.
    """
    run = BYTE_RUN.value
    padded = F.pad(values.view(torch.int8), (0, -values.shape[1] % (2 * run)))
    return padded.view(len(values), -1, 2, run).transpose(2, 3).contiguous().view(torch.int16).flatten(1)


def byte_columns(columns: int, device: torch.device) -> torch.Tensor:
    """Which column of the weight each byte of a row packed by `pack_bytes` stands for, int64 [columns rounded up to 128]."""
    run = BYTE_RUN.value
    padded = triton.cdiv(columns, 2 * run) * 2 * run
    return torch.arange(padded, device=device).view(-1, 2, run).transpose(1, 2).flatten()


def pack_nibbles(values: torch.Tensor, run: int, fill: int = 0) -> torch.Tensor:
    """Numbers 0 to 15, uint8 [out_features, in_features], as words, int16 [out_features, columns / 4].

    Columns are filled up to whole blocks of 4 * run with `fill`.
    """
    padded = F.pad(values, (0, -values.shape[1] % (4 * run)), value=fill)
    low, second, third, high = padded.view(len(values), -1, 4, run).unbind(2)
    both = torch.stack((low | second << 4, third | high << 4), dim=-1)  # bytes of a word, the lower one first
    return both.view(torch.int16).flatten(1)


def pack_terms(
    scale: torch.Tensor, zero: torch.Tensor | None, minimum: torch.Tensor | None, dtype: torch.dtype, scale_dtype: torch.dtype
) -> torch.Tensor:
    """Scales with zeros or minima as the 4-bit kernel reads them, int32 [steps * 2 or 4, out_features].

    Args:
        scale:       float32 [out_features, runs], of every run; runs is a multiple of 4.
        zero:        whole numbers, like scale; the zero is 8 without them.
        minimum:     float32 like scale, in place of a zero.
        dtype:       of the activations.
        scale_dtype: what scales and minima are rounded to.
    """
    low = scale.T.to(scale_dtype).contiguous().view(torch.int16)
    if zero is None and minimum is None:
        low, high = low[::2], low[1::2]
    elif zero is None:
        assert minimum is not None
        high = minimum.T.to(scale_dtype).contiguous().view(torch.int16)
    else:
        odd = torch.arange(scale.shape[1], device=scale.device)[:, None] % 2 == 1
        added = torch.where(odd, 64, 1024) if dtype == torch.float16 else 128
        high = (-added - zero.T.float()).to(dtype).view(torch.int16)
    return torch.stack((low, high), dim=-1).view(torch.int32).squeeze(-1)


@triton.jit
def unpack_bytes(p, KIND: tl.constexpr, DTYPE: tl.constexpr, IN_ASSEMBLY: tl.constexpr):
    """The two weights of every word: of its lower byte, of its upper byte. KIND: int8, or fp8 for float8_e4m3fn."""
    if not IN_ASSEMBLY:  # the same without packed instructions, for the interpreter
        if KIND == "int8":
            return ((p << 8) >> 8).to(DTYPE), (p >> 8).to(DTYPE)
        low = ((p & 0x7F) << 7) | ((p & 0x80) << 8)  # the bits of a float16 256 times smaller
        high = ((p & 0x7F00) >> 1) | (p & -0x8000)
        return _scaled_bits(low, DTYPE), _scaled_bits(high, DTYPE)
    if KIND == "int8":
        if DTYPE.is_bf16():  # 128 + its lower seven bits, less 128 or, where it is negative, 256
            low, high = tl.inline_asm_elementwise(
                """{
                .reg .b32 high, number, less, one;
                mov.b32 one, 0x3F803F80;
                shr.u32 high, $2, 8;
                lop3.b32 number, $2, 0x007F007F, 0x43004300, 0xEA;
                lop3.b32 less, $2, 0x00800080, 0xC300C300, 0xEA;
                fma.rn.bf16x2 $0, number, one, less;
                lop3.b32 number, high, 0x007F007F, 0x43004300, 0xEA;
                lop3.b32 less, high, 0x00800080, 0xC300C300, 0xEA;
                fma.rn.bf16x2 $1, number, one, less;
                }""",
                "=&r,=&r,r", [p], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
        else:  # 1152 + the number, less 1152
            low, high = tl.inline_asm_elementwise(
                """{
                .reg .b32 high, number, less;
                mov.b32 less, 0x64806480;
                shr.u32 high, $2, 8;
                lop3.b32 number, $2, 0x00FF00FF, 0x64806480, 0x6A;
                sub.f16x2 $0, number, less;
                lop3.b32 number, high, 0x00FF00FF, 0x64806480, 0x6A;
                sub.f16x2 $1, number, less;
                }""",
                "=&r,=&r,r", [p], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
    elif DTYPE.is_bf16():  # exponent and mantissa moved to their place, then 2 ** 120 for the other bias
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 moved, bits, factor, zero;
            mov.b32 factor, 0x7B807B80;
            mov.b32 zero, 0x80008000;
            shl.b32 moved, $2, 4;
            and.b32 bits, moved, 0x07F007F0;
            shl.b32 moved, $2, 8;
            lop3.b32 bits, moved, 0x80008000, bits, 0xEA;
            fma.rn.bf16x2 $0, bits, factor, zero;
            shr.u32 moved, $2, 4;
            and.b32 bits, moved, 0x07F007F0;
            lop3.b32 bits, $2, 0x80008000, bits, 0xEA;
            fma.rn.bf16x2 $1, bits, factor, zero;
            }""",
            "=&r,=&r,r", [p], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 moved, bits, factor;
            mov.b32 factor, 0x5C005C00;
            shl.b32 moved, $2, 7;
            and.b32 bits, moved, 0x3F803F80;
            shl.b32 moved, $2, 8;
            lop3.b32 bits, moved, 0x80008000, bits, 0xEA;
            mul.f16x2 $0, bits, factor;
            shr.u32 moved, $2, 1;
            and.b32 bits, moved, 0x3F803F80;
            lop3.b32 bits, $2, 0x80008000, bits, 0xEA;
            mul.f16x2 $1, bits, factor;
            }""",
            "=&r,=&r,r", [p], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return low, high


@triton.jit
def _scaled_bits(bits, DTYPE: tl.constexpr):
    return (bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(DTYPE)


@triton.jit
def unpack_nibbles(p, z0, z1, z2, z3, DTYPE: tl.constexpr, IN_ASSEMBLY: tl.constexpr):
    """The four numbers of every word, less their zeros.

    z0 to z3: like p, in DTYPE: -(128 + zero) for bfloat16; for float16 -(1024 + zero), of z1 and z3 -(64 + zero).
    """
    if not IN_ASSEMBLY:
        w0, w1 = _less(p & 15, z0, DTYPE, False), _less((p >> 4) & 15, z1, DTYPE, True)
        w2, w3 = _less((p >> 8) & 15, z2, DTYPE, False), _less((p >> 12) & 15, z3, DTYPE, True)
    elif DTYPE.is_bf16():  # 128 + the number, less 128 + zero
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            """{
            .reg .b32 number, one;
            mov.b32 one, 0x3F803F80;
            lop3.b32 number, $4, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $0, number, one, $5;
            shr.u32 number, $4, 4;
            lop3.b32 number, number, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $1, number, one, $6;
            shr.u32 number, $4, 8;
            lop3.b32 number, number, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $2, number, one, $7;
            shr.u32 number, $4, 12;
            lop3.b32 number, number, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $3, number, one, $8;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r,r", [p, z0, z1, z2, z3],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:  # 1024 + the number, or 1024 + 16 times the number, which needs no shift
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            """{
            .reg .b32 number, high, sixteenth;
            mov.b32 sixteenth, 0x2C002C00;
            shr.u32 high, $4, 8;
            lop3.b32 number, $4, 0x000F000F, 0x64006400, 0xEA;
            add.f16x2 $0, number, $5;
            lop3.b32 number, $4, 0x00F000F0, 0x64006400, 0xEA;
            fma.rn.f16x2 $1, number, sixteenth, $6;
            lop3.b32 number, high, 0x000F000F, 0x64006400, 0xEA;
            add.f16x2 $2, number, $7;
            lop3.b32 number, high, 0x00F000F0, 0x64006400, 0xEA;
            fma.rn.f16x2 $3, number, sixteenth, $8;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r,r", [p, z0, z1, z2, z3],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return w0, w1, w2, w3


@triton.jit
def _less(number, z, DTYPE: tl.constexpr, IS_ODD: tl.constexpr):
    return (number.to(tl.float32) + added_to_number(DTYPE, IS_ODD) + z.to(tl.float32)).to(DTYPE)


@triton.jit
def added_to_number(DTYPE: tl.constexpr, IS_ODD: tl.constexpr):
    """What `unpack_nibbles` has added to a number before its zero is subtracted; IS_ODD: of z1 and z3."""
    if DTYPE.is_bf16():
        return 128.0
    return 64.0 if IS_ODD else 1024.0


@triton.jit
def byte_linear_kernel(
    x_ptr, w_ptr, scale_ptr, bias_ptr, out_ptr, work_ptr, count_ptr,
    num_rows, width, in_features, num_steps,
    stride_x, stride_w, stride_step,
    KIND: tl.constexpr,        # int8 or fp8
    IN_ASSEMBLY: tl.constexpr,
    PARTS: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,      # in_features is a multiple of 2 * BLOCK_K
    TILE_N: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,     # words a step, a multiple of BYTE_RUN
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
    PREFETCH: tl.constexpr,
):  # fmt: skip
    # grid: (blocks of rows of x, tiles of rows of W, SPLITS)
    block = tl.program_id(0)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    rows = weight_rows(tile, width, GATED, BLOCK_N)
    offs_m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_p = tl.arange(0, BLOCK_K)
    offs_k = offs_p // BYTE_RUN * (2 * BYTE_RUN) + offs_p % BYTE_RUN  # columns of the lower bytes
    mask_m = (offs_m < num_rows)[:, None]
    first = split * num_steps // SPLITS
    last = (split + 1) * num_steps // SPLITS
    tl.assume(first < last)  # else the compiler has products wait for a zero that might be their sum
    begin(w_ptr, rows, first, last, stride_w, stride_step, TILE_N, BLOCK_K, 2, PDL, PREFETCH)

    w_ptrs = weight_ptrs(w_ptr, rows, offs_p, stride_w, TILE_N, BLOCK_K)
    x_ptrs = x_ptr + (offs_m.to(tl.int64) * stride_x)[:, None] + offs_k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in tl.range(first, last, num_stages=NUM_STAGES):
        at = step * (2 * BLOCK_K)
        if EVEN_K:
            p = tl.load(w_ptrs + step * stride_step)
            x0 = tl.load(x_ptrs + at, mask=mask_m, other=0.0)
            x1 = tl.load(x_ptrs + at + BYTE_RUN, mask=mask_m, other=0.0)
        else:  # whole blocks of 2 * BYTE_RUN columns are stored
            p = tl.load(w_ptrs + step * stride_step, mask=(at + offs_k - offs_p % BYTE_RUN < in_features)[None, :], other=0)
            x0 = tl.load(x_ptrs + at, mask=mask_m & (at + offs_k < in_features)[None, :], other=0.0)
            x1 = tl.load(x_ptrs + at + BYTE_RUN, mask=mask_m & (at + BYTE_RUN + offs_k < in_features)[None, :], other=0.0)
        w0, w1 = unpack_bytes(p, KIND, DTYPE, IN_ASSEMBLY)
        acc = tl.dot(w0, tl.trans(x0), acc)
        acc = tl.dot(w1, tl.trans(x1), acc)
    acc *= tl.load(scale_ptr + rows)[:, None]
    hand_on(
        acc, block, tile, split, rows, bias_ptr, out_ptr, work_ptr, count_ptr, num_rows, width,
        PARTS, GATED, HAS_BIAS, SPLITS, BLOCK_N, BLOCK_M,
    )  # fmt: skip


@triton.jit
def _scale(term, upper: tl.constexpr, SCALE: tl.constexpr):
    """The scale in the lower or upper half of a word of terms, as a column."""
    half = term >> 16 if upper else term
    return half.to(tl.int16).to(SCALE, bitcast=True).to(tl.float32)[:, None]


@triton.jit
def _negative_zero(
    term, IS_ODD: tl.constexpr, ZEROS: tl.constexpr, BLOCK_N: tl.constexpr, RUN: tl.constexpr, DTYPE: tl.constexpr
):
    """What `unpack_nibbles` adds, for a tile of words; with a zero a group the upper half of the terms."""
    if ZEROS == "integer":
        return tl.broadcast_to((term >> 16).to(tl.int16).to(DTYPE, bitcast=True)[:, None], [BLOCK_N, RUN])
    return tl.full([BLOCK_N, RUN], -8.0 - added_to_number(DTYPE, IS_ODD), DTYPE)


@triton.jit
def _add_run(
    acc, w, x_ptrs, term, upper: tl.constexpr, mask_m, at, offs_p, in_features,
    SCALE: tl.constexpr, ZEROS: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """acc plus the products of one run of columns, w [BLOCK_N, RUN]."""
    if EVEN_K:
        x = tl.load(x_ptrs + at, mask=mask_m, other=0.0)
    else:
        x = tl.load(x_ptrs + at, mask=mask_m & (at + offs_p < in_features)[None, :], other=0.0)
    scale = _scale(term, upper, SCALE)
    acc += tl.dot(w, tl.trans(x)) * scale
    if ZEROS == "minimum":  # w is counted from 8, the weight starts at the minimum
        acc += (_scale(term, True, SCALE) + 8.0 * scale) * tl.sum(x.to(tl.float32), 1)[None, :]
    return acc


@triton.jit
def nibble_linear_kernel(
    x_ptr, w_ptr, term_ptr, bias_ptr, out_ptr, work_ptr, count_ptr,
    num_rows, width, in_features, num_steps,
    stride_x, stride_w, stride_step,
    ZEROS: tl.constexpr,       # none: 8; integer: a zero a group; minimum: what a group's numbers start at, in place of a zero
    SCALE: tl.constexpr,       # type of scales and minima
    IN_ASSEMBLY: tl.constexpr,
    PARTS: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,      # in_features is a multiple of 4 * BLOCK_K
    TILE_N: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,     # words a step: the run of `pack_nibbles`
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
    PREFETCH: tl.constexpr,
):  # fmt: skip
    # grid: (blocks of rows of x, tiles of rows of W, SPLITS)
    block = tl.program_id(0)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    PAIRED: tl.constexpr = ZEROS == "none"  # a word of terms holds the scales of two runs
    rows = weight_rows(tile, width, GATED, BLOCK_N)
    stride_t = tl.cast(width * 2 if GATED else width, tl.int64)
    offs_m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_p = tl.arange(0, BLOCK_K)
    mask_m = (offs_m < num_rows)[:, None]
    first = split * num_steps // SPLITS
    last = (split + 1) * num_steps // SPLITS
    tl.assume(first < last)  # else the compiler has products wait for a zero that might be their sum
    begin(w_ptr, rows, first, last, stride_w, stride_step, TILE_N, BLOCK_K, 2, PDL, PREFETCH)

    w_ptrs = weight_ptrs(w_ptr, rows, offs_p, stride_w, TILE_N, BLOCK_K)
    x_ptrs = x_ptr + (offs_m.to(tl.int64) * stride_x)[:, None] + offs_p[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in tl.range(first, last, num_stages=NUM_STAGES):
        p = tl.load(w_ptrs + step * stride_step)  # [BLOCK_N, BLOCK_K]
        term_ptrs = term_ptr + step * (2 if PAIRED else 4) * stride_t + rows
        t0 = tl.load(term_ptrs)
        t1 = t0 if PAIRED else tl.load(term_ptrs + stride_t)
        t2 = tl.load(term_ptrs + (stride_t if PAIRED else 2 * stride_t))
        t3 = t2 if PAIRED else tl.load(term_ptrs + 3 * stride_t)
        w0, w1, w2, w3 = unpack_nibbles(
            p,
            _negative_zero(t0, False, ZEROS, BLOCK_N, BLOCK_K, DTYPE),
            _negative_zero(t1, True, ZEROS, BLOCK_N, BLOCK_K, DTYPE),
            _negative_zero(t2, False, ZEROS, BLOCK_N, BLOCK_K, DTYPE),
            _negative_zero(t3, True, ZEROS, BLOCK_N, BLOCK_K, DTYPE),
            DTYPE,
            IN_ASSEMBLY,
        )
        at = step * (4 * BLOCK_K)
        acc = _add_run(acc, w0, x_ptrs, t0, False, mask_m, at, offs_p, in_features, SCALE, ZEROS, EVEN_K)
        acc = _add_run(acc, w1, x_ptrs, t1, PAIRED, mask_m, at + BLOCK_K, offs_p, in_features, SCALE, ZEROS, EVEN_K)
        acc = _add_run(acc, w2, x_ptrs, t2, False, mask_m, at + 2 * BLOCK_K, offs_p, in_features, SCALE, ZEROS, EVEN_K)
        acc = _add_run(acc, w3, x_ptrs, t3, PAIRED, mask_m, at + 3 * BLOCK_K, offs_p, in_features, SCALE, ZEROS, EVEN_K)
    hand_on(
        acc, block, tile, split, rows, bias_ptr, out_ptr, work_ptr, count_ptr, num_rows, width,
        PARTS, GATED, HAS_BIAS, SPLITS, BLOCK_N, BLOCK_M,
    )  # fmt: skip


def is_compiled() -> bool:
    """Whether kernels are compiled, and may have assembly in them, rather than interpreted."""
    return isinstance(byte_linear_kernel, triton.JITFunction)
