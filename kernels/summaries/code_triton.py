"""`code` on a GPU: every token's code against the int8 numbers of a decode step's queries, on the tensor cores.

A program multiplies the codes of some consecutive slices with the numbers of all query heads and keeps the largest integer
a slice and head: the products of tokens never reach memory. Tokens are dealt to the columns of a product so that a warp
holds whole slices: the largest is found without shared memory.

Reference: kernels/summaries/code_ref.py
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from qsa.kernels.checks import check_tensor
from qsa.kernels.kv_write_triton import CodeWrite
from qsa.kernels.paged_kv import DecodeInputs, capability, num_multiprocessors
from qsa.kernels.registry import register
from qsa.kernels.summaries.base import slices_per_chunk
from qsa.kernels.summaries.code import CodeCalibration
from qsa.kernels.summaries.code_rows_triton import quantise_queries, scan_code_rows
from qsa.kernels.summaries.scan_triton import (
    CHUNK_BYTES,
    EARLIER_BYTES,
    HOPPER_BYTES,
    TritonSummary,
    check_scan,
    due_tiles,
    empty_scores,
    share_of_program,
    value_at,
)

TUNE_SCAN = [  # launch parameters of scan_codes worth trying, the default first
    dict(block_s=4, num_warps=4, num_stages=4, programs=4),
    dict(block_s=4, num_warps=4, num_stages=4, programs=3),
    dict(block_s=4, num_warps=4, num_stages=3, programs=4),
    dict(block_s=4, num_warps=4, num_stages=5, programs=3),
    dict(block_s=4, num_warps=4, num_stages=6, programs=2),
    dict(block_s=8, num_warps=8, num_stages=4, programs=2),
    dict(block_s=8, num_warps=8, num_stages=3, programs=2),
    dict(block_s=8, num_warps=4, num_stages=3, programs=2),
    dict(block_s=4, num_warps=2, num_stages=4, programs=3),
]
SCAN_BEFORE_HOPPER = dict(block_s=4, num_warps=4, num_stages=3, programs=2)


@triton.jit
def _scan_codes_kernel(
    numbers_ptr, scales_ptr, table_ptr, seq_lens_ptr, due_ptr, out_ptr,
    batch, window_size, sink_size, sm_scale,
    stride_t_b, stride_o_b, stride_o_h,
    NUM_HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,     # query heads of a program
    CODE_DIM: tl.constexpr,
    BLOCK_C: tl.constexpr,     # CODE_DIM rounded up to what a product needs
    SLICE: tl.constexpr,       # tokens of a slice
    CHUNK_TILES: tl.constexpr,  # tiles whose codes one chunk holds
    BLOCK_S: tl.constexpr,     # slices of a tile
    BLOCK_B: tl.constexpr,     # batch rounded up to a power of two
    WARPS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    # grid: (programs, cdiv(num_q_heads, BLOCK_H)); an equal share of the tiles of all rows that are due
    batch_rows, lasts, tiles = due_tiles(seq_lens_ptr, due_ptr, batch, window_size, SLICE, BLOCK_S, BLOCK_B)
    ends = tl.cumsum(tiles, 0)
    place, stop = share_of_program(tl.sum(tiles, 0))
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_c = tl.arange(0, BLOCK_C)
    offs_s = tl.arange(0, BLOCK_S)
    mask_h = offs_h < NUM_HEADS
    mask_c = offs_c < CODE_DIM
    # A product deals its columns to the warps in eights: column (part, eight, warp, one) is a token of slice (warp, part).
    offs_n = tl.arange(0, BLOCK_S * SLICE)
    PARTS: tl.constexpr = BLOCK_S // WARPS  # slices of a warp
    offs_t = ((offs_n // 8) % WARPS * PARTS + offs_n // (SLICE * WARPS)) * SLICE
    offs_t += offs_n // (8 * WARPS) % (SLICE // 8) * 8 + offs_n % 8  # [BLOCK_S * SLICE], tokens of the tile
    while place < stop:  # one run of tiles in one chunk of one row
        row = tl.sum((ends <= place).to(tl.int32), 0)
        last_token = value_at(lasts, batch_rows, row)
        start = value_at(ends - tiles, batch_rows, row)
        end = value_at(ends, batch_rows, row)
        first = place - start
        chunk = first // CHUNK_TILES
        last = tl.minimum(tl.minimum(stop, end) - start, (chunk + 1) * CHUNK_TILES)
        place = start + last
        wide_row = row.to(tl.int64)
        base = tl.multiple_of(tl.load(table_ptr + wide_row * stride_t_b + chunk).to(tl.pointer_type(tl.int8)), 16)
        heads = wide_row * NUM_HEADS + offs_h
        mask_q = mask_h[:, None] & mask_c[None, :]
        numbers = tl.load(numbers_ptr + heads[:, None] * CODE_DIM + offs_c[None, :], mask=mask_q, other=0)
        factor = tl.load(scales_ptr + heads, mask=mask_h, other=0.0) * sm_scale
        for tile in tl.range(first, last, num_stages=NUM_STAGES):
            codes_ptr = base + (tile % CHUNK_TILES) * (BLOCK_S * SLICE * CODE_DIM)
            offs = offs_t[None, :] * CODE_DIM + offs_c[:, None]
            if BLOCK_C == CODE_DIM:
                codes = tl.load(codes_ptr + offs)
            else:
                codes = tl.load(codes_ptr + offs, mask=mask_c[:, None], other=0)
            scores = tl.dot(numbers, codes, out_dtype=tl.int32)  # [BLOCK_H, BLOCK_S * SLICE]
            first_token = tile * (BLOCK_S * SLICE)
            if (first_token < sink_size) | (first_token + BLOCK_S * SLICE > last_token):
                tokens = first_token + offs_t
                scores = tl.where(((tokens >= sink_size) & (tokens < last_token))[None, :], scores, -2147483648)
            best = tl.max(tl.reshape(scores, [BLOCK_H, PARTS, SLICE // 8, WARPS, 8]), 2)
            best = tl.max(best, 3)  # [BLOCK_H, PARTS, WARPS]
            best = tl.reshape(tl.permute(best, [0, 2, 1]), [BLOCK_H, BLOCK_S])
            out = tl.where(best == -2147483648, float("-inf"), best.to(tl.float32) * factor[:, None])
            slices = tile * BLOCK_S + offs_s
            offs_o = wide_row * stride_o_b + offs_h[:, None] * stride_o_h + slices[None, :]
            tl.store(out_ptr + offs_o, out, mask=mask_h[:, None] & (slices * SLICE < last_token)[None, :])


def scan_codes(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    summary_table: torch.Tensor,
    seq_lens: torch.Tensor,
    due: torch.Tensor,
    *,
    max_slices: int,
    slice_size: int,
    sink_size: int,
    window_size: int,
    sm_scale: float,
    **launch: int,
) -> torch.Tensor:
    """Score every slice that begins before the window, sink tokens left out; see TritonSummary.scan.

    Args:
        numbers:  int8 [batch, num_q_heads, code_dim]
        scales:   float32 [batch, num_q_heads], a query is about numbers * scale.
        launch:   see TUNE_SCAN: slices scored at a time, programs of a multiprocessor.
    """
    batch, num_q_heads, code_dim = numbers.shape
    check_tensor("numbers", numbers, (batch, num_q_heads, code_dim), (torch.int8,), seq_lens.device)
    check_tensor("scales", scales, (batch, num_q_heads), (torch.float32,), seq_lens.device)
    block_b = check_scan(summary_table, seq_lens, due, batch)
    if not (numbers.is_contiguous() and scales.is_contiguous()):
        raise ValueError("numbers and scales must be contiguous")
    is_hopper = capability(numbers.device)[0] == 9
    launch = {**(TUNE_SCAN[0] if is_hopper else SCAN_BEFORE_HOPPER), **launch}
    chunk_slices = slices_per_chunk(CHUNK_BYTES, slice_size * code_dim)
    block_c = max(32, triton.next_power_of_2(code_dim))
    block_s, held = min(launch["block_s"], chunk_slices), (launch["num_stages"] - 1) * slice_size * block_c
    while block_s > 1 and block_s * held > (HOPPER_BYTES if is_hopper else EARLIER_BYTES):
        block_s //= 2
    num_warps = min(launch["num_warps"], block_s)
    block_h = min(64, max(16, triton.next_power_of_2(num_q_heads)))
    out = empty_scores(batch, num_q_heads, max_slices, numbers.device)
    grid = (num_multiprocessors(numbers.device) * launch["programs"], triton.cdiv(num_q_heads, block_h))
    _scan_codes_kernel[grid](
        numbers, scales, summary_table, seq_lens, due, out, batch, window_size, sink_size, sm_scale,
        summary_table.stride(0), *out.stride()[:2],
        NUM_HEADS=num_q_heads, BLOCK_H=block_h, CODE_DIM=code_dim, BLOCK_C=block_c, SLICE=slice_size,
        CHUNK_TILES=chunk_slices // block_s, BLOCK_S=block_s, BLOCK_B=block_b, WARPS=num_warps,
        NUM_STAGES=launch["num_stages"], num_warps=num_warps,
    )  # fmt: skip
    return out


class CodeSummary(TritonSummary):
    """Per token `code_dim` int8 numbers: [slice_size, code_dim] a slice. Codes are written with the keys: see code_write."""

    def init(  # type: ignore[override]
        self,
        *,
        num_kv_heads: int,
        head_dim: int,
        slice_size: int,
        calibration: CodeCalibration | None = None,
        device: Any = None,
        **sizes: Any,
    ) -> None:
        """Move the projections to the device."""
        if calibration is None:
            raise ValueError("sparse.summary is code, but no calibration was given: run `qsa calibrate` or use sketch")
        width = num_kv_heads * head_dim
        if calibration.project.shape[1] != width:
            raise ValueError(
                f"the calibration is for {calibration.project.shape[1]} key numbers a layer, but the model has"
                f" {num_kv_heads} KV heads of {head_dim}: run `qsa calibrate` for this model"
            )
        self._set_sizes(num_kv_heads, head_dim, slice_size, slice_size * calibration.code_dim)
        self.code_dim = calibration.code_dim
        self._project = calibration.project.to(device).contiguous()
        self._bias = -torch.bmm(calibration.mean.unsqueeze(1), calibration.project).squeeze(1).to(device)
        self._query = calibration.query.view(-1, num_kv_heads, head_dim, calibration.code_dim).to(device).contiguous()

    def code_write(self, layer: int, summary_table: torch.Tensor) -> CodeWrite:
        return CodeWrite(self._project[layer], self._bias[layer], summary_table, self.slice_size)

    def query(self, layer: int) -> torch.Tensor:
        return self._query[layer]

    def scan(
        self, layer: int, inputs: DecodeInputs, summary_table: torch.Tensor, seq_lens: torch.Tensor, due: torch.Tensor,
        *, max_slices: int, sink_size: int, window_size: int, sm_scale: float, **launch: Any,
    ) -> torch.Tensor:  # fmt: skip
        if inputs.numbers is None or inputs.scales is None:
            raise ValueError("scanning codes needs the queries' numbers and scales, got a step without them")
        return scan_codes(
            inputs.numbers, inputs.scales, summary_table, seq_lens, due, max_slices=max_slices, slice_size=self.slice_size,
            sink_size=sink_size, window_size=window_size, sm_scale=sm_scale, **launch,
        )  # fmt: skip

    def scan_rows(
        self, layer: int, q: torch.Tensor, summary_row: torch.Tensor, *, num_slices: int, sm_scale: float, **launch: Any
    ) -> torch.Tensor:
        numbers, scales = quantise_queries(q, self._query[layer])
        return scan_code_rows(
            numbers, scales, summary_row, num_slices=num_slices, slice_size=self.slice_size, sm_scale=sm_scale, **launch
        )

    def free(self) -> None:
        self._project = self._bias = self._query = torch.empty(0)


register("code_summary", "triton", CodeSummary)
