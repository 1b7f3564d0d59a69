"""`sketch` on a GPU: a slice is scored by the log-sum-exp over a 4-bit copy of every key.

Queries become int8 numbers and meet the keys' numbers on the tensor cores: products are exact, and four bits become eight by
two masks and a shift of four numbers at a time. Half of a key's numbers lie in low bits, half in high bits, so a product is
two. Logits are in units of log 2.

Reference: kernels/summaries/sketch_ref.py
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from qsa.kernels.checks import FLOATS, check_tensor
from qsa.kernels.kv_write_triton import round_to_even
from qsa.kernels.paged_kv import DecodeInputs, PagedKV, num_multiprocessors
from qsa.kernels.registry import register
from qsa.kernels.split_triton import kv_constants, load_rows, load_scale, row_pointer
from qsa.kernels.summaries.scan_triton import (
    KeySummary,
    check_scan,
    check_update,
    complete_slice,
    due_tiles,
    empty_scores,
    share_of_program,
    value_at,
)

TUNE_SCAN = [
    dict(block_s=block_s, num_warps=warps, num_stages=stages, programs=programs)
    for block_s, warps, stages, programs in ((4, 4, 4, 4), (4, 4, 3, 4), (8, 8, 3, 2), (4, 4, 3, 6), (8, 4, 3, 3), (4, 4, 5, 3))
]
TUNE_ROWS = [
    dict(block_m=block_m, block_s=4, num_warps=4, num_stages=stages, programs=programs)
    for block_m, stages, programs in ((32, 3, 3), (16, 3, 4), (32, 2, 4), (64, 3, 2))
]
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
ZERO: tl.constexpr = tl.constexpr(8)  # added to every number, -7 .. 7, so that it fits four bits


@triton.jit(do_not_specialize=["first_slice"])
def _update_sketch_kernel(
    page_table_ptr, summary_table_ptr, seq_lens_ptr, scale_ptr, first_slice, stride_pt, stride_st,
    IS_DECODE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    SLICE: tl.constexpr,       # tokens of a slice
    CHUNK_SLICES: tl.constexpr,  # slices that one chunk holds
    SLICE_BYTES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_W: tl.constexpr,     # HEAD_DIM / 2 rounded up to a power of two
    PAGE_SIZE: tl.constexpr, STORED: tl.constexpr, TYPE: tl.constexpr, E4M3: tl.constexpr, HAS_SCALE: tl.constexpr,
):  # fmt: skip
    # grid: (num_kv_heads, slices, or rows of a batch)
    HALF: tl.constexpr = HEAD_DIM // 2
    head = tl.program_id(0)
    row, index, is_complete = complete_slice(seq_lens_ptr, first_slice, SLICE, IS_DECODE)
    if is_complete:
        token = index * SLICE
        page = row_pointer(tl.load(page_table_ptr + row * stride_pt + token // PAGE_SIZE), STORED)
        offs_w = tl.arange(0, BLOCK_W)
        offs_t = tl.arange(0, SLICE)
        mask_w = (offs_w < HALF)[None, :]
        rows = head.to(tl.int64) * (2 * PAGE_SIZE) + token % PAGE_SIZE + offs_t
        every = tl.full([SLICE], True, tl.int1)
        factor = load_scale(scale_ptr, head, 0, HAS_SCALE, E4M3)
        low = load_rows(page, rows, every, offs_w, TYPE, E4M3, HEAD_DIM, 2 * BLOCK_W).to(tl.float32) * factor
        high = load_rows(page, rows, every, HALF + offs_w, TYPE, E4M3, HEAD_DIM, 2 * BLOCK_W).to(tl.float32) * factor
        largest = tl.where(mask_w, tl.maximum(tl.abs(low), tl.abs(high)), 0.0)  # [SLICE, BLOCK_W]
        scale = tl.div_rn(tl.max(largest, 1), tl.full([SLICE], 7.0, tl.float32))
        scale = tl.minimum(tl.maximum(scale, 5.9604644775390625e-08), 65504.0).to(tl.float16)
        wide = tl.broadcast_to(scale.to(tl.float32)[:, None], [SLICE, BLOCK_W])
        low = round_to_even(tl.minimum(tl.maximum(tl.div_rn(low, wide), -7.0), 7.0)).to(tl.int32) + ZERO
        high = round_to_even(tl.minimum(tl.maximum(tl.div_rn(high, wide), -7.0), 7.0)).to(tl.int32) + ZERO
        chunk = tl.load(summary_table_ptr + row * stride_st + index // CHUNK_SLICES).to(tl.pointer_type(tl.uint8))
        slice_ptr = chunk + (index % CHUNK_SLICES) * SLICE_BYTES
        offs = (head * SLICE + offs_t)[:, None] * HALF + offs_w[None, :]
        tl.store(slice_ptr + offs, (low | (high << 4)).to(tl.uint8), mask=mask_w)
        scales_ptr = (slice_ptr + NUM_KV_HEADS * SLICE * HALF).to(tl.pointer_type(tl.float16))
        tl.store(scales_ptr + head * SLICE + offs_t, scale)


@triton.jit
def _quantise(q_ptr, rows, mask_m, sm_scale, HALF: tl.constexpr, BLOCK_W: tl.constexpr):
    """Rows of queries as int8 numbers: two halves [len(rows), BLOCK_W], what zeros of keys add to a product, and a factor."""
    offs_w = tl.arange(0, BLOCK_W)
    mask = mask_m[:, None] & (offs_w < HALF)[None, :]
    low = tl.load(q_ptr + rows[:, None] + offs_w[None, :], mask=mask, other=0.0).to(tl.float32)
    high = tl.load(q_ptr + rows[:, None] + HALF + offs_w[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1) / 127.0
    divisor = tl.where(scale > 0, scale, 1.0)[:, None]
    low, high = round_to_even(low / divisor), round_to_even(high / divisor)
    zero = (tl.sum(low + high, 1) * ZERO).to(tl.int32)
    return low.to(tl.int8), high.to(tl.int8), zero, scale * (sm_scale * LOG2_E)


@triton.jit
def _unpack(packed, USES_ASM: tl.constexpr):
    """The numbers in the low and in the high bits of every byte."""
    if USES_ASM:  # four bytes at a time
        low, high = tl.inline_asm_elementwise(
            "and.b32 $0, $2, 0x0f0f0f0f; shr.u32 $1, $2, 4; and.b32 $1, $1, 0x0f0f0f0f;", "=&r,=&r,r", [packed],
            dtype=(tl.int8, tl.int8), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        low, high = (packed & 15).to(tl.int8), (packed >> 4).to(tl.int8)
    return low, high


@triton.jit
def _token_offsets(BLOCK_S: tl.constexpr, SLICE: tl.constexpr, WARPS: tl.constexpr):
    """Slice of the tile and token of the slice for every column of a product; a warp's columns are whole slices.

    A product deals its columns to the warps in eights: column (part, eight, warp, one) is a token of slice (warp, part).
    """
    offs_n = tl.arange(0, BLOCK_S * SLICE)
    slices = (offs_n // 8) % WARPS * (BLOCK_S // WARPS) + offs_n // (SLICE * WARPS)
    return slices, offs_n // (8 * WARPS) % (SLICE // 8) * 8 + offs_n % 8


@triton.jit
def _sum_slices(
    logits, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, SLICE: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp of every slice, in nats, from the logits of its tokens at the columns of _token_offsets."""
    dealt = tl.reshape(logits, [BLOCK_M, BLOCK_S // WARPS, SLICE // 8, WARPS, 8])
    top = tl.maximum(tl.max(tl.max(dealt, 2), 3), -3.0e38)  # [BLOCK_M, parts, WARPS], finite for a slice without tokens
    total = tl.sum(tl.sum(tl.exp2(dealt - top[:, :, None, :, None]), 2), 3)
    out = (top + tl.log2(total)) / LOG2_E
    return tl.reshape(tl.permute(out, [0, 2, 1]), [BLOCK_M, BLOCK_S])


@triton.jit
def _first_half(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The first ROWS of 2 * ROWS rows; a product holds both halves in the same threads."""
    first, _ = tl.split(tl.permute(tl.reshape(x, [2, ROWS, COLUMNS]), [1, 2, 0]))
    return first


@triton.jit
def _score_tile(
    tile_ptr, q_low, q_high, zero, factor, scale, offs_n, slice_of, token_of, first_token, sink_size, last_token,
    BLOCK_M: tl.constexpr, KEPT_M: tl.constexpr, HALF: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_S: tl.constexpr,
    SLICE: tl.constexpr, WARPS: tl.constexpr, USES_ASM: tl.constexpr,
):  # fmt: skip
    """Scores [KEPT_M, BLOCK_S] of the slices of a tile, the tokens outside [sink_size, last_token) left out."""
    offs_w = tl.arange(0, BLOCK_W)
    if BLOCK_W == HALF:
        packed = tl.load(tile_ptr + offs_n[None, :] + offs_w[:, None])  # [BLOCK_W, BLOCK_S * SLICE]
    else:
        packed = tl.load(tile_ptr + offs_n[None, :] + offs_w[:, None], mask=(offs_w < HALF)[:, None], other=0)
    low, high = _unpack(packed, USES_ASM)
    product = tl.dot(q_high, high, tl.dot(q_low, low, out_dtype=tl.int32), out_dtype=tl.int32)
    logits = (product - zero[:, None]).to(tl.float32) * factor[:, None]
    if KEPT_M < BLOCK_M:
        logits = _first_half(logits, KEPT_M, BLOCK_S * SLICE)
    logits *= scale.to(tl.float32)[None, :]
    if (first_token < sink_size) | (first_token + BLOCK_S * SLICE > last_token):
        tokens = first_token + slice_of * SLICE + token_of
        logits = tl.where(((tokens >= sink_size) & (tokens < last_token))[None, :], logits, float("-inf"))
    return _sum_slices(logits, KEPT_M, BLOCK_S, SLICE, WARPS)


@triton.jit
def _scan_sketch_kernel(
    q_ptr, table_ptr, seq_lens_ptr, due_ptr, out_ptr, batch, window_size, sink_size, sm_scale,
    stride_q_b, stride_q_h, stride_t_b, stride_o_b, stride_o_h,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,       # query heads per KV head
    BLOCK_M: tl.constexpr,     # GROUP rounded up to what a product needs
    KEPT_M: tl.constexpr,      # rows of a product of which something is kept: BLOCK_M, or half of it
    HALF: tl.constexpr,        # half of head_dim
    BLOCK_W: tl.constexpr,     # HALF rounded up to a power of two
    SLICE: tl.constexpr,       # tokens of a slice
    SLICE_BYTES: tl.constexpr,
    CHUNK_TILES: tl.constexpr,  # tiles that one chunk holds
    BLOCK_S: tl.constexpr,     # slices of a tile
    BLOCK_B: tl.constexpr,     # batch rounded up to a power of two
    WARPS: tl.constexpr,
    USES_ASM: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    # grid: (programs,); an equal share of the tiles of all rows that are due, one KV head of a row after the other
    batch_rows, lasts, tiles = due_tiles(seq_lens_ptr, due_ptr, batch, window_size, SLICE, BLOCK_S, BLOCK_B)
    ends = tl.cumsum(tiles, 0) * NUM_KV_HEADS
    place, stop = share_of_program(tl.sum(tiles, 0) * NUM_KV_HEADS)
    offs_s = tl.arange(0, BLOCK_S)
    offs_k = tl.arange(0, KEPT_M)
    slice_of, token_of = _token_offsets(BLOCK_S, SLICE, WARPS)
    while place < stop:  # one run of tiles in one chunk, for one head of one row
        row = tl.sum((ends <= place).to(tl.int32), 0)
        last_token = value_at(lasts, batch_rows, row)
        row_tiles = value_at(tiles, batch_rows, row)
        start = value_at(ends, batch_rows, row) - row_tiles * NUM_KV_HEADS
        head = (place - start) // row_tiles
        first = (place - start) % row_tiles
        chunk = first // CHUNK_TILES
        last = tl.minimum(tl.minimum(stop - start - head * row_tiles, row_tiles), (chunk + 1) * CHUNK_TILES)
        place = start + head * row_tiles + last
        wide_row = row.to(tl.int64)
        base = tl.multiple_of(tl.load(table_ptr + wide_row * stride_t_b + chunk).to(tl.pointer_type(tl.uint8)), 16)
        heads = head * GROUP + tl.arange(0, BLOCK_M)
        mask_m = tl.arange(0, BLOCK_M) < GROUP
        q_low, q_high, zero, factor = _quantise(
            q_ptr, wide_row * stride_q_b + heads * stride_q_h, mask_m, sm_scale, HALF, BLOCK_W
        )
        offs_n = slice_of * SLICE_BYTES + (head * SLICE + token_of) * HALF  # of a tile's tokens
        scales_ptr = (base + NUM_KV_HEADS * SLICE * HALF).to(tl.pointer_type(tl.float16))
        offs_scale = slice_of * (SLICE_BYTES // 2) + head * SLICE + token_of
        scale = tl.load(scales_ptr + (first % CHUNK_TILES) * (BLOCK_S * SLICE_BYTES // 2) + offs_scale)
        for tile in tl.range(first, last, num_stages=NUM_STAGES):
            tile_ptr = base + (tile % CHUNK_TILES) * (BLOCK_S * SLICE_BYTES)
            next_ptr = scales_ptr + ((tile + 1) % CHUNK_TILES) * (BLOCK_S * SLICE_BYTES // 2)
            next_scale = tl.load(next_ptr + offs_scale)  # early; behind the last tile it is not used
            out = _score_tile(
                tile_ptr, q_low, q_high, zero, factor, scale, offs_n, slice_of, token_of, tile * (BLOCK_S * SLICE),
                sink_size, last_token, BLOCK_M, KEPT_M, HALF, BLOCK_W, BLOCK_S, SLICE, WARPS, USES_ASM,
            )  # fmt: skip
            slices = tile * BLOCK_S + offs_s
            offs_o = wide_row * stride_o_b + (head * GROUP + offs_k)[:, None] * stride_o_h + slices[None, :]
            tl.store(out_ptr + offs_o, out, mask=(offs_k < GROUP)[:, None] & (slices * SLICE < last_token)[None, :])
            scale = next_scale


@triton.jit(do_not_specialize=["num_rows", "num_slices", "row_blocks"])
def _scan_sketch_rows_kernel(
    q_ptr, table_ptr, out_ptr, num_rows, num_slices, row_blocks, sm_scale,
    stride_q_b, stride_q_h, stride_o_b, stride_o_h,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,       # query heads per KV head
    BLOCK_M: tl.constexpr,     # rows multiplied at a time, a row being one query head of one query
    HALF: tl.constexpr,        # half of head_dim
    BLOCK_W: tl.constexpr,     # HALF rounded up to a power of two
    SLICE: tl.constexpr,       # tokens of a slice
    SLICE_BYTES: tl.constexpr,
    CHUNK_TILES: tl.constexpr,  # tiles that one chunk holds
    BLOCK_S: tl.constexpr,     # slices of a tile
    WARPS: tl.constexpr,
    USES_ASM: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    # grid: (programs,); an equal share of the tiles of all blocks of rows of all KV heads
    tiles = tl.cdiv(num_slices, BLOCK_S)
    place, stop = share_of_program(tiles * row_blocks * NUM_KV_HEADS)
    offs_s = tl.arange(0, BLOCK_S)
    slice_of, token_of = _token_offsets(BLOCK_S, SLICE, WARPS)
    while place < stop:  # one run of tiles in one chunk, for one block of rows of one head
        block = place // tiles
        first = place % tiles
        chunk = first // CHUNK_TILES
        last = tl.minimum(tl.minimum(stop - block * tiles, tiles), (chunk + 1) * CHUNK_TILES)
        place = block * tiles + last
        head = block // row_blocks
        offs_m = (block % row_blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
        mask_m = offs_m < num_rows * GROUP
        queries = (offs_m // GROUP).to(tl.int64)
        heads = head * GROUP + offs_m % GROUP
        q_low, q_high, zero, factor = _quantise(
            q_ptr, queries * stride_q_b + heads * stride_q_h, mask_m, sm_scale, HALF, BLOCK_W
        )
        base = tl.multiple_of(tl.load(table_ptr + chunk).to(tl.pointer_type(tl.uint8)), 16)
        offs_n = slice_of * SLICE_BYTES + (head * SLICE + token_of) * HALF  # of a tile's tokens
        scales_ptr = (base + NUM_KV_HEADS * SLICE * HALF).to(tl.pointer_type(tl.float16))
        offs_scale = slice_of * (SLICE_BYTES // 2) + head * SLICE + token_of
        scale = tl.load(scales_ptr + (first % CHUNK_TILES) * (BLOCK_S * SLICE_BYTES // 2) + offs_scale)
        for tile in tl.range(first, last, num_stages=NUM_STAGES):
            tile_ptr = base + (tile % CHUNK_TILES) * (BLOCK_S * SLICE_BYTES)
            next_ptr = scales_ptr + ((tile + 1) % CHUNK_TILES) * (BLOCK_S * SLICE_BYTES // 2)
            next_scale = tl.load(next_ptr + offs_scale)  # early; behind the last tile it is not used
            out = _score_tile(
                tile_ptr, q_low, q_high, zero, factor, scale, offs_n, slice_of, token_of, tile * (BLOCK_S * SLICE),
                0, num_slices * SLICE, BLOCK_M, BLOCK_M, HALF, BLOCK_W, BLOCK_S, SLICE, WARPS, USES_ASM,
            )  # fmt: skip
            slices = tile * BLOCK_S + offs_s
            offs_o = queries[:, None] * stride_o_b + heads[:, None] * stride_o_h + slices[None, :]
            tl.store(out_ptr + offs_o, out, mask=mask_m[:, None] & (slices < num_slices)[None, :])
            scale = next_scale


class SketchSummary(KeySummary):
    """Per slice `[num_kv_heads][slice_size][head_dim / 2]` bytes of two numbers, then `[num_kv_heads][slice_size]` float16.

    Number d of a key's first half is in the low bits of byte d, number d of the second half in the high bits. The float16
    is the key's scale.
    """

    block_pool = "lse"

    def init(  # type: ignore[override]
        self, *, num_kv_heads: int, head_dim: int, slice_size: int, **sizes: Any
    ) -> None:
        if head_dim % 4:
            raise ValueError(f"sketch needs a head_dim that is a multiple of 4, got {head_dim}")
        self._set_sizes(num_kv_heads, head_dim, slice_size, num_kv_heads * slice_size * (head_dim // 2 + 2))
        half = head_dim // 2
        self._constants = dict(
            NUM_KV_HEADS=num_kv_heads, SLICE=slice_size, SLICE_BYTES=self.slice_bytes, HALF=half,
            BLOCK_W=max(32, triton.next_power_of_2(half)),
        )  # fmt: skip
        self._block_s = 8 if slice_size * self._constants["BLOCK_W"] <= 2048 else 4  # tiles of about 16 KiB

    def _tile(self, block_s: int, num_warps: int) -> dict[str, Any]:
        """Constants of a tile of at most `block_s` slices; 0: of the usual size, with a slice a warp."""
        block_s = min(block_s or self._block_s, self.chunk_slices)
        warps = min(num_warps or block_s, block_s)
        return dict(
            BLOCK_S=block_s, CHUNK_TILES=self.chunk_slices // block_s, WARPS=warps, num_warps=warps,
            USES_ASM=isinstance(_unpack, triton.JITFunction),  # the interpreter has no assembly
        )  # fmt: skip

    def scan(  # type: ignore[override]
        self, layer: int, inputs: DecodeInputs, summary_table: torch.Tensor, seq_lens: torch.Tensor, due: torch.Tensor,
        *, max_slices: int, sink_size: int, window_size: int, sm_scale: float, block_s: int = 0, num_warps: int = 0,
        num_stages: int = 4, programs: int = 4,
    ) -> torch.Tensor:  # fmt: skip
        """See TritonSummary.scan; block_s: slices scored at a time, programs: of a multiprocessor."""
        q = inputs.q
        batch, num_q_heads, _ = q.shape
        check_tensor("q", q, (batch, num_q_heads, self.head_dim), FLOATS, seq_lens.device)
        block_b = check_scan(summary_table, seq_lens, due, batch)
        group = num_q_heads // self.num_kv_heads
        block_m = max(16, triton.next_power_of_2(group))
        out = empty_scores(batch, num_q_heads, max_slices, q.device)
        _scan_sketch_kernel[(num_multiprocessors(q.device) * programs,)](
            q, summary_table, seq_lens, due, out, batch, window_size, sink_size, sm_scale, *q.stride()[:2],
            summary_table.stride(0), *out.stride()[:2], GROUP=group, BLOCK_M=block_m, KEPT_M=8 if group <= 8 else block_m,
            BLOCK_B=block_b, NUM_STAGES=num_stages, **self._constants, **self._tile(block_s, num_warps),
        )  # fmt: skip
        return out

    def scan_rows(  # type: ignore[override]
        self, layer: int, q: torch.Tensor, summary_row: torch.Tensor, *, num_slices: int, sm_scale: float, block_m: int = 32,
        block_s: int = 0, num_warps: int = 0, num_stages: int = 3, programs: int = 3,
    ) -> torch.Tensor:  # fmt: skip
        num_rows, num_q_heads, _ = q.shape
        check_tensor("q", q, (num_rows, num_q_heads, self.head_dim), FLOATS)
        check_tensor("summary_row", summary_row, (None,), (torch.int64,), q.device)
        out = empty_scores(num_rows, num_q_heads, num_slices, q.device)
        if num_slices == 0:
            return out
        group = num_q_heads // self.num_kv_heads
        _scan_sketch_rows_kernel[(num_multiprocessors(q.device) * programs,)](
            q, summary_row, out, num_rows, num_slices, triton.cdiv(num_rows * group, block_m), sm_scale, *q.stride()[:2],
            *out.stride()[:2], GROUP=group, BLOCK_M=block_m, NUM_STAGES=num_stages, **self._constants,
            **self._tile(block_s, num_warps),
        )  # fmt: skip
        return out

    def _summarise(
        self, page_table: torch.Tensor, summary_table: torch.Tensor, seq_lens: torch.Tensor | None, first: int, count: int,
        paged: PagedKV,
    ) -> None:  # fmt: skip
        check_update(page_table, summary_table, seq_lens, paged, self.slice_size)
        constants = kv_constants(paged, page_table.device)
        constants.pop("PRECISION")
        _update_sketch_kernel[(self.num_kv_heads, count)](
            page_table, summary_table, seq_lens, paged.scale, first, page_table.stride(0), summary_table.stride(0),
            IS_DECODE=seq_lens is not None, NUM_KV_HEADS=self.num_kv_heads, SLICE=self.slice_size,
            CHUNK_SLICES=self.chunk_slices, SLICE_BYTES=self.slice_bytes, HEAD_DIM=self.head_dim,
            BLOCK_W=triton.next_power_of_2(self.head_dim // 2), num_warps=4, **constants,
        )  # fmt: skip


register("sketch_summary", "triton", SketchSummary)
