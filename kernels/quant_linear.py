"""x @ W.T for weights of 4 and 8 bits, on PyTorch's own packed CPU kernels.

Int4Linear   groups of 32 with a scale and a minimum (GGUF's Q4_0 and Q4_1, value for value).
Int8Linear   one scale a row; other groupings are requantised, at an error of at most half a step of the row.
Int8Head     the same weights with float32 results: the activations are split into two int8 planes of 15 bits
             together and multiplied in exact integer arithmetic, so logits are not rounded to bfloat16.

All three give a row the same bits however many rows are computed together. For prefill the weights are wanted in
bfloat16: as a copy, when the caller allows the memory, or dequantised in pieces on the fly.

Reference: kernels/quant_linear_ref.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from qsa.kernels.linear import FloatLinear
from qsa.kernels.quant_linear_ref import dequantize_groups_ref
from qsa.kernels.registry import Operator, register

GROUP = 32  # values that share a scale in the 4-bit kernel's layout
PREFILL_ROWS = 48  # from this many rows a bfloat16 product is faster than the packed kernels
PIECE_BYTES = 4 << 20  # bfloat16 weights made at a time when they are dequantised on the fly
HEAD_PIECE_BYTES = 5 << 18  # of the head's weights, used twice while they are in a core's cache
ROW_TILE = 16  # the packed 4-bit layout wants a multiple of this many output rows


def bfloat16_scale_and_zero(
    values: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's form w = (q - 8) * scale + zero, both in bfloat16, with the group's mean kept.

    Rounding the scale tilts a group around q = 8; the zero takes up what that moves its mean.
    """
    rounded = scale.to(torch.bfloat16)
    mean = values.view(*scale.shape, GROUP).float().mean(-1)
    zero = minimum + scale * mean - rounded.float() * (mean - 8)
    return rounded, zero.to(torch.bfloat16)


class Int4Linear(Operator):
    """x @ W.T + bias with 4-bit W, for bfloat16 activations."""

    def init(  # type: ignore[override]
        self,
        *,
        values: torch.Tensor,
        scale: torch.Tensor,
        minimum: torch.Tensor,
        bias: torch.Tensor | None = None,
        keep_prefill_copy: bool = True,
        **sizes: Any,
    ) -> None:
        """Pack W.

        Args:
            values:   [out_features, in_features], 0 to 15
            scale:    [out_features, in_features / 32] float32
            minimum:  like scale; w = scale * value + minimum
            bias:     [out_features] bfloat16
            keep_prefill_copy: hold W in bfloat16 beside the packed form (2 bytes a weight), else two values a byte
        """
        out_features, in_features = values.shape
        if in_features % GROUP or scale.shape != (out_features, in_features // GROUP):
            raise ValueError(
                f"values are {list(values.shape)}, so scale must have a column per {GROUP}, got {list(scale.shape)}"
            )
        self._out_features = out_features
        short = -out_features % ROW_TILE
        rounded, zero = bfloat16_scale_and_zero(values, scale, minimum)
        packed_values = F.pad(values, (0, 0, 0, short)).to(torch.int32)
        self._packed: torch.Tensor | None = torch._convert_weight_to_int4pack_for_cpu(packed_values, 1)
        scale_and_zero = torch.stack((rounded.T, zero.T), dim=-1)  # [in_features / 32, out_features, 2]
        self._scale_and_zero: torch.Tensor | None = F.pad(scale_and_zero, (0, 0, 0, short)).contiguous()
        self._is_padded = short > 0
        self._bias = bias
        self._copy: torch.Tensor | None = None
        self._nibbles: torch.Tensor | None = None
        if keep_prefill_copy:
            self._copy = dequantize_groups_ref(values, scale.float(), minimum.float()).to(torch.bfloat16)
        else:
            self._nibbles = (values[:, ::2] | values[:, 1::2] << 4).to(torch.uint8)

    @property
    def whole_weight(self) -> torch.Tensor | None:
        """W in bfloat16 for `gated_linear`; None with a bias, or when no copy is held."""
        return self._copy if self._bias is None else None

    @property
    def nbytes(self) -> int:
        """Bytes of weights held."""
        held = (self._packed, self._scale_and_zero, self._bias, self._copy, self._nibbles)
        return sum(t.nbytes for t in held if t is not None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_rows, in_features] to [num_rows, out_features]; a row's result does not depend on the other rows."""
        out = torch._weight_int4pack_mm_for_cpu(x, self._packed, GROUP, self._scale_and_zero)  # type: ignore[arg-type]
        if self._is_padded:
            out = out[:, : self._out_features].contiguous()
        return out if self._bias is None else out.add_(self._bias)

    def forward_prefill(self, x: torch.Tensor) -> torch.Tensor:
        """The same for the rows of one prefill chunk."""
        if x.shape[0] < PREFILL_ROWS:
            return self.forward(x)
        if self._copy is not None:
            return F.linear(x, self._copy, self._bias)
        assert self._nibbles is not None and self._scale_and_zero is not None
        out = x.new_empty(x.shape[0], self._out_features)
        rows = max(1, PIECE_BYTES // (2 * x.shape[1]))
        for first in range(0, self._out_features, rows):
            nibbles = self._nibbles[first : first + rows]
            values = torch.stack((nibbles & 15, nibbles >> 4), dim=-1).flatten(1)
            scale, zero = self._scale_and_zero[:, first : first + nibbles.shape[0]].transpose(0, 1).unbind(-1)
            weight = dequantize_groups_ref(values.sub_(8).view(torch.int8), scale.contiguous(), zero)
            out[:, first : first + rows] = F.linear(x, weight)
        return out if self._bias is None else out.add_(self._bias)

    def free(self) -> None:
        self._packed = self._scale_and_zero = self._bias = self._copy = self._nibbles = None


def quantize_rows(weight: torch.Tensor, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 values and one scale a row, w = scale * value; the scale is chosen among the numbers of `scale_dtype`.

    Args:
        weight: [out_features, in_features] float32

    Returns:
        values [out_features, in_features] int8 and scale [out_features] in `scale_dtype`.
    """
    scale = (weight.abs().amax(1) / 127).clamp_(min=torch.finfo(torch.float32).tiny).to(scale_dtype)
    values = (weight / scale.float().unsqueeze(1)).round_().clamp_(-127, 127).to(torch.int8)
    return values, scale


def quantize_groups(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers 0 to 15 with a scale and a whole zero for every `group` columns, w = scale * value + minimum.

    A group's range is narrowed a little where that makes the sum of its squared errors smaller: its largest weights then lose
    what all others gain.

    Args:
        weight: [out_features, in_features] in any float type

    Returns:
        values, uint8 like weight; scale and minimum, float32 [out_features, in_features / group]: scale is a float16 number,
        minimum is -scale * zero.
    """
    pieces = [_quantize_groups(piece.float().unflatten(1, (-1, group))) for piece in weight.split(4096)]
    values, scale, zero = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    return values.flatten(1), scale, -scale * zero


def _quantize_groups(grouped: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    high, low = grouped.amax(2).clamp_(min=0), grouped.amin(2).clamp_(max=0)
    least = torch.finfo(torch.float16).smallest_normal
    best: list[torch.Tensor] | None = None
    for share in (1.0, 0.95, 0.9, 0.85, 0.8):
        scale = ((high - low) * (share / 15)).clamp_(min=least).half().float()
        zero = (-low * share / scale).round_().clamp_(0, 15)
        values = (grouped / scale.unsqueeze(2)).round_().add_(zero.unsqueeze(2)).clamp_(0, 15)
        error = (values.sub(zero.unsqueeze(2)).mul_(scale.unsqueeze(2)) - grouped).square_().sum(2)
        found = [error, scale, zero, values]
        if best is None:
            best = found
            continue
        better = error < best[0]
        for kept, new in zip(best, found, strict=True):
            kept.copy_(torch.where(better.unsqueeze(2) if new.dim() == 3 else better, new, kept))
    assert best is not None
    return best[3].to(torch.uint8), best[1], best[2]


class Int8Linear(Operator):
    """x @ W.T + bias with 8-bit W and one scale a row, for bfloat16 activations."""

    def init(  # type: ignore[override]
        self, *, weight: torch.Tensor, bias: torch.Tensor | None = None, keep_prefill_copy: bool = True, **sizes: Any
    ) -> None:
        """Quantise `weight` [out_features, in_features] float32; `bias` [out_features] is bfloat16."""
        values, scale = quantize_rows(weight, torch.bfloat16)
        self._values: torch.Tensor | None = values
        self._scale: torch.Tensor | None = scale
        self._bias = bias
        self._copy = weight.to(torch.bfloat16) if keep_prefill_copy else None

    @property
    def whole_weight(self) -> torch.Tensor | None:
        """W in bfloat16 for `gated_linear`; None with a bias, or when no copy is held."""
        return self._copy if self._bias is None else None

    @property
    def nbytes(self) -> int:
        """Bytes of weights held."""
        return sum(t.nbytes for t in (self._values, self._scale, self._bias, self._copy) if t is not None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_rows, in_features] to [num_rows, out_features]; a row's result does not depend on the other rows."""
        out = torch._weight_int8pack_mm(x, self._values, self._scale)  # type: ignore[arg-type]
        return out if self._bias is None else out.add_(self._bias)

    def forward_prefill(self, x: torch.Tensor) -> torch.Tensor:
        """The same for the rows of one prefill chunk."""
        if x.shape[0] < PREFILL_ROWS:
            return self.forward(x)
        if self._copy is not None:
            return F.linear(x, self._copy, self._bias)
        assert self._values is not None and self._scale is not None
        pieces = self._values.chunk(-(-2 * self._values.numel() // PIECE_BYTES))
        out = torch.cat([F.linear(x, piece.to(torch.bfloat16)) for piece in pieces], dim=1).mul_(self._scale)
        return out if self._bias is None else out.add_(self._bias)

    def free(self) -> None:
        self._values = self._scale = self._bias = self._copy = None


def columns_with_repeats(weight: torch.Tensor, num_extra: int) -> torch.Tensor:
    """Which input column each int8 column stands for: every one once, and those that set the scale of many rows more often.

    A few input channels of a language model's head have weights several times larger than the others. Given n columns,
    a channel holds numbers up to 127 n, and the rows that it dominates get a finer step. Chosen greedily on some rows.

    Args:
        weight: [out_features, in_features] float32

    Returns:
        int64 [in_features + num_extra], rising.
    """
    some = weight[:: -(-weight.shape[0] // 2048)].abs()
    repeats = torch.ones(weight.shape[1])
    for _ in range(num_extra):
        largest, column = (some / repeats).topk(2, dim=1)
        gain = torch.zeros_like(repeats).index_add_(0, column[:, 0], largest[:, 0].square() - largest[:, 1].square())
        repeats[gain.argmax()] += 1
    return torch.arange(weight.shape[1]).repeat_interleave(repeats.long())


def quantize_repeated(weight: torch.Tensor, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 values on repeated columns and one float32 scale a row: w[:, c] = scale * (sum of the columns that stand for c).

    Returns:
        values [out_features, len(columns)] int8 and scale [out_features].
    """
    repeats = torch.bincount(columns, minlength=weight.shape[1])
    limit = 127 * repeats
    scale = (weight.abs() / limit).amax(1).clamp_(min=torch.finfo(torch.float32).tiny)
    whole = (weight / scale.unsqueeze(1)).round_().clamp_(-limit, limit)
    taken = 127 * (torch.arange(len(columns)) - (repeats.cumsum(0) - repeats)[columns])  # by a column's earlier twins
    part = (whole.abs()[:, columns] - taken).clamp_(0, 127) * whole.sign()[:, columns]
    return part.to(torch.int8), scale


class Int8Head(Operator):
    """float32 logits x @ W.T with 8-bit W and one scale a row; x is split into two int8 planes, exact to 15 bits."""

    def init(  # type: ignore[override]
        self, *, weight: torch.Tensor, keep_batch_copy: bool = True, **sizes: Any
    ) -> None:
        """Quantise `weight` [vocab_size, hidden_size] float32.

        keep_batch_copy: hold W a second time in the order that is faster from two rows on (1 byte a weight).
        """
        width = weight.shape[1]
        num_extra = -(-(width + width // 16) // 64) * 64 - width  # about a tenth more; whole cache lines are faster
        self._columns: torch.Tensor | None = columns_with_repeats(weight, num_extra)
        pieces = [quantize_repeated(piece, self._columns) for piece in weight.chunk(-(-weight.shape[0] // 8192))]
        values, scale = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        self._values: torch.Tensor | None = values
        self._batch_values: torch.Tensor | None = values.T.contiguous() if keep_batch_copy else values.T
        self._scale: torch.Tensor | None = scale

    @property
    def nbytes(self) -> int:
        """Bytes of weights held."""
        if self._values is None or self._scale is None:
            return 0
        has_copy = self._batch_values is not None and self._batch_values.is_contiguous()
        return self._values.nbytes * (2 if has_copy else 1) + self._scale.nbytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] in any float type to [num_rows, vocab_size] float32; rows are independent of each other.

        Integer sums are exact, so whichever way the library computes them, the bits are the same.
        """
        assert self._values is not None and self._batch_values is not None
        assert self._scale is not None and self._columns is not None
        num_rows = x.shape[0]
        x = x.float()
        step = x.abs().amax(1, keepdim=True).div_(127 * 128 + 63).clamp_(min=torch.finfo(torch.float32).tiny)
        whole = x.div(step).round_()
        high = whole.div(128).round_()  # -127 .. 127
        planes = torch.cat((high, whole.sub_(high, alpha=128))).to(torch.int8)  # the low plane is within -64 .. 64
        planes = planes.index_select(1, self._columns)
        if num_rows == 1:  # piece by piece, so that the second plane finds the weights in the cache
            pieces = self._values.chunk(-(-self._values.nbytes // HEAD_PIECE_BYTES))
            sums = [(torch._int_mm(planes[:1], piece.T), torch._int_mm(planes[1:], piece.T)) for piece in pieces]
            high_sum, low_sum = (torch.cat(parts, dim=1) for parts in zip(*sums, strict=True))
        else:
            high_sum, low_sum = torch._int_mm(planes, self._batch_values).chunk(2)
        out = low_sum.float().add_(high_sum, alpha=128)  # in float32: the sum may exceed 31 bits
        return out.mul_(step).mul_(self._scale)

    def forward_prefill(self, x: torch.Tensor) -> torch.Tensor:
        """As `forward`: the logits of a prompt's last token are computed like any other's."""
        return self.forward(x)

    def free(self) -> None:
        self._values = self._batch_values = self._scale = self._columns = None


register("int4_linear", "torch", Int4Linear)
register("int8_linear", "torch", Int8Linear)
register("int8_head", "torch", Int8Head)

LinearOperator = FloatLinear | Int4Linear | Int8Linear | Int8Head
