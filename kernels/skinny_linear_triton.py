"""x @ W.T for few rows of x and weights in 16 or 32 bits, near the bandwidth of the memory that the weights come from.

Rows of W are the rows of the tensor cores' tile and the few rows of x its columns, so W goes through shared memory once and
without rearrangement. A row's bits do not depend on the other rows: nothing in the launch does.

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

from qsa.kernels.checks import FLOATS, check_tensor
from qsa.kernels.pointwise_triton import silu_multiply
from qsa.kernels.registry import Operator, register
from qsa.kernels.skinny_launch_triton import (
    BLOCK_M,
    CardSize,
    Counters,
    Launch,
    begin,
    card_size,
    hand_on,
    make_launch,
    rows_from_tiles,
    store_in_tiles,
    weight_ptrs,
    weight_rows,
)

NARROW = Launch(block_n=64, block_k=128, num_stages=3)  # few tiles: their columns are cut, so that all programs run at once
WIDE = Launch(block_n=128, block_k=64, num_stages=4)
FLOAT32 = Launch(block_n=64, block_k=32, num_stages=2)
TUNE = [
    dict(block_n=64, block_k=128, num_warps=4, num_stages=3),  # 60 KiB: three programs a multiprocessor
    dict(block_n=64, block_k=128, num_warps=4, num_stages=4),  # two
    dict(block_n=64, block_k=64, num_warps=4, num_stages=4),  # 40 KiB: five
    dict(block_n=64, block_k=256, num_warps=4, num_stages=2),
    dict(block_n=128, block_k=64, num_warps=4, num_stages=4),  # 72 KiB: three
    dict(block_n=128, block_k=64, num_warps=4, num_stages=6),
    dict(block_n=128, block_k=128, num_warps=8, num_stages=2),
    dict(block_n=128, block_k=128, num_warps=8, num_stages=3),  # 108 KiB: two
    dict(block_n=32, block_k=256, num_warps=4, num_stages=4, splits=1),
    dict(block_n=64, block_k=128, num_warps=4, num_stages=3, tile_n=64),
    dict(block_n=128, block_k=64, num_warps=4, num_stages=4, tile_n=64),
    dict(block_n=128, block_k=128, num_warps=8, num_stages=3, tile_n=64),
    dict(pdl=True),
    dict(pdl=True, prefetch=3),
]  # parts of the columns: as `pick` cuts them


@triton.jit
def _skinny_linear_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, work_ptr, count_ptr,
    num_rows, width, in_features, num_steps,
    stride_x, stride_w, stride_step,
    PRECISION: tl.constexpr,
    PARTS: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,      # in_features is a multiple of BLOCK_K
    TILE_N: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ITEM_BYTES: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
    PREFETCH: tl.constexpr,
):  # fmt: skip
    # grid: (blocks of rows of x, tiles of rows of W, SPLITS)
    block = tl.program_id(0)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    rows = weight_rows(tile, width, GATED, BLOCK_N)
    offs_m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    mask_m = (offs_m < num_rows)[:, None]
    first = split * num_steps // SPLITS
    last = (split + 1) * num_steps // SPLITS
    tl.assume(first < last)  # else the compiler has products wait for a zero that might be their sum
    begin(w_ptr, rows, first, last, stride_w, stride_step, TILE_N, BLOCK_K, ITEM_BYTES, PDL, PREFETCH)

    w_ptrs = weight_ptrs(w_ptr, rows, offs_k, stride_w, TILE_N, BLOCK_K)
    x_ptrs = x_ptr + (offs_m.to(tl.int64) * stride_x)[:, None] + offs_k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in tl.range(first, last, num_stages=NUM_STAGES):
        mask_k = (step * BLOCK_K + offs_k < in_features)[None, :]
        if EVEN_K:
            x = tl.load(x_ptrs + step * BLOCK_K, mask=mask_m, other=0.0)
        else:
            x = tl.load(x_ptrs + step * BLOCK_K, mask=mask_m & mask_k, other=0.0)
        if EVEN_K or TILE_N > 1:  # tiles are filled up
            w = tl.load(w_ptrs + step * stride_step)  # [BLOCK_N, BLOCK_K]
        else:
            w = tl.load(w_ptrs + step * stride_step, mask=mask_k, other=0.0)
        acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
    hand_on(
        acc, block, tile, split, rows, bias_ptr, out_ptr, work_ptr, count_ptr, num_rows, width,
        PARTS, GATED, HAS_BIAS, SPLITS, BLOCK_N, BLOCK_M,
    )  # fmt: skip


def pick(out_features: int, in_features: int, itemsize: int, card: CardSize, changes: dict[str, Any] | None = None) -> Launch:
    """The launch for a weight: steps of 16 KiB, three programs a multiprocessor where its memory holds them.

    changes: fields in place of what would be chosen.
    """
    chosen = NARROW
    if itemsize == 4:
        chosen = FLOAT32
    elif triton.cdiv(out_features, NARROW.block_n) > 3 * card.num_multiprocessors:
        chosen = WIDE
    return make_launch(chosen, changes, out_features, in_features, card, itemsize=itemsize)


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    launch: Launch,
    *,
    parts: bool = False,
    gated: bool = False,
    counters: Counters | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x @ weight.T + bias.

    Args:
        x:         [num_rows, in_features]
        weight:    [out_features, in_features], in the type of x; with launch.tile_n > 1 from `store_in_tiles`.
        bias:      [out_features] or None
        parts:     give the parts of the columns one by one, bias in the first.
        gated:     the first half of the outputs is a gate: give silu(gate) * the other half.
        counters:  kept by the caller for this weight; one product at a time.
        out_dtype: default: as x.

    Returns:
        [num_rows, out_features], with `gated` half as many; with `parts` float32 [splits, num_rows, out_features].
    """
    num_rows, in_features = x.shape
    out_features, stored = weight.shape
    check_tensor("x", x, (None, None), FLOATS)
    check_tensor("weight", weight, (None, None), (x.dtype,), x.device)
    if x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError("the last axis of x must be contiguous, and the whole weight")
    if stored != (in_features if launch.tile_n == 1 else triton.cdiv(in_features, launch.block_k) * launch.block_k):
        raise ValueError(f"x has {in_features} columns, which does not go with a weight of {stored}")
    num_steps = triton.cdiv(in_features, launch.block_k)
    return launch_product(
        _skinny_linear_kernel,
        (x, weight, bias),
        (in_features, num_steps, x.stride(0), stored * launch.tile_n, launch.block_k * launch.tile_n),
        launch,
        num_rows,
        out_features,
        num_steps,
        parts=parts,
        gated=gated,
        counters=counters,
        out_dtype=out_dtype,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        EVEN_K=in_features % launch.block_k == 0,
        BLOCK_K=launch.block_k,
        ITEM_BYTES=x.element_size(),
    )


def launch_product(
    kernel: Any,
    tensors: tuple[torch.Tensor | None, ...],
    numbers: tuple[int, ...],
    launch: Launch,
    num_rows: int,
    out_features: int,
    num_steps: int,
    *,
    parts: bool,
    gated: bool,
    counters: Counters | None,
    out_dtype: torch.dtype | None,
    **constants: Any,
) -> torch.Tensor:
    """Allocate and launch. The kernel takes `tensors` (x first, bias last), results, workspace, counters and `numbers`."""
    x, bias = tensors[0], tensors[-1]
    assert x is not None
    if launch.splits > num_steps:
        raise ValueError(f"columns of {num_steps} steps cannot be cut into {launch.splits} parts")
    if gated and (parts or out_features % 2):
        raise ValueError(f"a gate and its other half need an even number of outputs, in one part, got {out_features}")
    width = out_features // 2 if gated else out_features
    tiles = triton.cdiv(out_features, launch.block_n) if not gated else triton.cdiv(width, launch.block_n // 2)
    blocks = triton.cdiv(num_rows, BLOCK_M)
    shape = (launch.splits, num_rows, width) if parts else (num_rows, width)
    out = torch.empty(shape, dtype=torch.float32 if parts else out_dtype or x.dtype, device=x.device)
    work = counts = out
    if launch.splits > 1 and not parts:
        work = torch.empty(launch.splits * blocks * tiles * launch.block_n * BLOCK_M, dtype=torch.float32, device=x.device)
        counts = (counters or Counters(out_features, x.device)).of(blocks * tiles)
    options: dict[str, Any] = dict(launch_pdl=True) if launch.pdl else {}
    if num_rows:
        kernel[(blocks, tiles, launch.splits)](
            *tensors[:-1], x if bias is None else bias, out, work, counts, num_rows, width, *numbers,
            PARTS=parts, GATED=gated, HAS_BIAS=bias is not None, TILE_N=launch.tile_n, SPLITS=launch.splits,
            BLOCK_N=launch.block_n, BLOCK_M=BLOCK_M, NUM_STAGES=launch.num_stages, PDL=launch.pdl, PREFETCH=launch.prefetch,
            num_warps=launch.num_warps, **constants, **options,
        )  # fmt: skip
    return out


EARLY_STEPS = 3  # whose weights are fetched meanwhile


class SkinnyLinear(Operator):
    """What linear operators on a GPU have in common; each says how it multiplies few rows, and how many."""

    launch: Launch

    def begin_early(self, device: torch.device) -> None:
        """From now on launch products before the launch before them has ended, where the card can.

        It pays behind launches that are short of bandwidth and say early that the next may begin. Bits stay as they are.
        """
        self.launch = replace(self.launch, pdl=card_size(device).begins_early, prefetch=EARLY_STEPS)

    def run(
        self, x: torch.Tensor, *, parts: bool = False, gated: bool = False, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """A product as `skinny_linear` describes it."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_rows, in_features] to [num_rows, out_features]; a row's result does not depend on the other rows."""
        return self.run(x)

    def forward_parts(self, x: torch.Tensor) -> torch.Tensor:
        """The same before the sum over parts of the columns: float32 [splits, num_rows, out_features]."""
        return self.run(x, parts=True)

    def forward_gated(self, x: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, [num_rows, out_features / 2]; W holds the gate's rows, then those of up."""
        return self.run(x, gated=True)

    def forward_prefill(self, x: torch.Tensor) -> torch.Tensor:
        """As `forward` for the rows of one prefill chunk, as fast as the library can."""
        raise NotImplementedError

    def forward_gated_prefill(self, x: torch.Tensor) -> torch.Tensor:
        """As `forward_gated` for the rows of one prefill chunk."""
        return silu_multiply(self.forward_prefill(x))


class FloatLinear(SkinnyLinear):
    """x @ W.T + bias with W in the type of the activations, on a GPU."""

    def init(  # type: ignore[override]
        self,
        *,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        launch: dict[str, Any] | None = None,
        out_dtype: torch.dtype | None = None,
        **sizes: Any,
    ) -> None:
        """Keep W.

        Args:
            weight:    [out_features, in_features] in the activations' type; held as it is when contiguous.
            bias:      [out_features]
            launch:    fields of `Launch` in place of what `pick` chooses.
            out_dtype: of the results; default: as the activations.
        """
        out_features, self._in_features = weight.shape
        self.launch = pick(out_features, self._in_features, weight.element_size(), card_size(weight.device), launch)
        self._weight: torch.Tensor | None = weight.contiguous()
        if self.launch.tile_n > 1:
            self._weight = store_in_tiles(weight, self.launch.tile_n, self.launch.block_k)
        self._bias = bias
        self._out_dtype = out_dtype
        self._counters: Counters | None = Counters(out_features, weight.device)

    @property
    def nbytes(self) -> int:
        """Bytes of weights held."""
        return sum(t.nbytes for t in (self._weight, self._bias) if t is not None)

    def run(
        self, x: torch.Tensor, *, parts: bool = False, gated: bool = False, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        assert self._weight is not None
        how: dict[str, Any] = dict(parts=parts, gated=gated, out_dtype=out_dtype or self._out_dtype)
        return skinny_linear(x, self._weight, self._bias, self.launch, counters=self._counters, **how)

    def forward_prefill(self, x: torch.Tensor) -> torch.Tensor:
        assert self._weight is not None
        weight = self._weight
        if self.launch.tile_n > 1:
            weight = rows_from_tiles(weight, self.launch.tile_n, self.launch.block_k, self._in_features)
        out = F.linear(x, weight, self._bias)
        return out if self._out_dtype is None else out.to(self._out_dtype)

    def free(self) -> None:
        self._weight = self._bias = self._counters = None


register("float_linear", "triton", FloatLinear)
