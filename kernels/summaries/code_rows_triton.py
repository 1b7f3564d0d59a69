"""`code` in prefill: many queries as int8 numbers, then every token's code against all of them on the tensor cores.

As in decode, the largest integer a slice and row is kept, and the products of tokens never reach memory. Here the arithmetic
decides: a tile is several products, so that the largest numbers of one are found while the next one is made.

Reference: kernels/summaries/code_ref.py
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qsa.kernels.checks import FLOATS, check_tensor
from qsa.kernels.kv_write_triton import round_to_even
from qsa.kernels.paged_kv import capability, num_multiprocessors
from qsa.kernels.summaries.base import slices_per_chunk
from qsa.kernels.summaries.scan_triton import CHUNK_BYTES, EARLIER_BYTES, HOPPER_BYTES, empty_scores, share_of_program

TUNE_ROWS = [  # of scan_code_rows on Hopper, the default first
    dict(block_m=256, block_s=2, parts=2, num_warps=8, num_stages=3, programs=1),
    dict(block_m=256, block_s=1, parts=4, num_warps=8, num_stages=3, programs=1),
    dict(block_m=128, block_s=2, parts=1, num_warps=4, num_stages=3, programs=3),
    dict(block_m=128, block_s=2, parts=2, num_warps=4, num_stages=3, programs=2),
    dict(block_m=256, block_s=4, parts=1, num_warps=16, num_stages=3, programs=1),
    dict(block_m=128, block_s=2, parts=4, num_warps=8, num_stages=3, programs=1),
    dict(block_m=128, block_s=1, parts=4, num_warps=4, num_stages=3, programs=2),
    dict(block_m=256, block_s=2, parts=1, num_warps=8, num_stages=4, programs=1),
    dict(block_m=64, block_s=4, parts=1, num_warps=4, num_stages=4, programs=3),
]
ROWS_BEFORE_HOPPER = dict(block_m=128, block_s=1, parts=2, num_warps=4, num_stages=3, programs=3)


@triton.jit
def _quantise_queries_kernel(
    q_ptr, query_ptr, numbers_ptr, scales_ptr, num_rows,
    stride_q_b, stride_q_h,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,       # query heads per KV head
    HEAD_DIM: tl.constexpr,
    CODE_DIM: tl.constexpr,
    BLOCK_C: tl.constexpr,     # CODE_DIM rounded up to what a product needs
    BLOCK_D: tl.constexpr,     # numbers of a head multiplied at a time
    BLOCK_R: tl.constexpr,     # rows of a program
):  # fmt: skip
    # grid: (num_q_heads, cdiv(num_rows, BLOCK_R))
    head = tl.program_id(0)
    rows = (tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    offs_c = tl.arange(0, BLOCK_C)
    mask_r = rows < num_rows
    mask_c = offs_c < CODE_DIM
    direction = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for first in tl.range(0, HEAD_DIM, BLOCK_D):
        offs_d = first + tl.arange(0, BLOCK_D)
        mask_d = offs_d < HEAD_DIM
        offs_q = rows[:, None] * stride_q_b + head * stride_q_h + offs_d[None, :]
        q = tl.load(q_ptr + offs_q, mask=mask_r[:, None] & mask_d[None, :], other=0.0).to(tl.float32)
        offs_w = ((head // GROUP) * HEAD_DIM + offs_d)[:, None] * CODE_DIM + offs_c[None, :]
        weight = tl.load(query_ptr + offs_w, mask=mask_d[:, None] & mask_c[None, :], other=0.0)
        direction = tl.dot(q, weight, direction, input_precision="tf32x3")
    scale = tl.max(tl.abs(direction), 1) / 127.0
    numbers = round_to_even(direction / tl.where(scale > 0, scale, 1.0)[:, None]).to(tl.int8)
    out = rows * NUM_HEADS + head
    tl.store(numbers_ptr + out[:, None] * CODE_DIM + offs_c[None, :], numbers, mask=mask_r[:, None] & mask_c[None, :])
    tl.store(scales_ptr + out, scale, mask=mask_r)


@triton.jit
def _best_of_slices(
    numbers, codes_ptr, offs, mask_c,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, SLICE: tl.constexpr, IS_PADDED: tl.constexpr,
):  # fmt: skip
    if IS_PADDED:
        codes = tl.load(codes_ptr + offs, mask=mask_c[:, None], other=0)
    else:
        codes = tl.load(codes_ptr + offs)
    scores = tl.dot(numbers, codes, out_dtype=tl.int32)
    return tl.max(tl.reshape(scores, [BLOCK_M, BLOCK_S, SLICE]), 2)


@triton.jit(do_not_specialize=["num_rows", "num_slices", "row_blocks"])
def _scan_code_rows_kernel(
    numbers_ptr, scales_ptr, table_ptr, out_ptr,
    num_rows, num_slices, row_blocks, sm_scale, stride_o,
    CODE_DIM: tl.constexpr,
    BLOCK_C: tl.constexpr,     # CODE_DIM rounded up to what a product needs
    SLICE: tl.constexpr,       # tokens of a slice
    CHUNK_TILES: tl.constexpr,  # tiles whose codes one chunk holds
    BLOCK_M: tl.constexpr,     # rows multiplied at a time
    BLOCK_S: tl.constexpr,     # slices of one product
    PARTS: tl.constexpr,       # products of a tile: 1, 2 or 4
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    # grid: (programs,); an equal share of the tiles of all blocks of rows
    tiles = tl.cdiv(num_slices, BLOCK_S * PARTS)
    place, stop = share_of_program(tiles * row_blocks)
    offs_m = tl.arange(0, BLOCK_M)
    offs_c = tl.arange(0, BLOCK_C)
    offs_s = tl.arange(0, BLOCK_S * PARTS)
    mask_c = offs_c < CODE_DIM
    offs = tl.arange(0, BLOCK_S * SLICE)[None, :] * CODE_DIM + offs_c[:, None]
    STEP: tl.constexpr = BLOCK_S * SLICE * CODE_DIM
    IS_PADDED: tl.constexpr = BLOCK_C != CODE_DIM
    while place < stop:  # one run of tiles in one chunk, for one block of rows
        block = place // tiles
        first = place % tiles
        chunk = first // CHUNK_TILES
        last = tl.minimum(tl.minimum(stop - block * tiles, tiles), (chunk + 1) * CHUNK_TILES)
        place = block * tiles + last
        rows = (block * BLOCK_M + offs_m).to(tl.int64)
        mask_m = rows < num_rows
        base = tl.multiple_of(tl.load(table_ptr + chunk).to(tl.pointer_type(tl.int8)), 16)
        factor = tl.load(scales_ptr + rows, mask=mask_m, other=0.0) * sm_scale
        mask_q = mask_m[:, None] & mask_c[None, :]
        numbers = tl.load(numbers_ptr + rows[:, None] * CODE_DIM + offs_c[None, :], mask=mask_q, other=0)
        for tile in tl.range(first, last, num_stages=NUM_STAGES):
            codes_ptr = base + (tile % CHUNK_TILES) * (PARTS * STEP)
            best = _best_of_slices(numbers, codes_ptr, offs, mask_c, BLOCK_M, BLOCK_S, SLICE, IS_PADDED)
            if PARTS >= 2:
                second = _best_of_slices(numbers, codes_ptr + STEP, offs, mask_c, BLOCK_M, BLOCK_S, SLICE, IS_PADDED)
                best = tl.permute(tl.join(best, second), [0, 2, 1])  # [BLOCK_M, 2, BLOCK_S]
            if PARTS == 4:
                third = _best_of_slices(numbers, codes_ptr + 2 * STEP, offs, mask_c, BLOCK_M, BLOCK_S, SLICE, IS_PADDED)
                fourth = _best_of_slices(numbers, codes_ptr + 3 * STEP, offs, mask_c, BLOCK_M, BLOCK_S, SLICE, IS_PADDED)
                best = tl.permute(tl.join(best, tl.permute(tl.join(third, fourth), [0, 2, 1])), [0, 3, 1, 2])
            best = tl.reshape(best, [BLOCK_M, PARTS * BLOCK_S])
            slices = tile * (PARTS * BLOCK_S) + offs_s
            offs_o = rows[:, None] * stride_o + slices[None, :]
            out = best.to(tl.float32) * factor[:, None]
            tl.store(out_ptr + offs_o, out, mask=mask_m[:, None] & (slices < num_slices)[None, :])


def quantise_queries(q: torch.Tensor, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries on the code's directions as whole numbers.

    Args:
        q:     [num_rows, num_q_heads, head_dim]
        query: float32 [num_kv_heads, head_dim, code_dim]

    Returns:
        int8 [num_rows, num_q_heads, code_dim] and float32 [num_rows, num_q_heads]: the query is about numbers * scale.
    """
    num_rows, num_q_heads, head_dim = q.shape
    num_kv_heads, _, code_dim = query.shape
    check_tensor("q", q, (num_rows, num_q_heads, head_dim), FLOATS)
    check_tensor("query", query, (num_kv_heads, head_dim, code_dim), (torch.float32,), q.device)
    if q.stride(2) != 1 or not query.is_contiguous():
        raise ValueError("query must be contiguous, q in its last axis")
    numbers = torch.empty(num_rows, num_q_heads, code_dim, dtype=torch.int8, device=q.device)
    scales = torch.empty(num_rows, num_q_heads, dtype=torch.float32, device=q.device)
    _quantise_queries_kernel[(num_q_heads, triton.cdiv(num_rows, 16))](
        q, query, numbers, scales, num_rows, *q.stride()[:2],
        NUM_HEADS=num_q_heads, GROUP=num_q_heads // num_kv_heads, HEAD_DIM=head_dim, CODE_DIM=code_dim,
        BLOCK_C=max(16, triton.next_power_of_2(code_dim)), BLOCK_D=32, BLOCK_R=16, num_warps=4,
    )  # fmt: skip
    return numbers, scales


def scan_code_rows(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    summary_row: torch.Tensor,
    *,
    num_slices: int,
    slice_size: int,
    sm_scale: float,
    **launch: int,
) -> torch.Tensor:
    """Score complete slices [0, num_slices) of one sequence; see TritonSummary.scan_rows.

    Args:
        numbers, scales: from quantise_queries
        launch:          see TUNE_ROWS: rows and slices of a product, products of a tile, programs of a multiprocessor.
    """
    num_rows, num_q_heads, code_dim = numbers.shape
    check_tensor("numbers", numbers, (num_rows, num_q_heads, code_dim), (torch.int8,))
    check_tensor("scales", scales, (num_rows, num_q_heads), (torch.float32,), numbers.device)
    check_tensor("summary_row", summary_row, (None,), (torch.int64,), numbers.device)
    if not (numbers.is_contiguous() and scales.is_contiguous() and summary_row.is_contiguous()):
        raise ValueError("numbers, scales and summary_row must be contiguous")
    out = empty_scores(num_rows, num_q_heads, num_slices, numbers.device)
    if num_slices == 0:
        return out
    is_hopper = capability(numbers.device)[0] == 9
    launch = {**(TUNE_ROWS[0] if is_hopper else ROWS_BEFORE_HOPPER), **launch}
    chunk_slices = slices_per_chunk(CHUNK_BYTES, slice_size * code_dim)
    block_c = max(32, triton.next_power_of_2(code_dim))
    parts, held = min(launch["parts"], chunk_slices), launch["num_stages"] * launch["block_s"] * slice_size * block_c
    while parts > 1 and parts * held > (HOPPER_BYTES if is_hopper else EARLIER_BYTES):
        parts //= 2
    block_s = min(launch["block_s"], chunk_slices // parts)
    row_blocks = triton.cdiv(num_rows * num_q_heads, launch["block_m"])
    _scan_code_rows_kernel[(num_multiprocessors(numbers.device) * launch["programs"],)](
        numbers, scales, summary_row, out, num_rows * num_q_heads, num_slices, row_blocks, sm_scale, out.stride(1),
        CODE_DIM=code_dim, BLOCK_C=block_c, SLICE=slice_size,
        CHUNK_TILES=chunk_slices // (block_s * parts), BLOCK_M=launch["block_m"], BLOCK_S=block_s, PARTS=parts,
        NUM_STAGES=launch["num_stages"], num_warps=launch["num_warps"],
    )  # fmt: skip
    return out
