"""Element-wise operators of a decoder layer on the CPU: RMSNorm, rotary embedding, SiLU-and-multiply.

Eager operators cost more to start than to run on one row, so the decode forms are chosen by the number of calls.
Every one of them gives a row the same bits however many rows are computed together.

Reference: kernels/pointwise_ref.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm_rows(x: torch.Tensor, double_weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis in three calls, computed in float32: LayerNorm of [x, -x], whose mean is zero.

    Args:
        x:             [..., width]
        double_weight: [2 * width], the weight twice in float32 (see `double`), or None for a weight of ones

    Returns:
        Like x, contiguous.
    """
    width = x.shape[-1]
    doubled = torch.cat((x, x.neg()), dim=-1)
    return torch.layer_norm(doubled, (2 * width,), double_weight, None, eps).narrow(-1, 0, width).contiguous()


def double(weight: torch.Tensor) -> torch.Tensor:
    """A norm's weight as `rms_norm_rows` wants it."""
    return torch.cat((weight, weight)).float()


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis, for many rows; `weight` [width] in the dtype of x, or None."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def signed_sine(sin: torch.Tensor) -> torch.Tensor:
    """The sine table [..., head_dim] with its first half negated, as `rotate` wants it."""
    half = sin.shape[-1] // 2
    return torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding on halves: pairs are (x[i], x[i + head_dim / 2]); computed in the dtype of the tables.

    Args:
        x:    [num_tokens, num_heads, head_dim]
        cos:  [num_tokens, 1, head_dim] float32
        sin:  like cos, from `signed_sine`

    Returns:
        Like x.
    """
    wide = x.to(cos.dtype)
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


def silu_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [num_rows, 2 * width], gate first; returns [num_rows, width]."""
    width = gate_up.shape[1] // 2
    return F.silu(gate_up.narrow(1, 0, width)).mul_(gate_up.narrow(1, width, width))
