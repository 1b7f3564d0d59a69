"""Linear operators on a GPU with weights of 8 or 4 bits: x @ W.T + bias for activations in bfloat16 or float16.

Int8Linear, Fp8Linear   whole numbers or float8_e4m3fn with one scale a row.
Int4Linear              groups of 32 or more columns with a scale, and a whole zero or a minimum.
Int8Head                Int8Linear with float32 results, for logits.

Few rows: near the bandwidth of the memory (kernels/skinny_quant_triton.py). Many rows: fp8 multiplies in 8 bits where the card
can (Ada, Hopper); int8 does so where that is faster than 16 bits, which it is not on Hopper; all else makes a piece of the
weight in the activations' type and leaves it to the library.

Reference: kernels/quant_linear_ref.py
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from qsa.kernels.checks import check_tensor
from qsa.kernels.paged_kv import capability
from qsa.kernels.quant_linear import quantize_rows
from qsa.kernels.quant_prefill_triton import (
    FP8_MAX,
    dequantise_bytes,
    dequantise_nibbles,
    linear_in_8_bits,
    linear_in_pieces,
)
from qsa.kernels.registry import register
from qsa.kernels.skinny_launch_triton import BLOCK_M, CardSize, Counters, Launch, card_size, make_launch, store_in_tiles
from qsa.kernels.skinny_linear_triton import SkinnyLinear, launch_product
from qsa.kernels.skinny_quant_triton import (
    BYTE_RUN,
    byte_linear_kernel,
    is_compiled,
    nibble_linear_kernel,
    pack_bytes,
    pack_nibbles,
    pack_terms,
)

TUNE_BYTES = [
    dict(block_n=128, block_k=64, num_warps=4, num_stages=4),  # 64 KiB: three programs a multiprocessor
    dict(block_n=128, block_k=64, num_warps=4, num_stages=3),
    dict(block_n=128, block_k=64, num_warps=8, num_stages=5),
    dict(block_n=128, block_k=128, num_warps=8, num_stages=2),
    dict(block_n=128, block_k=128, num_warps=8, num_stages=3),
    dict(block_n=64, block_k=128, num_warps=4, num_stages=2),
    dict(block_n=64, block_k=128, num_warps=4, num_stages=3),
    dict(block_n=64, block_k=128, num_warps=4, num_stages=4),
    dict(block_n=128, block_k=64, num_warps=4, num_stages=4, tile_n=64),
    dict(block_n=64, block_k=128, num_warps=4, num_stages=3, tile_n=64),
    dict(pdl=True, prefetch=3),
]
TUNE_NIBBLES = [
    dict(block_n=64, block_k=128, num_warps=4, num_stages=3, tile_n=64),
    dict(block_n=64, block_k=128, num_warps=4, num_stages=2, tile_n=64),
    dict(block_n=64, block_k=128, num_warps=4, num_stages=3, tile_n=1),
    dict(block_n=128, block_k=128, num_warps=8, num_stages=2, tile_n=64),
    dict(block_n=128, block_k=128, num_warps=8, num_stages=3, tile_n=64),
    dict(block_n=64, block_k=64, num_warps=4, num_stages=4, tile_n=64),
    dict(block_n=128, block_k=64, num_warps=8, num_stages=3, tile_n=64),
    dict(block_n=128, block_k=64, num_warps=8, num_stages=4, tile_n=64),
    dict(block_n=256, block_k=64, num_warps=8, num_stages=3, tile_n=64),
    dict(pdl=True, prefetch=3),
]
FEW_ROWS = 2 * BLOCK_M  # up to as many rows of a prompt are multiplied as those of a decode step are
SCALES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def pick_bytes(out_features: int, in_features: int, card: CardSize, changes: dict[str, Any] | None = None) -> Launch:
    """The launch for a weight of 8 bits: steps of 16 KiB. changes: fields in place of what would be chosen."""
    chosen = Launch(block_n=128, block_k=64, num_stages=4)
    return make_launch(chosen, changes, out_features, in_features, card, columns_per_word=2, most_programs=3)


def pick_nibbles(
    out_features: int, in_features: int, group: int, card: CardSize, changes: dict[str, Any] | None = None
) -> Launch:
    """The launch for a weight of 4 bits whose columns share a scale by `group`; a step's runs lie each in one group."""
    padded = {run: -(-in_features // (4 * run)) * 4 * run for run in (128, 64, 32) if group % run == 0}
    run = next(run for run, columns in padded.items() if columns <= 1.03 * min(padded.values()))
    if run == 128:
        chosen = Launch(block_n=64, block_k=run, num_stages=3)
    else:
        chosen = Launch(block_n=128, block_k=run, num_warps=8, num_stages=3)
    tile_n = min(64, out_features & -out_features)  # nobody reads such weights row by row
    chosen = replace(chosen, tile_n=tile_n)
    return make_launch(chosen, changes, out_features, in_features, card, columns_per_word=4, most_programs=2)


def quantize_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float8_e4m3fn [out_features, in_features] and one float32 scale a row, w = scale * value."""
    wide = weight.float()
    scale = (wide.abs().amax(1) / FP8_MAX).clamp_(min=torch.finfo(torch.float32).tiny)
    return (wide / scale.unsqueeze(1)).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def by_pieces(quantize: Any, weight: torch.Tensor, rows: int = 8192) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize` for some rows at a time: a float32 copy of a whole head is large."""
    pieces = [quantize(piece) for piece in weight.split(rows)]
    values, scale = (torch.cat([p.view(torch.uint8) if p.itemsize == 1 else p for p in part]) for part in zip(*pieces))
    return values.view(pieces[0][0].dtype), scale


class ByteLinear(SkinnyLinear):
    """x @ W.T + bias with W in 8 bits and one scale a row; a subclass says which 8 bits."""

    kind: str
    result_dtype: torch.dtype | None = None  # None: as the activations

    def init(
        self,
        *,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        values: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
        launch: dict[str, Any] | None = None,
        multiply_in_8_bits: bool | None = None,
        **sizes: Any,
    ) -> None:
        """Pack W.

        Args:
            weight: [out_features, in_features] in any float type, to be quantised; or, in place of it,
            values: int8 or float8_e4m3fn [out_features, in_features] and
            scale:  float32 [out_features], w = scale * value.
            bias:   [out_features] in the activations' type.
            launch: fields of `Launch` in place of what `pick_bytes` chooses.
            multiply_in_8_bits: whether prefill brings activations to 8 bits; default: where the card gains by it.
        """
        if weight is not None:
            values, scale = by_pieces(self._quantise, weight)
        if values is None or scale is None:
            raise ValueError(f"{self.kind} weights need `weight`, or `values` with `scale`")
        check_tensor("values", values, (None, None), (torch.int8 if self.kind == "int8" else torch.float8_e4m3fn,))
        out_features, self._in_features = values.shape
        check_tensor("scale", scale, (out_features,), (torch.float32,), values.device)
        device = values.device
        self.launch = pick_bytes(out_features, self._in_features, card_size(device), launch)
        if self.launch.block_k % BYTE_RUN.value:
            raise ValueError(f"block_k must be a multiple of {BYTE_RUN.value} words, got {self.launch.block_k}")
        self._words: torch.Tensor | None = pack_bytes(values)
        if self.launch.tile_n > 1:
            self._words = store_in_tiles(self._words, self.launch.tile_n, self.launch.block_k)
        self._scale: torch.Tensor | None = scale.contiguous()
        self._bias = bias
        self._counters: Counters | None = Counters(out_features, device)
        if multiply_in_8_bits is None:
            multiply_in_8_bits = self._gains(capability(device))
        self._in_8_bits = multiply_in_8_bits and self.launch.tile_n == 1 and out_features % 16 == 0
        self._by_row = capability(device) >= (9, 0)

    @staticmethod
    def _quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    @staticmethod
    def _gains(card: tuple[int, int]) -> bool:
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes of weights held."""
        return sum(t.nbytes for t in (self._words, self._scale, self._bias) if t is not None)

    def run(
        self, x: torch.Tensor, *, parts: bool = False, gated: bool = False, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """A product as `skinny_linear` describes it."""
        assert self._words is not None and self._scale is not None
        check_tensor("x", x, (None, self._in_features), (torch.bfloat16, torch.float16), self._words.device)
        x = x if x.stride(1) == 1 else x.contiguous()
        launch, stored = self.launch, self._words.shape[1]
        num_steps = triton.cdiv(self._in_features, 2 * launch.block_k)
        return launch_product(
            byte_linear_kernel,
            (x, self._words, self._scale, self._bias),
            (self._in_features, num_steps, x.stride(0), stored * launch.tile_n, launch.block_k * launch.tile_n),
            launch,
            len(x),
            len(self._scale),
            num_steps,
            parts=parts,
            gated=gated,
            counters=self._counters,
            out_dtype=out_dtype or self.result_dtype,
            KIND=self.kind,
            IN_ASSEMBLY=is_compiled(),
            EVEN_K=self._in_features % (2 * launch.block_k) == 0,
            BLOCK_K=launch.block_k,
        )

    def forward_prefill(self, x: torch.Tensor) -> torch.Tensor:
        """As `forward` for the rows of one prefill chunk, as fast as the library can."""
        assert self._words is not None and self._scale is not None
        if len(x) <= FEW_ROWS:
            return self.run(x)
        words, scale, launch = self._words, self._scale, self.launch
        out_dtype = self.result_dtype or x.dtype
        if self._in_8_bits:
            weight = words.view(torch.int8 if self.kind == "int8" else torch.float8_e4m3fn)
            return linear_in_8_bits(x, weight, scale, self._bias, out_dtype, self._by_row)

        def rows_of(first: int, last: int) -> torch.Tensor:
            how = (first, last, self._in_features, x.dtype, launch.tile_n, launch.block_k)
            return dequantise_bytes(words, scale, self.kind, *how)

        return linear_in_pieces(x, len(scale), self._bias, rows_of).to(out_dtype)

    def free(self) -> None:
        self._words = self._scale = self._bias = self._counters = None


class Int8Linear(ByteLinear):
    """Whole numbers -127 to 127 with one scale a row."""

    kind = "int8"

    @staticmethod
    def _quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize_rows(weight.float(), torch.float32)

    @staticmethod
    def _gains(card: tuple[int, int]) -> bool:
        return (8, 0) <= card < (9, 0)  # int8 and bfloat16 take the same time on Hopper, and bfloat16 is more exact


class Int8Head(Int8Linear):
    """Logits: x @ W.T in float32."""

    result_dtype = torch.float32


class Fp8Linear(ByteLinear):
    """float8_e4m3fn with one scale a row."""

    kind = "fp8"

    @staticmethod
    def _quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize_fp8(weight)

    @staticmethod
    def _gains(card: tuple[int, int]) -> bool:
        return card >= (8, 9)


class Int4Linear(SkinnyLinear):
    """x @ W.T + bias with W in 4 bits, groups of columns with a scale, and a zero or a minimum."""

    def init(  # type: ignore[override]
        self,
        *,
        values: torch.Tensor,
        scale: torch.Tensor,
        minimum: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
        launch: dict[str, Any] | None = None,
        **sizes: Any,
    ) -> None:
        """Pack W.

        Args:
            values:  uint8 [out_features, in_features], 0 to 15.
            scale:   float32 [out_features, in_features / group], group a multiple of 32.
            minimum: like scale; w = scale * value + minimum. None: -8 * scale. Where it is a whole number of scales
                     everywhere, as in files with zeros, it is held as that number.
            bias:    [out_features] in the activations' type.
            dtype:   of the activations: bfloat16 or float16.
            launch:  fields of `Launch` in place of what `pick_nibbles` chooses; block_k must divide the group.
        """
        out_features, self._in_features = values.shape
        groups = scale.shape[1]
        group = self._in_features // groups
        if group * groups != self._in_features or group % 32:
            raise ValueError(f"{self._in_features} columns in {groups} groups: a group must be a multiple of 32 columns")
        if dtype not in SCALES:
            raise ValueError(f"4-bit weights go with activations in bfloat16 or float16, not {dtype}")
        device = values.device
        self.launch = pick_nibbles(out_features, self._in_features, group, card_size(device), launch)
        run = self.launch.block_k
        if group % run:
            raise ValueError(f"block_k ({run}) must divide the group ({group})")
        self._dtype = dtype
        self._zeros, zero = whole_zeros(scale, minimum)
        held = [t for t in (scale, minimum if self._zeros == "minimum" else None) if t is not None]
        scale_dtype = narrow_type(held)
        self._scale_type = SCALES[scale_dtype]
        short = -self._in_features % (4 * run) // run  # runs past the end, with scale and minimum 0

        def of_runs(part: torch.Tensor | None) -> torch.Tensor | None:
            return None if part is None else F.pad(part.repeat_interleave(group // run, dim=1), (0, short))

        runs = of_runs(scale)
        assert runs is not None
        minima = of_runs(minimum) if self._zeros == "minimum" else None
        self._terms: torch.Tensor | None = pack_terms(runs, of_runs(zero), minima, dtype, scale_dtype)
        words = pack_nibbles(values, run)
        self._words: torch.Tensor | None = words if self.launch.tile_n == 1 else store_in_tiles(words, self.launch.tile_n, run)
        self._bias = bias
        self._counters: Counters | None = Counters(out_features, device)

    @property
    def nbytes(self) -> int:
        """Bytes of weights held."""
        return sum(t.nbytes for t in (self._words, self._terms, self._bias) if t is not None)

    def run(
        self, x: torch.Tensor, *, parts: bool = False, gated: bool = False, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """A product as `skinny_linear` describes it."""
        assert self._words is not None and self._terms is not None
        check_tensor("x", x, (None, self._in_features), (self._dtype,), self._words.device)
        x = x if x.stride(1) == 1 else x.contiguous()
        launch, stored = self.launch, self._words.shape[1]
        num_steps = stored // launch.block_k
        return launch_product(
            nibble_linear_kernel,
            (x, self._words, self._terms, self._bias),
            (self._in_features, num_steps, x.stride(0), stored * launch.tile_n, launch.block_k * launch.tile_n),
            launch,
            len(x),
            len(self._words),
            num_steps,
            parts=parts,
            gated=gated,
            counters=self._counters,
            out_dtype=out_dtype,
            ZEROS=self._zeros,
            SCALE=self._scale_type,
            IN_ASSEMBLY=is_compiled(),
            EVEN_K=self._in_features % (4 * launch.block_k) == 0,
            BLOCK_K=launch.block_k,
        )

    def forward_prefill(self, x: torch.Tensor) -> torch.Tensor:
        """As `forward` for the rows of one prefill chunk, as fast as the library can."""
        assert self._words is not None and self._terms is not None
        if len(x) <= FEW_ROWS:
            return self.run(x)
        words, terms, launch = self._words, self._terms, self.launch

        def rows_of(first: int, last: int) -> torch.Tensor:
            how = (first, last, self._in_features, x.dtype, launch.tile_n, launch.block_k)
            return dequantise_nibbles(words, terms, self._zeros, self._scale_type, *how)

        return linear_in_pieces(x, len(words), self._bias, rows_of)

    def free(self) -> None:
        self._words = self._terms = self._bias = self._counters = None


def whole_zeros(scale: torch.Tensor, minimum: torch.Tensor | None) -> tuple[str, torch.Tensor | None]:
    """What the zeros of w = scale * value + minimum are, none (all 8), integer or minimum (neither), and the whole numbers."""
    if minimum is None:
        return "none", None
    zero = torch.where(scale == 0, 8.0, -minimum / torch.where(scale == 0, 1.0, scale)).round_()
    if not torch.equal(scale * zero, -minimum) or zero.amin() < 0 or zero.amax() > 16:
        return "minimum", None
    return ("none", None) if (zero == 8).all() else ("integer", zero)


def narrow_type(numbers: list[torch.Tensor]) -> torch.dtype:
    """The 16-bit type for scales: one that holds them exactly, else float16 where they are within its range."""
    for dtype in (torch.float16, torch.bfloat16):
        if all(torch.equal(part.to(dtype).float(), part) for part in numbers):
            return dtype
    sizes = torch.cat([part.abs().flatten() for part in numbers])
    sizes = sizes[sizes > 0]
    in_range = len(sizes) == 0 or (sizes.max() < 6e4 and sizes.min() > 6.2e-5)
    return torch.float16 if in_range else torch.bfloat16


register("int8_linear", "triton", Int8Linear)
register("int8_head", "triton", Int8Head)
register("fp8_linear", "triton", Fp8Linear)
register("int4_linear", "triton", Int4Linear)
