"""`code` on a GPU: queries as int8 numbers, then every token's code against all of them on the tensor cores.

A program multiplies the codes of some consecutive slices with the numbers of all query heads and keeps the largest integer
a slice and head: the products of tokens never reach memory.

Reference: kernels/summaries/code_ref.py
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from qsa.kernels.checks import FLOATS, check_tensor
from qsa.kernels.kv_write_triton import CodeWrite, round_to_even, slices_per_chunk
from qsa.kernels.registry import Operator, register
from qsa.kernels.summaries.code import CodeCalibration


@triton.jit
def _quantise_queries_kernel(
    q_ptr, query_ptr, numbers_ptr, scales_ptr,
    stride_q_b, stride_q_h,
    GROUP: tl.constexpr,       # query heads per KV head
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,     # HEAD_DIM rounded up to a power of two
    CODE_DIM: tl.constexpr,
    BLOCK_C: tl.constexpr,     # CODE_DIM rounded up to a power of two
):  # fmt: skip
    # grid: (num_q_heads, batch)
    head = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    offs_c = tl.arange(0, BLOCK_C)
    mask_d = offs_d < HEAD_DIM
    mask_c = offs_c < CODE_DIM
    q = tl.load(q_ptr + batch * stride_q_b + head * stride_q_h + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    offs_w = ((head // GROUP) * HEAD_DIM + offs_d)[:, None] * CODE_DIM + offs_c[None, :]
    weight = tl.load(query_ptr + offs_w, mask=mask_d[:, None] & mask_c[None, :], other=0.0)
    direction = tl.sum(q[:, None] * weight, 0)  # [BLOCK_C]
    scale = tl.max(tl.abs(direction), 0) / 127.0
    numbers = round_to_even(direction / tl.where(scale > 0, scale, 1.0)).to(tl.int8)
    row = batch * tl.num_programs(0) + head
    tl.store(numbers_ptr + row * CODE_DIM + offs_c, numbers, mask=mask_c)
    tl.store(scales_ptr + row, scale)


@triton.jit
def _scan_codes_kernel(
    numbers_ptr, scales_ptr, table_ptr, seq_lens_ptr, out_ptr,
    window_size, sink_size, sm_scale,
    stride_t_b, stride_o_b, stride_o_h,
    NUM_HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,     # NUM_HEADS rounded up to a power of two
    CODE_DIM: tl.constexpr,
    BLOCK_C: tl.constexpr,     # CODE_DIM rounded up to what a product needs
    SLICE: tl.constexpr,       # tokens of a slice
    CHUNK_SLICES: tl.constexpr,  # slices whose codes one chunk holds
    BLOCK_S: tl.constexpr,     # slices scored at a time, within one chunk
    TILES: tl.constexpr,       # times BLOCK_S slices a program
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    # grid: (cdiv(max_slices, BLOCK_S * TILES), batch)
    batch = tl.program_id(1).to(tl.int64)
    last = tl.maximum(tl.load(seq_lens_ptr + batch).to(tl.int32) - window_size, 0)
    num_slices = tl.cdiv(last, SLICE)
    first_tile = tl.program_id(0) * TILES
    last_tile = tl.minimum(first_tile + TILES, tl.cdiv(num_slices, BLOCK_S))
    if first_tile < last_tile:
        offs_h = tl.arange(0, BLOCK_H)
        offs_c = tl.arange(0, BLOCK_C)
        offs_t = tl.arange(0, BLOCK_S * SLICE)
        offs_s = tl.arange(0, BLOCK_S)
        mask_h = offs_h < NUM_HEADS
        mask_c = offs_c < CODE_DIM
        rows = batch * NUM_HEADS + offs_h
        offs_q = rows[None, :] * CODE_DIM + offs_c[:, None]
        numbers = tl.load(numbers_ptr + offs_q, mask=mask_h[None, :] & mask_c[:, None], other=0)  # [BLOCK_C, BLOCK_H]
        factor = tl.load(scales_ptr + rows, mask=mask_h, other=0.0) * sm_scale
        for tile in tl.range(first_tile, last_tile, num_stages=NUM_STAGES):
            first = tile * BLOCK_S
            address = tl.load(table_ptr + batch * stride_t_b + first // CHUNK_SLICES)
            base = tl.multiple_of(address.to(tl.pointer_type(tl.int8)), 16) + (first % CHUNK_SLICES) * SLICE * CODE_DIM
            offs = offs_t[:, None] * CODE_DIM + offs_c[None, :]
            if BLOCK_C == CODE_DIM:
                codes = tl.load(base + offs)
            else:
                codes = tl.load(base + offs, mask=mask_c[None, :], other=0)
            scores = tl.dot(codes, numbers, out_dtype=tl.int32)  # [BLOCK_S * SLICE, BLOCK_H]
            tokens = first * SLICE + offs_t
            is_counted = (tokens >= sink_size) & (tokens < last)
            scores = tl.where(is_counted[:, None], scores, -2147483648)
            best = tl.max(tl.reshape(scores, [BLOCK_S, SLICE, BLOCK_H]), 1)
            slices = first + offs_s
            offs_o = batch * stride_o_b + offs_h[None, :] * stride_o_h + slices[:, None]
            tl.store(
                out_ptr + offs_o, best.to(tl.float32) * factor[None, :], mask=mask_h[None, :] & (slices < num_slices)[:, None]
            )


def quantise_queries(q: torch.Tensor, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries on the code's directions as whole numbers.

    Args:
        q:     [batch, num_q_heads, head_dim]
        query: float32 [num_kv_heads, head_dim, code_dim]

    Returns:
        int8 [batch, num_q_heads, code_dim] and float32 [batch, num_q_heads]: the query is about numbers * scale.
    """
    batch, num_q_heads, head_dim = q.shape
    num_kv_heads, _, code_dim = query.shape
    check_tensor("q", q, (batch, num_q_heads, head_dim), FLOATS)
    check_tensor("query", query, (num_kv_heads, head_dim, code_dim), (torch.float32,), q.device)
    if q.stride(2) != 1 or not query.is_contiguous():
        raise ValueError("query must be contiguous, q in its last axis")
    numbers = torch.empty(batch, num_q_heads, code_dim, dtype=torch.int8, device=q.device)
    scales = torch.empty(batch, num_q_heads, dtype=torch.float32, device=q.device)
    _quantise_queries_kernel[(num_q_heads, batch)](
        q, query, numbers, scales, *q.stride()[:2],
        GROUP=num_q_heads // num_kv_heads, HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim),
        CODE_DIM=code_dim, BLOCK_C=triton.next_power_of_2(code_dim), num_warps=4,
    )  # fmt: skip
    return numbers, scales


def scan_codes(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    summary_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_slices: int,
    slice_size: int,
    sink_size: int,
    window_size: int,
    sm_scale: float,
    block_s: int = 4,
    tiles: int = 4,
    num_warps: int = 4,
    num_stages: int = 3,
) -> torch.Tensor:
    """Score every slice that begins before the window, sink tokens left out.

    Args:
        numbers, scales: from quantise_queries
        summary_table:   int64 [batch, max_summary_chunks], addresses; entries of chunks without candidates are not read.
        seq_lens:        int32 or int64 [batch], the query's token included.
        max_slices:      columns of the result, at least the slices of the longest sequence.
        block_s, tiles:  slices scored at a time, and how many times by one program.

    Returns:
        float32 [batch, num_q_heads, max_slices], in nats up to a constant per row; only candidates' columns are written.
    """
    batch, num_q_heads, code_dim = numbers.shape
    check_tensor("numbers", numbers, (batch, num_q_heads, code_dim), (torch.int8,))
    check_tensor("scales", scales, (batch, num_q_heads), (torch.float32,), numbers.device)
    check_tensor("summary_table", summary_table, (batch, None), (torch.int64,), numbers.device)
    check_tensor("seq_lens", seq_lens, (batch,), (torch.int32, torch.int64), numbers.device)
    if not (numbers.is_contiguous() and scales.is_contiguous()) or summary_table.stride(1) != 1:
        raise ValueError("numbers and scales must be contiguous, summary_table in its last axis")
    chunk_slices = slices_per_chunk(slice_size * code_dim)
    out = torch.empty(batch, num_q_heads, max_slices, dtype=torch.float32, device=numbers.device)
    _scan_codes_kernel[(triton.cdiv(max_slices, block_s * tiles), batch)](
        numbers, scales, summary_table, seq_lens, out, window_size, sink_size, sm_scale,
        summary_table.stride(0), *out.stride()[:2],
        NUM_HEADS=num_q_heads, BLOCK_H=max(16, triton.next_power_of_2(num_q_heads)), CODE_DIM=code_dim,
        BLOCK_C=max(32, triton.next_power_of_2(code_dim)), SLICE=slice_size, CHUNK_SLICES=chunk_slices,
        BLOCK_S=min(block_s, chunk_slices), TILES=tiles, NUM_STAGES=num_stages, num_warps=num_warps,
    )  # fmt: skip
    return out


class CodeSummary(Operator):
    """Codes of some layers (numbered from 0) on a GPU. `forward` scans; `write` is what kv_write needs to keep them."""

    def init(  # type: ignore[override]
        self,
        *,
        num_kv_heads: int,
        head_dim: int,
        slice_size: int,
        calibration: CodeCalibration,
        device: Any = None,
        **sizes: Any,
    ) -> None:
        """Move the projections to the device."""
        self.slice_size, self.slice_bytes = slice_size, slice_size * calibration.code_dim
        self._project = calibration.project.to(device).contiguous()
        self._bias = -torch.bmm(calibration.mean.unsqueeze(1), calibration.project).squeeze(1).to(device)
        self._query = calibration.query.view(-1, num_kv_heads, head_dim, calibration.code_dim).to(device).contiguous()

    def write(self, layer: int, summary_table: torch.Tensor) -> CodeWrite:
        """Argument `code` of kv_write for a layer; summary_table int64 [batch, max_summary_chunks]."""
        return CodeWrite(self._project[layer], self._bias[layer], summary_table, self.slice_size)

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        summary_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        max_slices: int,
        sink_size: int,
        window_size: int,
        sm_scale: float,
    ) -> torch.Tensor:
        """Scores float32 [batch, num_q_heads, max_slices] of the slices before the window; see scan_codes."""
        numbers, scales = quantise_queries(q, self._query[layer])
        return scan_codes(
            numbers,
            scales,
            summary_table,
            seq_lens,
            max_slices=max_slices,
            slice_size=self.slice_size,
            sink_size=sink_size,
            window_size=window_size,
            sm_scale=sm_scale,
        )

    def free(self) -> None:
        self._project = self._bias = self._query = torch.empty(0)


register("code_summary", "triton", CodeSummary)
