"""What `minmax` and `mean` share on a GPU: float32 vectors a slice and KV head, made from keys and multiplied with queries.

A slice's score is one product: of the query and the mean key, or of the query's negative and positive parts and the keys'
minimum and maximum. Products are exact to float32 (three of tf32 on the tensor cores).

Reference: kernels/summaries/vectors_ref.py
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from qsa.kernels.checks import FLOATS, check_tensor
from qsa.kernels.paged_kv import DecodeInputs, PagedKV, num_multiprocessors
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
    for block_s, warps, stages, programs in ((32, 4, 3, 2), (32, 4, 2, 4), (64, 4, 2, 2), (16, 4, 4, 4), (64, 8, 3, 1))
]


@triton.jit(do_not_specialize=["first_slice"])
def _update_vectors_kernel(
    page_table_ptr, summary_table_ptr, seq_lens_ptr, scale_ptr, first_slice, stride_pt, stride_st,
    IS_DECODE: tl.constexpr,
    NUM_VECTORS: tl.constexpr,  # 1: the mean; 2: minimum and maximum
    NUM_KV_HEADS: tl.constexpr,
    SLICE: tl.constexpr,       # tokens of a slice
    CHUNK_SLICES: tl.constexpr,  # slices whose vectors one chunk holds
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,     # HEAD_DIM rounded up to a power of two
    PAGE_SIZE: tl.constexpr, STORED: tl.constexpr, TYPE: tl.constexpr, E4M3: tl.constexpr, HAS_SCALE: tl.constexpr,
):  # fmt: skip
    # grid: (num_kv_heads, slices, or rows of a batch)
    head = tl.program_id(0)
    row, index, is_complete = complete_slice(seq_lens_ptr, first_slice, SLICE, IS_DECODE)
    if is_complete:
        token = index * SLICE
        page = row_pointer(tl.load(page_table_ptr + row * stride_pt + token // PAGE_SIZE), STORED)
        offs_d = tl.arange(0, BLOCK_D)
        offs_t = head.to(tl.int64) * (2 * PAGE_SIZE) + token % PAGE_SIZE + tl.arange(0, SLICE)
        keys = load_rows(page, offs_t, tl.full([SLICE], True, tl.int1), offs_d, TYPE, E4M3, HEAD_DIM, BLOCK_D)
        keys = keys.to(tl.float32) * load_scale(scale_ptr, head, 0, HAS_SCALE, E4M3)  # [SLICE, BLOCK_D]
        chunk = tl.load(summary_table_ptr + row * stride_st + index // CHUNK_SLICES).to(tl.pointer_type(tl.float32))
        offs = ((index % CHUNK_SLICES) * NUM_KV_HEADS + head) * (NUM_VECTORS * HEAD_DIM) + offs_d
        mask_d = offs_d < HEAD_DIM
        if NUM_VECTORS == 1:
            tl.store(chunk + offs, tl.sum(keys, 0) / SLICE, mask=mask_d)
        else:
            tl.store(chunk + offs, tl.min(keys, 0), mask=mask_d)
            tl.store(chunk + offs + HEAD_DIM, tl.max(keys, 0), mask=mask_d)


@triton.jit
def _load_queries(
    q_ptr, rows, mask_m, offs_w, factor,
    NUM_VECTORS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rows of queries times `factor`, laid out like a slice's vectors: [len(rows), len(offs_w)]."""
    offs_d = offs_w % BLOCK_D
    mask = mask_m[:, None] & (offs_d < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + rows[:, None] + offs_d[None, :], mask=mask, other=0.0).to(tl.float32) * factor
    if NUM_VECTORS == 2:
        q = tl.where((offs_w < BLOCK_D)[None, :], tl.minimum(q, 0.0), tl.maximum(q, 0.0))
    return q


@triton.jit
def _scan_vectors_kernel(
    q_ptr, table_ptr, seq_lens_ptr, due_ptr, out_ptr, batch, window_size, sm_scale,
    stride_q_b, stride_q_h, stride_t_b, stride_o_b, stride_o_h,
    NUM_VECTORS: tl.constexpr,  # of a slice and KV head
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,       # query heads per KV head
    BLOCK_M: tl.constexpr,     # GROUP rounded up to what a product needs
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,     # HEAD_DIM rounded up to a power of two
    SLICE: tl.constexpr,       # tokens of a slice
    CHUNK_TILES: tl.constexpr,  # tiles whose vectors one chunk holds
    BLOCK_S: tl.constexpr,     # slices of a tile
    BLOCK_B: tl.constexpr,     # batch rounded up to a power of two
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    # grid: (programs,); an equal share of the tiles of all rows that are due, one KV head of a row after the other
    batch_rows, lasts, tiles = due_tiles(seq_lens_ptr, due_ptr, batch, window_size, SLICE, BLOCK_S, BLOCK_B)
    ends = tl.cumsum(tiles, 0) * NUM_KV_HEADS
    place, stop = share_of_program(tl.sum(tiles, 0) * NUM_KV_HEADS)
    offs_m = tl.arange(0, BLOCK_M)
    offs_s = tl.arange(0, BLOCK_S)
    offs_w = tl.arange(0, NUM_VECTORS * BLOCK_D)
    mask_m = offs_m < GROUP
    in_slice = offs_w // BLOCK_D * HEAD_DIM + offs_w % BLOCK_D
    while place < stop:  # one run of tiles in one chunk, for one head of one row
        row = tl.sum((ends <= place).to(tl.int32), 0)
        num_slices = tl.cdiv(value_at(lasts, batch_rows, row), SLICE)
        row_tiles = value_at(tiles, batch_rows, row)
        start = value_at(ends, batch_rows, row) - row_tiles * NUM_KV_HEADS
        head = (place - start) // row_tiles
        first = (place - start) % row_tiles
        chunk = first // CHUNK_TILES
        last = tl.minimum(tl.minimum(stop - start - head * row_tiles, row_tiles), (chunk + 1) * CHUNK_TILES)
        place = start + head * row_tiles + last
        wide_row = row.to(tl.int64)
        base = tl.multiple_of(tl.load(table_ptr + wide_row * stride_t_b + chunk).to(tl.pointer_type(tl.float32)), 16)
        heads = head * GROUP + offs_m
        rows = wide_row * stride_q_b + heads * stride_q_h
        q = _load_queries(q_ptr, rows, mask_m, offs_w, sm_scale, NUM_VECTORS, HEAD_DIM, BLOCK_D)
        for tile in tl.range(first, last, num_stages=NUM_STAGES):
            in_chunk = ((tile % CHUNK_TILES) * BLOCK_S + offs_s) * NUM_KV_HEADS + head
            offs = in_chunk[None, :] * (NUM_VECTORS * HEAD_DIM) + in_slice[:, None]
            slices = tile * BLOCK_S + offs_s
            mask_s = (slices < num_slices)[None, :]
            if BLOCK_D == HEAD_DIM:
                vectors = tl.load(base + offs, mask=mask_s, other=0.0)  # [NUM_VECTORS * BLOCK_D, BLOCK_S]
            else:
                vectors = tl.load(base + offs, mask=mask_s & (offs_w % BLOCK_D < HEAD_DIM)[:, None], other=0.0)
            scores = tl.dot(q, vectors, input_precision="tf32x3")
            offs_o = wide_row * stride_o_b + heads[:, None] * stride_o_h + slices[None, :]
            tl.store(out_ptr + offs_o, scores, mask=mask_m[:, None] & mask_s)


@triton.jit(do_not_specialize=["num_rows", "num_slices"])
def _scan_vector_rows_kernel(
    q_ptr, table_ptr, out_ptr, num_rows, num_slices, sm_scale, stride_q_b, stride_q_h, stride_o_b, stride_o_h,
    NUM_VECTORS: tl.constexpr,  # of a slice and KV head
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,       # query heads per KV head
    BLOCK_M: tl.constexpr,     # rows of a program, a row being one query head of one query
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,     # HEAD_DIM rounded up to a power of two
    CHUNK_SLICES: tl.constexpr,  # slices whose vectors one chunk holds
    BLOCK_S: tl.constexpr,     # slices of a program
    BLOCK_W: tl.constexpr,     # numbers of a vector multiplied at a time
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    # grid: (cdiv(num_rows * GROUP, BLOCK_M), cdiv(num_slices, BLOCK_S), num_kv_heads)
    head = tl.program_id(2)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    slices = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)
    mask_m = offs_m < num_rows * GROUP
    mask_s = slices < num_slices
    queries = (offs_m // GROUP).to(tl.int64)
    heads = head * GROUP + offs_m % GROUP
    address = tl.load(table_ptr + tl.program_id(1) * BLOCK_S // CHUNK_SLICES)
    base = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)
    in_chunk = ((slices % CHUNK_SLICES) * NUM_KV_HEADS + head) * (NUM_VECTORS * HEAD_DIM)
    scores = tl.zeros([BLOCK_M, BLOCK_S], tl.float32)
    for first in tl.range(0, NUM_VECTORS * BLOCK_D, BLOCK_W, num_stages=NUM_STAGES):
        offs_w = first + tl.arange(0, BLOCK_W)
        rows = queries * stride_q_b + heads * stride_q_h
        q = _load_queries(q_ptr, rows, mask_m, offs_w, sm_scale, NUM_VECTORS, HEAD_DIM, BLOCK_D)
        in_slice = offs_w // BLOCK_D * HEAD_DIM + offs_w % BLOCK_D
        mask = mask_s[None, :] & (offs_w % BLOCK_D < HEAD_DIM)[:, None]
        vectors = tl.load(base + in_chunk[None, :] + in_slice[:, None], mask=mask, other=0.0)
        scores = tl.dot(q, vectors, scores, input_precision="tf32x3")
    offs_o = queries[:, None] * stride_o_b + heads[:, None] * stride_o_h + slices[None, :]
    tl.store(out_ptr + offs_o, scores, mask=mask_m[:, None] & mask_s[None, :])


class VectorSummary(KeySummary):
    """Float32 [num_kv_heads, NUM_VECTORS, head_dim] a slice. A subclass says how many vectors, and what they are."""

    num_vectors = 1

    def init(  # type: ignore[override]
        self, *, num_kv_heads: int, head_dim: int, slice_size: int, **sizes: Any
    ) -> None:
        self._set_sizes(num_kv_heads, head_dim, slice_size, 4 * self.num_vectors * num_kv_heads * head_dim)
        self._constants = dict(
            NUM_VECTORS=self.num_vectors, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
            BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        )  # fmt: skip

    def scan(  # type: ignore[override]
        self, layer: int, inputs: DecodeInputs, summary_table: torch.Tensor, seq_lens: torch.Tensor, due: torch.Tensor,
        *, max_slices: int, sink_size: int, window_size: int, sm_scale: float, block_s: int = 32, num_warps: int = 4,
        num_stages: int = 3, programs: int = 2,
    ) -> torch.Tensor:  # fmt: skip
        """See TritonSummary.scan. A slice counts as a whole, whatever the sink; block_s: slices scored at a time."""
        q = inputs.q
        batch, num_q_heads, _ = q.shape
        check_tensor("q", q, (batch, num_q_heads, self.head_dim), FLOATS, seq_lens.device)
        block_b = check_scan(summary_table, seq_lens, due, batch)
        out = empty_scores(batch, num_q_heads, max_slices, q.device)
        group, block_s = num_q_heads // self.num_kv_heads, min(block_s, self.chunk_slices)
        _scan_vectors_kernel[(num_multiprocessors(q.device) * programs,)](
            q, summary_table, seq_lens, due, out, batch, window_size, sm_scale, *q.stride()[:2], summary_table.stride(0),
            *out.stride()[:2], GROUP=group, BLOCK_M=max(16, triton.next_power_of_2(group)), SLICE=self.slice_size,
            CHUNK_TILES=self.chunk_slices // block_s, BLOCK_S=block_s, BLOCK_B=block_b, NUM_STAGES=num_stages,
            num_warps=num_warps, **self._constants,
        )  # fmt: skip
        return out

    def scan_rows(  # type: ignore[override]
        self, layer: int, q: torch.Tensor, summary_row: torch.Tensor, *, num_slices: int, sm_scale: float, block_m: int = 64,
        block_s: int = 32, num_warps: int = 8, num_stages: int = 2,
    ) -> torch.Tensor:  # fmt: skip
        num_rows, num_q_heads, _ = q.shape
        check_tensor("q", q, (num_rows, num_q_heads, self.head_dim), FLOATS)
        check_tensor("summary_row", summary_row, (None,), (torch.int64,), q.device)
        out = empty_scores(num_rows, num_q_heads, num_slices, q.device)
        if num_slices == 0:
            return out
        group, block_s = num_q_heads // self.num_kv_heads, min(block_s, self.chunk_slices)
        grid = triton.cdiv(num_rows * group, block_m), triton.cdiv(num_slices, block_s), self.num_kv_heads
        _scan_vector_rows_kernel[grid](
            q, summary_row, out, num_rows, num_slices, sm_scale, *q.stride()[:2], *out.stride()[:2], GROUP=group,
            BLOCK_M=block_m, CHUNK_SLICES=self.chunk_slices, BLOCK_S=block_s, BLOCK_W=min(64, self._constants["BLOCK_D"]),
            NUM_STAGES=num_stages, num_warps=num_warps, **self._constants,
        )  # fmt: skip
        return out

    def _summarise(
        self, page_table: torch.Tensor, summary_table: torch.Tensor, seq_lens: torch.Tensor | None, first: int, count: int,
        paged: PagedKV,
    ) -> None:  # fmt: skip
        check_update(page_table, summary_table, seq_lens, paged, self.slice_size)
        constants = kv_constants(paged, page_table.device)
        constants.pop("PRECISION")
        _update_vectors_kernel[(self.num_kv_heads, count)](
            page_table, summary_table, seq_lens, paged.scale, first, page_table.stride(0), summary_table.stride(0),
            IS_DECODE=seq_lens is not None, SLICE=self.slice_size, CHUNK_SLICES=self.chunk_slices, num_warps=4,
            **self._constants, **constants,
        )  # fmt: skip
