"""Parts that decode attention kernels share: where listed slices lie, a tile of an online softmax, the sum over splits.

Logits are in units of log 2, so that exponentials are exp2. A list is attended by several programs, its splits; the one that
arrives last adds up what all have found, always in the order of the splits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from qsa.kernels.checks import FLOATS, check_tensor
from qsa.kernels.paged_kv import PagedKV, capability

TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
LOG2_E = 1.4426950408889634
NUM_COUNTERS = 1 << 18
COMBINED_AT_ONCE = 128  # numbers of all splits that a thread of the last program holds
TABLE_AT_ONCE = 1024  # pages of a table that a program holds


def kv_type(dtype: torch.dtype) -> tl.dtype:
    """Triton's name of a type of K and V."""
    if dtype not in TYPES:
        raise ValueError(f"K and V must be one of {', '.join(map(str, TYPES))}, got {dtype}")
    return TYPES[dtype]


def launch_overlap(overlaps: bool | None, device: torch.device) -> dict[str, Any]:
    """Launch options, OVERLAPS among them, of kernels that may begin before the launch before them has ended.

    Such a kernel waits before it reads what a kernel has written and before it writes, and lets the next begin only then.
    None: on cards that can, from Hopper on.
    """
    if overlaps is None:
        overlaps = capability(device) >= (9, 0)
    return {"OVERLAPS": True, "launch_pdl": True} if overlaps else {"OVERLAPS": False}


def casts_e4m3(device: torch.device) -> bool:
    """Whether kernels for this device can convert float8_e4m3fn; Ampere's cannot."""
    return device.type != "cuda" or capability(device) >= (8, 9)


def kv_constants(kv: PagedKV, device: torch.device) -> dict[str, Any]:
    """Kernel constants that say how K and V are stored (STORED), converted (E4M3) and multiplied (TYPE, PRECISION)."""
    is_float8 = kv.dtype == torch.float8_e4m3fn
    return {
        "STORED": tl.uint8 if is_float8 else kv_type(kv.dtype),
        "TYPE": tl.float16 if is_float8 else kv_type(kv.dtype),
        "E4M3": ("cast" if casts_e4m3(device) else "bits") if is_float8 else "",
        "HAS_SCALE": kv.scale is not None,
        "PRECISION": "ieee" if kv.dtype == torch.float32 else "tf32",
        "PAGE_SIZE": kv.page_size,
    }


def product_type(kv: PagedKV) -> torch.dtype:
    """The type in which K and V are multiplied; numbers of float8_e4m3fn are numbers of float16."""
    return torch.float16 if kv.dtype == torch.float8_e4m3fn else kv.dtype


def table_block(page_table: torch.Tensor) -> int:
    """BLOCK_T of load_table."""
    block: int = triton.next_power_of_2(page_table.shape[1])
    return block if block <= TABLE_AT_ONCE else 0


def head_constants(num_q_heads: int, num_kv_heads: int, head_dim: int, num_splits: int, num_warps: int) -> dict[str, int]:
    """Kernel constants: GROUP query heads per KV head, sizes of tiles, and how the last program adds up the splits."""
    if num_q_heads % num_kv_heads:
        raise ValueError(f"num_q_heads ({num_q_heads}) must be a multiple of num_kv_heads ({num_kv_heads})")
    group = num_q_heads // num_kv_heads
    block_s, block_g = triton.next_power_of_2(num_splits), triton.next_power_of_2(group)
    block_d = max(16, triton.next_power_of_2(head_dim))
    return {
        "NUM_SPLITS": num_splits,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_M": max(16, block_g),  # what a product needs
        "BLOCK_D": block_d,
        "BLOCK_S": block_s,
        "BLOCK_G": block_g,
        "BLOCK_C": min(block_d, max(1, COMBINED_AT_ONCE * 32 * num_warps // (block_s * block_g))),
    }


def check_decode(
    q: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor, kv: PagedKV, num_kv_heads: int
) -> tuple[int, int, int]:
    """Check what all decode attention takes. Returns batch, num_q_heads and head_dim."""
    batch, num_q_heads, head_dim = q.shape
    check_tensor("q", q, (batch, num_q_heads, head_dim), FLOATS)
    check_tensor("page_table", page_table, (batch, None), (torch.int64,), q.device)
    check_tensor("seq_lens", seq_lens, (batch,), (torch.int32, torch.int64), q.device)
    if q.stride(2) != 1 or page_table.stride(1) != 1:
        raise ValueError("the last axis of q and page_table must be contiguous")
    if kv.scale is not None:
        check_tensor("kv.scale", kv.scale, (num_kv_heads, 2), (torch.float32,), q.device)
        if not kv.scale.is_contiguous():
            raise ValueError("kv.scale must be contiguous")
    return batch, num_q_heads, head_dim


def check_lists(
    slots: torch.Tensor, pools: torch.Tensor, kv: PagedKV, num_kv_heads: int, slice_size: int, sink_size: int, batch: int
) -> None:
    """Check the lists of slices that rows of a batch refer to by their slots."""
    check_tensor("slots", slots, (batch,), (torch.int32, torch.int64))
    check_tensor("pools", pools, (None, None, None), (torch.int32,), slots.device)
    if pools.shape[1] not in (1, num_kv_heads):
        raise ValueError(f"pools must have 1 or {num_kv_heads} lists a sequence, got {pools.shape[1]}")
    if pools.shape[2] < 1 or pools.stride(2) != 1:
        raise ValueError("pools must have a place a list, -1 where there is nothing to attend to, contiguous in the last axis")
    if kv.page_size % slice_size or slice_size < 16 or slice_size & (slice_size - 1):
        raise ValueError(
            f"slice_size must be a power of two from 16 on, of which page_size ({kv.page_size}) is a multiple, got {slice_size}"
        )
    if not 0 <= sink_size <= slice_size:
        raise ValueError(f"sink_size must be at most slice_size ({slice_size}), got {sink_size}")


class _Counters:
    """Counters in device memory that are 0 whenever no call uses them; calls take turns through all of them."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("call a decode operator once before capturing it in a CUDA graph")
        self._counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)
        if device.type == "cuda":  # the next call may be on another stream
            torch.cuda.current_stream(device).synchronize()
        self._next = 0

    def take(self, count: int) -> torch.Tensor:
        count = -(-count // 32) * 32  # a whole line of the cache: kernels are compiled for addresses that are as round
        if self._next + count > NUM_COUNTERS:
            self._next = 0
        self._next += count
        return self._counters[self._next - count : self._next]


_counters = cache(_Counters)


def split_workspace(rows: int, num_splits: int, group: int, head_dim: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """What finish_split writes: `parts`, `stats`, and `arrivals`, a counter a row that is 0 before and after a call.

    Every call has counters of its own, until all have had a turn: graphs may run at the same time on several streams.
    """
    parts = torch.empty(rows, num_splits, group, head_dim, dtype=torch.float32, device=device)
    stats = torch.empty(rows, num_splits, 2, group, dtype=torch.float32, device=device)
    return parts, stats, _counters(device).take(rows)


@triton.jit
def load_table(pages_ptr, max_pages, BLOCK_T: tl.constexpr):
    """What locate_slices takes of a sequence's pages: all their addresses, or a pointer to them if they are many (BLOCK_T 0).

    It takes less time to read them all while the list is still unknown than to read those of the list after it.
    """
    if BLOCK_T > 0:
        offs_t = tl.arange(0, BLOCK_T)
        table = tl.load(pages_ptr + offs_t, mask=offs_t < max_pages, other=0)
    else:
        table = pages_ptr
    return table


@triton.jit
def locate_slices(
    places, indices, num_listed, seq_len, table, kv_head, window_size, sink_size,
    STORED: tl.constexpr, PAGE_SIZE: tl.constexpr, SLICE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Where the slices at some places of a list lie, and which of their tokens are attended: no token at two places.

    places: first the listed slices, then the sink's, then those that the window touches. indices: of the listed slices.
    table: the sequence's, from load_table.

    Returns addresses of K of one head, and the attended tokens' first and end within the slice; 0, 0 if there are none.
    """
    window_start = tl.maximum(seq_len - window_size, 0)
    near = places - num_listed  # 0: the sink
    index = tl.where(near < 0, indices, tl.where(near == 0, 0, window_start // SLICE + near - 1))
    first = tl.where(near < 0, sink_size, tl.where(near == 0, 0, window_start))
    end = tl.where(near < 0, window_start, tl.where(near == 0, tl.minimum(sink_size, window_start), seq_len))
    is_there = (index >= 0) & (index < tl.cdiv(end, SLICE))
    start = tl.where(is_there, index, 0) * SLICE
    first = tl.maximum(first - start, 0)
    end = tl.minimum(end - start, SLICE)
    is_there &= first < end
    if BLOCK_T > 0:
        address = tl.gather(table, start // PAGE_SIZE, 0)
    else:
        address = tl.load(table + start // PAGE_SIZE, mask=is_there, other=0)
    row = kv_head.to(tl.int64) * (2 * PAGE_SIZE) + start % PAGE_SIZE
    address += row * (HEAD_DIM * (STORED.primitive_bitwidth // 8))
    return address, tl.where(is_there, first, 0), tl.where(is_there, end, 0)


@triton.jit
def entry(values, offs, i):
    """Entry i of a vector in registers."""
    return tl.sum(tl.where(offs == i, values, 0), 0)


@triton.jit
def row_pointer(address, STORED: tl.constexpr):
    """A pointer to a row of K or V, which begins at a multiple of 16 bytes."""
    return tl.multiple_of(address.to(tl.pointer_type(STORED)), 16)


@triton.jit
def load_rows(
    base, rows, mask_n, offs_d,
    TYPE: tl.constexpr, E4M3: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rows of K or V as they are multiplied, 0 where masked: [len(rows), BLOCK_D]. load_scale says what they lack."""
    offs = rows[:, None] * HEAD_DIM + offs_d[None, :]
    mask = mask_n[:, None]
    if BLOCK_D != HEAD_DIM:
        mask &= (offs_d < HEAD_DIM)[None, :]
    stored = tl.load(base + offs, mask=mask, other=0)
    if E4M3 == "cast":
        values = stored.to(tl.float8e4nv, bitcast=True).to(TYPE)
    elif E4M3 == "bits":  # sign, exponent and fraction at their places in a float16, which has 8 more below its exponent's 1
        bits = ((stored.to(tl.int16) << 8) >> 1) & -16385
        values = bits.to(TYPE, bitcast=True)
    else:
        values = stored
    return values


@triton.jit
def load_scale(scale_ptr, kv_head, IS_V: tl.constexpr, HAS_SCALE: tl.constexpr, E4M3: tl.constexpr):
    """What the numbers of load_rows are multiplied with to be K or V."""
    scale = tl.full([], 256.0 if E4M3 == "bits" else 1.0, tl.float32)
    if HAS_SCALE:
        scale *= tl.load(scale_ptr + kv_head * 2 + IS_V)
    return scale


@triton.jit
def attend_tile(q, k, v, mask_n, qk_scale, top, total, acc, TYPE: tl.constexpr, PRECISION: tl.constexpr):
    """Add tokens to an online softmax. k, v: [tokens, BLOCK_D], v 0 where mask_n is false."""
    logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * qk_scale
    logits = tl.where(mask_n[None, :], logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 1))
    weights = tl.exp2(logits - new_top[:, None])
    factor = tl.exp2(top - new_top)
    total = total * factor + tl.sum(weights, 1)
    acc = acc * factor[:, None] + tl.dot(weights.to(TYPE), v, input_precision=PRECISION)
    return new_top, total, acc


@triton.jit
def finish_split(
    acc, top, total, v_scale, row, split, parts_ptr, stats_ptr, arrivals_ptr, out_ptr,
    NUM_SPLITS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Store what a split has found: sums of V and of weights relative to 2^top; the last one of a row writes the result.

    row: batch * num_kv_heads + kv_head, of GROUP query heads.
    """
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    mask_m = offs_m < GROUP
    place = row * NUM_SPLITS + split
    offs_p = (place * GROUP + offs_m)[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(parts_ptr + offs_p, acc, mask=mask_m[:, None] & (offs_d < HEAD_DIM)[None, :])
    tl.store(stats_ptr + place * (2 * GROUP) + offs_m, top, mask=mask_m)
    tl.store(stats_ptr + place * (2 * GROUP) + GROUP + offs_m, total, mask=mask_m)
    tl.debug_barrier()  # all threads have stored before one of them counts
    arrived = tl.atomic_add(arrivals_ptr + row, 1, sem="acq_rel")
    if arrived == NUM_SPLITS - 1:
        offs_s = tl.arange(0, BLOCK_S)
        offs_g = tl.arange(0, BLOCK_G)
        offs_c = tl.arange(0, BLOCK_C)
        mask_g = offs_g < GROUP
        places = row * NUM_SPLITS + offs_s
        mask = (offs_s < NUM_SPLITS)[:, None] & mask_g[None, :]
        stats = stats_ptr + places[:, None] * (2 * GROUP) + offs_g[None, :]
        tops = tl.load(stats, mask=mask, other=-1.0e30, cache_modifier=".cg")  # [BLOCK_S, BLOCK_G]
        totals = tl.load(stats + GROUP, mask=mask, other=0.0, cache_modifier=".cg")
        offs_r = ((places[:, None] * GROUP + offs_g[None, :]) * HEAD_DIM)[:, :, None] + offs_c[None, None, :]
        mask_r = mask[:, :, None] & (offs_c < HEAD_DIM)[None, None, :]
        parts = tl.load(parts_ptr + offs_r, mask=mask_r, other=0.0, cache_modifier=".cg")  # [BLOCK_S, BLOCK_G, BLOCK_C]
        weights = tl.exp2(tops - tl.max(tops, 0)[None, :])
        sums = tl.sum(weights * totals, 0)
        weights *= (v_scale / tl.where(sums > 0, sums, 1.0))[None, :]
        for first in tl.static_range(0, HEAD_DIM, BLOCK_C):
            if first > 0:
                mask_r = mask[:, :, None] & (first + offs_c < HEAD_DIM)[None, None, :]
                parts = tl.load(parts_ptr + offs_r + first, mask=mask_r, other=0.0, cache_modifier=".cg")
            out = tl.sum(parts * weights[:, :, None], 0)
            offs_o = (row * GROUP + offs_g)[:, None] * HEAD_DIM + first + offs_c[None, :]
            mask_o = mask_g[:, None] & (first + offs_c < HEAD_DIM)[None, :]
            tl.store(out_ptr + offs_o, out.to(out_ptr.dtype.element_ty), mask=mask_o)
        tl.store(arrivals_ptr + row, 0)
