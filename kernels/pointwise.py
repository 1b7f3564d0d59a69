"""Element-wise operators of a decoder layer on the CPU: RMSNorm, rotary embedding, SiLU-and-multiply.

Eager operators cost more to start than to run on one row, so the decode forms are chosen by the number of calls.
Every one of them gives a row the same bits however many rows are computed together; `rms_norm` and `silu_multiply` are the
forms for prefill, where nobody else's rows are.

Reference: kernels/pointwise_ref.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from qsa.kernels.registry import Operator, register

SERIAL_NUMBERS = 32768  # ATen's grain: element-wise work up to this size is not cut into pieces for its threads


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


def silu_multiply_rows(gate_up: torch.Tensor) -> torch.Tensor:
    """silu_multiply for the rows of several sequences.

    Where ATen cuts the work of its threads, the last few numbers of a piece take another path and may differ in the last
    bit. So no more rows are computed at once than are not cut.
    """
    rows = max(1, 2 * SERIAL_NUMBERS // gate_up.shape[1])
    if gate_up.shape[0] <= rows:
        return silu_multiply(gate_up)
    return torch.cat([silu_multiply(piece) for piece in gate_up.split(rows)])


class RMSNorm(Operator):
    """RMSNorm over the last axis, in the form that is fast for few rows, and the one that is for many."""

    def init(self, *, eps: float, weight: torch.Tensor | None = None, **sizes: Any) -> None:  # type: ignore[override]
        """Keep `weight` [width] in the activations' type; None: ones."""
        self._weight, self._eps = weight, eps
        self._double = None if weight is None else double(weight)

    @property
    def nbytes(self) -> int:
        """Bytes of weights held."""
        return sum(t.nbytes for t in (self._weight, self._double) if t is not None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[.., width] to the same; a row's result does not depend on the other rows."""
        return rms_norm_rows(x, self._double, self._eps)

    def forward_prefill(self, x: torch.Tensor) -> torch.Tensor:
        """The same for the rows of one prefill chunk."""
        return rms_norm(x, self._weight, self._eps)

    def free(self) -> None:
        self._weight = self._double = None


class Rotary(Operator):
    """rotate on the CPU."""

    forward = staticmethod(rotate)


class SiluMultiply(Operator):
    """silu(gate) * up on the CPU: `forward` for the rows of several sequences, `forward_prefill` for those of one chunk."""

    forward = staticmethod(silu_multiply_rows)
    forward_prefill = staticmethod(silu_multiply)


register("rms_norm", "torch", RMSNorm)
register("rotary", "torch", Rotary)
register("silu_multiply", "torch", SiluMultiply)
