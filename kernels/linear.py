"""x @ W.T for weights in floating point, with rows that do not depend on how many rows are computed together.

A matrix library picks its kernel, and with it the order of its sums, by the number of rows. A sequence decoded alone
would then differ in the last bit from the same sequence decoded beside others. `forward` therefore computes rows in
blocks of fixed size, the last one padded; `forward_prefill` leaves the choice to the library, because the rows of a
prefill chunk depend on one sequence alone.

Reference: kernels/quant_linear_ref.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from qsa.kernels.registry import Operator, register

ROW_BLOCK = {torch.float32: 4, torch.bfloat16: 8, torch.float16: 8}  # smallest sizes that repay the padding


def linear_in_row_blocks(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, row_block: int) -> torch.Tensor:
    """F.linear in blocks of exactly `row_block` rows, so that a row's result depends on that row alone.

    Args:
        x:       [num_rows, in_features]
        weight:  [out_features, in_features]
        bias:    [out_features] or None
    """
    num_rows = x.shape[0]
    if num_rows == row_block:
        return F.linear(x, weight, bias)
    padded = x.new_zeros(-(-num_rows // row_block) * row_block, x.shape[1])
    padded[:num_rows] = x
    if padded.shape[0] == row_block:
        return F.linear(padded, weight, bias)[:num_rows]
    return torch.cat([F.linear(block, weight, bias) for block in padded.chunk(padded.shape[0] // row_block)])[:num_rows]


def can_fuse_gate(dtype: torch.dtype) -> bool:
    """Whether the matrix library applies activation and product itself in `gated_linear`."""
    return dtype == torch.bfloat16 and torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def gated_linear(x: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """silu(x @ gate.T) * (x @ up.T), activation and product applied to the sums before they are rounded to bfloat16.

    Args:
        x:       [num_rows, in_features] bfloat16
        gate_up: [2 * width, in_features] bfloat16, gate first

    Returns:
        [num_rows, width]
    """
    gate, up = gate_up.chunk(2)
    activated = torch.ops.mkldnn._linear_pointwise(x, gate, None, "swish", [], "")
    return torch.ops.mkldnn._linear_pointwise.binary(x, activated, up, None, "mul")


class FloatLinear(Operator):
    """x @ W.T + bias with W in the type of the activations."""

    def init(  # type: ignore[override]
        self, *, weight: torch.Tensor, bias: torch.Tensor | None = None, **sizes: Any
    ) -> None:
        """Keep `weight` [out_features, in_features] and `bias` [out_features]; both already in the activations' type."""
        self._weight: torch.Tensor | None = weight.contiguous()
        self._bias = bias
        self._row_block = ROW_BLOCK[weight.dtype]

    @property
    def whole_weight(self) -> torch.Tensor | None:
        """W in the activations' type for `gated_linear`; None with a bias."""
        return self._weight if self._bias is None else None

    @property
    def nbytes(self) -> int:
        """Bytes of weights held."""
        return sum(t.nbytes for t in (self._weight, self._bias) if t is not None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_rows, in_features] to [num_rows, out_features]; a row's result does not depend on the other rows."""
        assert self._weight is not None
        return linear_in_row_blocks(x, self._weight, self._bias, self._row_block)

    def forward_prefill(self, x: torch.Tensor) -> torch.Tensor:
        """The same for the rows of one prefill chunk, as fast as the library can."""
        assert self._weight is not None
        return F.linear(x, self._weight, self._bias)

    def free(self) -> None:
        self._weight = self._bias = None


register("float_linear", "torch", FloatLinear)
