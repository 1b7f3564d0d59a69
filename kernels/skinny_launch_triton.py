"""What products of few rows share: how a weight is cut among programs, and how a program hands on its sums.

A program multiplies `block_n` rows of the weight, over all columns or over one of `splits` parts of them, with up to 16 rows
of activations, which fill the tensor cores' smallest tile. The weight is read once, so its bytes decide the time: all programs
should run at once, and enough of their loads be under way. Where columns are split, the program that is last to arrive adds
the parts, in their order, so that the result does not depend on who that was.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from qsa.kernels.paged_kv import capability, num_multiprocessors

BLOCK_M = 16  # rows of activations of a program; more rows are taken in blocks of as many
SHARED_BYTES = {(8, 0): 163 << 10, (8, 7): 163 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10, (10, 3): 227 << 10}
LEAST_SHARED_BYTES = 99 << 10  # of a multiprocessor of the other cards from Ampere on
COUNTED_BLOCKS = 4  # blocks of rows for which counters are kept


@dataclass(frozen=True)
class Launch:
    """How a product is launched; the bits of a result depend on it, and on nothing else.

    Attributes:
        block_n:  rows of the weight a program multiplies; with a gate, half of them are gate rows and half up rows.
        block_k:  numbers of a row it reads at a time; of packed weights, words of two bytes.
        splits:   parts that the columns are cut into.
        tile_n:   the weight is stored in tiles of as many rows and `block_k` columns, each in one piece; 1: row by row.
        pdl:      the launch may begin before the one before it has ended, and waits for it before it reads activations. It
                  gains where the one before says early that the next may begin (Hopper and newer, else it is not done).
        prefetch: steps whose weights are fetched into the L2 cache while it waits.
    """

    block_n: int = 64
    block_k: int = 128
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 4
    tile_n: int = 1
    pdl: bool = False
    prefetch: int = 0


@dataclass(frozen=True)
class CardSize:
    """What launches go by. shared_bytes: of a multiprocessor; begins_early: whether a launch may overlap the one before it."""

    num_multiprocessors: int
    shared_bytes: int
    begins_early: bool = False

    def programs(self, bytes_each: int, most: int) -> int:
        """Programs of that much shared memory that run at once, at most `most` on a multiprocessor."""
        return self.num_multiprocessors * max(1, min(most, self.shared_bytes // (bytes_each + 1024)))


def card_size(device: torch.device) -> CardSize:
    """Of the card that holds a tensor."""
    card = capability(device)
    return CardSize(num_multiprocessors(device), SHARED_BYTES.get(card, LEAST_SHARED_BYTES), card >= (9, 0))


def cut(tiles: int, num_steps: int, programs: int, most_splits: int = 8) -> int:
    """How many parts the columns are cut into, so that the programs fill the card evenly.

    Few tiles: as many parts as run at once. Many: the fewest with which the last wave of programs is nearly full.

    Args:
        tiles:     of the weight's rows.
        num_steps: steps of a row, at least two of which a part has.
        programs:  that run at once.
    """
    limit = max(1, min(most_splits, num_steps // 2))
    if tiles <= programs:
        return max(1, min(limit, programs // tiles))
    filled = {
        splits: tiles * splits / (triton.cdiv(tiles * splits, programs) * programs) for splits in range(1, min(limit, 3) + 1)
    }
    good = [splits for splits, share in filled.items() if share > 0.92]
    return good[0] if good else max(filled, key=lambda splits: filled[splits])


def make_launch(
    chosen: Launch,
    changes: dict[str, Any] | None,
    out_features: int,
    in_features: int,
    card: CardSize,
    *,
    columns_per_word: int = 1,
    itemsize: int = 2,
    most_programs: int = 5,
) -> Launch:
    """`chosen` with some fields changed, cut into as many parts as fill the card unless `changes` says how many.

    Args:
        columns_per_word: of a stored word of packed weights.
        itemsize:         bytes of a stored number or word, and of an activation.
        most_programs:    that a multiprocessor has registers for.
    """
    launch = replace(chosen, **(changes or {}))
    num_steps = triton.cdiv(in_features, launch.block_k * columns_per_word)
    splits = launch.splits
    if "splits" not in (changes or {}):
        w_steps = launch.num_stages - (columns_per_word > 1)  # packed weights leave shared memory before they are multiplied
        rows = w_steps * launch.block_n + launch.num_stages * columns_per_word * BLOCK_M
        programs = card.programs(itemsize * launch.block_k * rows, most_programs)
        splits = cut(triton.cdiv(out_features, launch.block_n), num_steps, programs)
    return replace(launch, splits=min(splits, num_steps), pdl=launch.pdl and card.begins_early)


def store_in_tiles(weight: torch.Tensor, tile_n: int, block_k: int) -> torch.Tensor:
    """The same numbers [out_features, columns] in the order of tiles; columns are filled up to whole tiles with zeros."""
    out_features, columns = weight.shape
    if out_features % tile_n:
        raise ValueError(f"a weight of {out_features} rows cannot be stored in tiles of {tile_n}")
    padded = torch.nn.functional.pad(weight, (0, -columns % block_k))
    tiles = padded.view(out_features // tile_n, tile_n, padded.shape[1] // block_k, block_k)
    return tiles.transpose(1, 2).contiguous().view(padded.shape)


def rows_from_tiles(stored: torch.Tensor, tile_n: int, block_k: int, columns: int) -> torch.Tensor:
    """What `store_in_tiles` made, row by row again."""
    tiles = stored.view(stored.shape[0] // tile_n, stored.shape[1] // block_k, tile_n, block_k)
    return tiles.transpose(1, 2).reshape(stored.shape)[:, :columns]


@triton.jit
def prefetch_l2(ptrs):
    """Have a line of the L2 cache fetched for each address."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [ptrs.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def begin(
    w_ptr, rows, first, last, stride_w, stride_step,
    TILE_N: tl.constexpr, BLOCK_K: tl.constexpr, ITEM_BYTES: tl.constexpr, PDL: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Wait for the launch before this one, if it may still run, and use the time. [first, last): steps of the program."""
    if PDL:
        LINE: tl.constexpr = 128 // ITEM_BYTES
        if PREFETCH > 0:
            lines = tl.arange(0, BLOCK_K // LINE) * LINE
            for step in tl.static_range(PREFETCH):
                ahead = tl.minimum(first + step, last - 1) * stride_step
                prefetch_l2(weight_ptrs(w_ptr, rows, lines, stride_w, TILE_N, BLOCK_K) + ahead)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # only now: whoever begins may read what the launches before this one wrote


@triton.jit
def weight_rows(tile, width, GATED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows of the weight that a program multiplies; of those past the end, the last one again."""
    offs_n = tl.arange(0, BLOCK_N)
    if GATED:
        HALF: tl.constexpr = BLOCK_N // 2
        return tl.minimum(tile * HALF + offs_n % HALF, width - 1) + offs_n // HALF * width
    return tl.minimum(tile * BLOCK_N + offs_n, width - 1)


@triton.jit
def weight_ptrs(w_ptr, rows, offs_k, stride_w, TILE_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Where numbers `offs_k` of the first step of each row lie. stride_w: from a row to the next, or from tile to tile."""
    if TILE_N == 1:
        return w_ptr + (rows.to(tl.int64) * stride_w)[:, None] + offs_k[None, :]
    return w_ptr + ((rows // TILE_N).to(tl.int64) * stride_w + rows % TILE_N * BLOCK_K)[:, None] + offs_k[None, :]


@triton.jit
def _store_rows(
    acc, tile, offs_m, rows, bias_ptr, out_ptr, num_rows, width,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Whole sums [BLOCK_N, BLOCK_M], biased, gated and turned into rows of the result."""
    if HAS_BIAS:
        acc += tl.load(bias_ptr + rows).to(tl.float32)[:, None]
    if GATED:
        HALF: tl.constexpr = BLOCK_N // 2
        gate, up = tl.split(tl.permute(tl.reshape(acc, [2, HALF, BLOCK_M]), (1, 2, 0)))
        out = gate / (1.0 + tl.exp(-gate)) * up
        offs_n = tile * HALF + tl.arange(0, HALF)
    else:
        out = acc
        offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (offs_n < width)[:, None] & (offs_m < num_rows)[None, :]
    ptrs = out_ptr + offs_m.to(tl.int64)[None, :] * width + offs_n[:, None]
    tl.store(ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def hand_on(
    acc, block, tile, split, rows, bias_ptr, out_ptr, work_ptr, count_ptr, num_rows, width,
    PARTS: tl.constexpr,     # every part of the columns is a result of its own, float32 [splits, num_rows, width]
    GATED: tl.constexpr,     # the result is silu(gate) * up, [num_rows, width]
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Store a program's sums [BLOCK_N, BLOCK_M], or add them to those of the other parts and store the whole."""
    offs_m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    if PARTS:
        if HAS_BIAS:
            acc += tl.where(split == 0, tl.load(bias_ptr + rows).to(tl.float32), 0.0)[:, None]
        part_ptr = out_ptr + split.to(tl.int64) * num_rows * width
        _store_rows(acc, tile, offs_m, rows, bias_ptr, part_ptr, num_rows, width, False, False, BLOCK_N, BLOCK_M)
    elif SPLITS == 1:
        _store_rows(acc, tile, offs_m, rows, bias_ptr, out_ptr, num_rows, width, GATED, HAS_BIAS, BLOCK_N, BLOCK_M)
    else:
        place = block * tl.num_programs(1) + tile
        stride = tl.num_programs(0).to(tl.int64) * tl.num_programs(1) * (BLOCK_N * BLOCK_M)
        offs = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        ptrs = work_ptr + place.to(tl.int64) * (BLOCK_N * BLOCK_M) + offs
        tl.store(ptrs + split * stride, acc)
        tl.debug_barrier()  # all of the program's numbers are on their way before one thread says so
        if tl.atomic_add(count_ptr + place, 1, sem="acq_rel") == SPLITS - 1:
            total = tl.load(ptrs, cache_modifier=".cg")
            for other in tl.static_range(1, SPLITS):
                total += tl.load(ptrs + other * stride, cache_modifier=".cg")
            _store_rows(total, tile, offs_m, rows, bias_ptr, out_ptr, num_rows, width, GATED, HAS_BIAS, BLOCK_N, BLOCK_M)
            tl.store(count_ptr + place, 0)


class Counters:
    """How many parts of a tile have arrived, zero between two products. One product at a time may use them."""

    def __init__(self, out_features: int, device: torch.device) -> None:
        self._counts = torch.zeros(COUNTED_BLOCKS * triton.cdiv(out_features, 16), dtype=torch.int32, device=device)

    def of(self, count: int) -> torch.Tensor:
        """At least `count` zeros."""
        if count <= len(self._counts):
            return self._counts
        return torch.zeros(count, dtype=torch.int32, device=self._counts.device)
