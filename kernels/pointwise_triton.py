"""Element-wise operators of a decoder layer on a GPU: RMSNorm with the residual sum, SiLU-and-multiply, rotary embedding.

All of them are bound by memory: numbers are read and written once, in vectors of 16 bytes, and computed in float32. The sums
over the parts of a split product are taken where the residual stream is read anyway. A row's bits do not depend on the others.

Reference: kernels/pointwise_ref.py
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from qsa.kernels.checks import FLOATS, check_tensor
from qsa.kernels.kv_write_triton import rotate_halves
from qsa.kernels.registry import Operator, register
from qsa.kernels.split_triton import launch_overlap

FEW_ROWS = 256  # more than any decode step has, so that a row has the same bits in any company

TUNE = {
    "add_rms_norm": [dict(), dict(num_warps=32), dict(num_warps=16, maxnreg=64), dict(num_warps=16), dict(overlaps=False)],
    "silu_multiply": [dict(block=block, num_warps=warps) for block in (1024, 2048, 4096) for warps in (4, 8)],
}


@triton.jit
def _add_rms_norm_kernel(
    x_ptr, parts_ptr, weight_ptr, y_ptr,
    eps,
    stride_x_r, stride_p_s, stride_p_r,
    NUM_PARTS: tl.constexpr,   # 0: nothing is added, x is only read
    HAS_WEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,       # WIDTH rounded up to a power of two
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    # grid: (rows,)
    if OVERLAPS:  # a product after it that may begin fetches its weights meanwhile
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < WIDTH
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + offs, mask=mask, other=0.0)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row * stride_x_r + offs, mask=mask, other=0.0)
    if NUM_PARTS > 0:
        total = tl.load(parts_ptr + row * stride_p_r + offs, mask=mask, other=0.0).to(tl.float32)
        for part in tl.static_range(1, NUM_PARTS):
            total += tl.load(parts_ptr + part * stride_p_s + row * stride_p_r + offs, mask=mask, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) + total).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + row * stride_x_r + offs, x, mask=mask)
    y = x.to(tl.float32)
    y *= tl.rsqrt(tl.sum(y * y, 0) / WIDTH + eps)
    if HAS_WEIGHT:
        y *= weight.to(tl.float32)
    tl.store(y_ptr + row * WIDTH + offs, y, mask=mask)


@triton.jit
def _silu_multiply_kernel(
    x_ptr, out_ptr,
    stride_x_r,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # grid: (rows * cdiv(WIDTH, BLOCK),)
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    offs = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    mask = offs < WIDTH
    gate = tl.load(x_ptr + row * stride_x_r + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride_x_r + WIDTH + offs, mask=mask, other=0.0).to(tl.float32)
    if out_ptr.dtype.element_ty == tl.float32:  # a card's exponential has a few more wrong bits than float32 has to spare
        gate = gate.to(tl.float64)
    tl.store(out_ptr + row * WIDTH + offs, gate / (1.0 + tl.exp(-gate)) * up, mask=mask)


@triton.jit
def _rotate_kernel(
    x_ptr, cos_ptr, sin_ptr, out_ptr,
    stride_x_t, stride_x_h, stride_c_t, stride_s_t,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,     # heads of a token turned at a time
    BLOCK_H: tl.constexpr,     # half of HEAD_DIM, rounded up to a power of two
):  # fmt: skip
    # grid: (num_tokens, cdiv(NUM_HEADS, BLOCK_N))
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_h = tl.arange(0, BLOCK_H)
    mask_h = offs_h < HEAD_DIM // 2
    mask = (heads < NUM_HEADS)[:, None] & mask_h[None, :]
    cos = tl.load(cos_ptr + token * stride_c_t + offs_h, mask=mask_h, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * stride_s_t + HEAD_DIM // 2 + offs_h, mask=mask_h, other=0.0)[None, :]
    in_ptr = x_ptr + token * stride_x_t + heads[:, None] * stride_x_h + offs_h[None, :]
    first = tl.load(in_ptr, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(in_ptr + HEAD_DIM // 2, mask=mask, other=0.0).to(tl.float32)
    first, second = rotate_halves(first, second, cos, sin)
    offs = (token * NUM_HEADS + heads)[:, None] * HEAD_DIM + offs_h[None, :]
    tl.store(out_ptr + offs, first, mask=mask)
    tl.store(out_ptr + offs + HEAD_DIM // 2, second, mask=mask)


def add_rms_norm(
    x: torch.Tensor,
    parts: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    *,
    num_warps: int | None = None,
    maxnreg: int | None = None,
    overlaps: bool | None = None,
) -> torch.Tensor:
    """Add a layer's result to the residual stream in place, and norm the sum.

    Args:
        x:      [rows, width], updated to x + parts.sum(0)
        parts:  float32 [num_parts, rows, width], or one [rows, width] of a floating type, or None: x stays as it is.
        weight: [width] of a floating type, or None for ones
        num_warps, maxnreg: warps, and registers a thread; None: what suits the number of rows.
        overlaps: start before the launch before has ended; None: on cards that can, from Hopper on.

    Returns:
        RMSNorm of the new x, in its type, contiguous.
    """
    check_tensor("x", x, (None, None), FLOATS)
    rows, width = x.shape
    num_parts = stride_s = stride_r = 0
    if parts is not None:
        num_parts = parts.shape[0] if parts.dim() == 3 else 1
        check_tensor("parts", parts, (*parts.shape[:-2], rows, width), FLOATS, x.device)
        stride_s, stride_r = parts.stride(0) if parts.dim() == 3 else 0, parts.stride(-2)
        if parts.dim() not in (2, 3) or parts.stride(-1) != 1:
            raise ValueError(f"parts must have 2 or 3 axes and be contiguous in the last, got {list(parts.shape)}")
    if weight is not None:
        check_tensor("weight", weight, (width,), FLOATS, x.device)
    if x.stride(1) != 1 or (weight is not None and not weight.is_contiguous()):
        raise ValueError("x and weight must be contiguous in their last axis")
    y = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if rows == 0:
        return y
    block = triton.next_power_of_2(width)
    if num_warps is None and rows <= FEW_ROWS:  # registers for all parts, or some would be read only once others have come
        num_warps, maxnreg = max(1, min(32, block // 128)), maxnreg or 64
    _add_rms_norm_kernel[(rows,)](
        x, parts, weight, y, eps, x.stride(0), stride_s, stride_r,
        NUM_PARTS=num_parts, HAS_WEIGHT=weight is not None, WIDTH=width, BLOCK=block,
        num_warps=num_warps or max(1, min(16, block // 256)), maxnreg=maxnreg, **launch_overlap(overlaps, x.device),
    )  # fmt: skip
    return y


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis of [..., width]; contiguous."""
    return add_rms_norm(x.reshape(-1, x.shape[-1]), None, weight, eps).view(x.shape)


def silu_multiply(gate_up: torch.Tensor, *, block: int = 2048, num_warps: int = 4) -> torch.Tensor:
    """silu(gate) * up of [num_rows, 2 * width], gate first; returns [num_rows, width]."""
    check_tensor("gate_up", gate_up, (None, None), FLOATS)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    if gate_up.shape[1] % 2 or gate_up.stride(1) != 1:
        raise ValueError(f"gate_up must have an even width and be contiguous in its last axis, got {list(gate_up.shape)}")
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        block = min(block, triton.next_power_of_2(width))
        _silu_multiply_kernel[(rows * triton.cdiv(width, block),)](
            gate_up, out, gate_up.stride(0), WIDTH=width, BLOCK=block, num_warps=num_warps
        )
    return out


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding on halves: pairs are (x[i], x[i + head_dim / 2]); for queries and keys decode_prepare does it.

    Args:
        x:    [num_tokens, num_heads, head_dim]
        cos:  float32 [num_tokens, 1, head_dim]; its halves are equal, one is read.
        sin:  like cos, from `signed_sine`

    Returns:
        Like x, contiguous.
    """
    tokens, heads, head_dim = x.shape
    check_tensor("x", x, (tokens, heads, head_dim), FLOATS)
    for name, table in (("cos", cos), ("sin", sin)):
        check_tensor(name, table, (tokens, 1, head_dim), (torch.float32,), x.device)
    if head_dim % 2 or any(tensor.stride(2) != 1 for tensor in (x, cos, sin)):
        raise ValueError("x, cos and sin must be contiguous in their last axis, which must be even")
    out = torch.empty(tokens, heads, head_dim, dtype=x.dtype, device=x.device)
    block_n = min(32, triton.next_power_of_2(heads))
    if tokens:
        _rotate_kernel[(tokens, triton.cdiv(heads, block_n))](
            x, cos, sin, out, *x.stride()[:2], cos.stride(0), sin.stride(0),
            NUM_HEADS=heads, HEAD_DIM=head_dim, BLOCK_N=block_n, BLOCK_H=triton.next_power_of_2(head_dim // 2),
        )  # fmt: skip
    return out


class RMSNorm(Operator):
    """RMSNorm over the last axis; `forward_prefill` is the same."""

    def init(self, *, eps: float, weight: torch.Tensor | None = None, **sizes: Any) -> None:  # type: ignore[override]
        """Keep `weight` [width]; None: ones."""
        self._weight, self._eps = weight, eps

    @property
    def nbytes(self) -> int:
        """Bytes of weights held."""
        return 0 if self._weight is None else self._weight.nbytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[.., width] to the same."""
        return rms_norm(x, self._weight, self._eps)

    forward_prefill = forward

    def add(self, x: torch.Tensor, parts: torch.Tensor | None) -> torch.Tensor:
        """add_rms_norm with this weight: x is updated in place."""
        return add_rms_norm(x, parts, self._weight, self._eps)

    def free(self) -> None:
        self._weight = None


class Rotary(Operator):
    """rotate on a GPU."""

    forward = staticmethod(rotate)


class SiluMultiply(Operator):
    """silu(gate) * up on a GPU, for few rows and many."""

    forward = forward_prefill = staticmethod(silu_multiply)


register("rms_norm", "triton", RMSNorm)
register("rotary", "triton", Rotary)
register("silu_multiply", "triton", SiluMultiply)
