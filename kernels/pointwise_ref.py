"""Reference for kernels/pointwise.py, in the order of operations of the published models."""

import torch


def rms_norm_ref(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; statistics in float32 or better, as the models define it."""
    wide = x if x.dtype == torch.float64 else x.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return normed if weight is None else normed * weight.to(x.dtype)


def rotate_ref(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding on halves.

    Args:
        x:        [num_tokens, num_heads, head_dim]
        cos, sin: [num_tokens, 1, head_dim], plain tables
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)


def silu_multiply_ref(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [num_rows, 2 * width], gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def add_rms_norm_ref(
    x: torch.Tensor, parts: torch.Tensor | None, weight: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual stream [rows, width] with the sum of parts [num_parts, rows, width] added, and its RMSNorm."""
    total = x if parts is None else x + parts.sum(0).to(x.dtype)
    return total, rms_norm_ref(total, weight, eps)
