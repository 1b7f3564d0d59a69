"""Causal attention of tiles of queries on a GPU, each tile over its own list of slices, the first slice and its window.

One program attends a tile's queries of one head (or of a few heads of a group). What it reads is a list of addresses that
a small kernel has made beforehand: slice 0, the listed slices and the window's, in rising order. All but the last of them
lie before the tile and need no mask; they go through a loop without one, the slices of the tile itself through a second.

The first loop reads K and V in one of two ways: from their addresses (any card, any tier), or as boxes of rows of the
pool through a tensor descriptor, which Hopper's copy unit fetches on its own (pages on the device only).

Reference: kernels/sparse_prefill_ref.py
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from qsa.kernels.checks import FLOATS, check_tensor
from qsa.kernels.paged_kv import PagedKV, capability
from qsa.kernels.registry import Operator, register
from qsa.kernels.split_triton import kv_constants, load_scale

LOG2_E = 1.4426950408889634
SPARE = 4  # addresses behind the last one that may be loaded, never used
TUNE = [  # parameters of sparse_prefill worth timing: through addresses, then through a tensor descriptor
    dict(use_tma=use_tma, slices_per_step=step, num_warps=warps, num_stages=stages)
    for use_tma, options in (
        (False, ((1, 4, 2), (1, 8, 3), (2, 8, 2), (2, 8, 3))),
        (True, ((1, 4, 2), (1, 4, 3), (1, 8, 3), (1, 8, 4), (2, 8, 2), (2, 8, 3))),
    )
    for step, warps, stages in options
]


@triton.jit
def _list_addresses_kernel(
    page_table_ptr, lists_ptr, addresses_ptr, counts_ptr,
    first, end, list_size, capacity,
    stride_l_t, stride_l_h,
    TILE: tl.constexpr,
    SLICE: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROW_BYTES: tl.constexpr,   # of one token of K
    EVERYTHING: tl.constexpr,  # no lists: every slice before the window
    BLOCK: tl.constexpr,
):  # fmt: skip
    # grid: (num_tiles, num_kv_heads)
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tile.to(tl.int64) * tl.num_programs(1) + kv_head
    head_place = kv_head.to(tl.int64) * (2 * PAGE_SIZE)
    tile_start = first + tile * TILE
    window_slice = tl.maximum(tile_start + 1 - WINDOW, 0) // SLICE
    own_slice = tile_start // SLICE
    last_slice = (tl.minimum(tile_start + TILE, end) - 1) // SLICE
    offs = tl.arange(0, BLOCK)
    count = 0
    for begin in range(-1, list_size, BLOCK):  # place -1 stands for slice 0
        place = begin + offs
        if EVERYTHING:
            chosen = place + 1
        else:
            offs_l = tile.to(tl.int64) * stride_l_t + kv_head * stride_l_h + place
            chosen = tl.load(lists_ptr + offs_l, mask=(place >= 0) & (place < list_size), other=-1)
            chosen = tl.where(place == -1, 0, tl.where(chosen == 0, -1, chosen))
        kept = (chosen >= 0) & (chosen < window_slice) & (place < list_size)
        page = tl.load(page_table_ptr + chosen * SLICE // PAGE_SIZE, mask=kept, other=0)
        address = page + (head_place + chosen * SLICE % PAGE_SIZE) * ROW_BYTES
        rank = tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(addresses_ptr + row * capacity + count + rank, address, mask=kept)
        count += tl.sum(kept.to(tl.int32), 0)
    for begin in range(window_slice, last_slice + 1, BLOCK):
        near = begin + offs
        mask = near <= last_slice
        page = tl.load(page_table_ptr + near * SLICE // PAGE_SIZE, mask=mask, other=0)
        address = page + (head_place + near * SLICE % PAGE_SIZE) * ROW_BYTES
        tl.store(addresses_ptr + row * capacity + count + near - window_slice, address, mask=mask)
    tl.store(counts_ptr + row, count + own_slice - window_slice)


@triton.jit
def _numbers(stored, TYPE: tl.constexpr, E4M3: tl.constexpr):
    """K or V as they are multiplied; load_scale says what they lack."""
    if E4M3 == "cast":
        stored = stored.to(tl.float8e4nv, bitcast=True).to(TYPE)
    elif E4M3 == "bits":  # as in load_rows of split_triton
        stored = (((stored.to(tl.int16) << 8) >> 1) & -16385).to(TYPE, bitcast=True)
    return stored


@triton.jit
def _soften(logits, top, qk_scale):
    """The next maximum of an online softmax, the weights of these logits and the factor of what was summed before."""
    new_top = tl.maximum(top, tl.max(logits, 1) * qk_scale)
    weights = tl.exp2(logits * qk_scale - new_top[:, None])
    return new_top, weights, tl.exp2(top - new_top)


@triton.jit
def _sparse_prefill_kernel(
    q_ptr, rows, pool_ptr, addresses_ptr, counts_ptr, kv_scale_ptr, out_ptr,
    qk_scale, first, start, end, capacity, num_kv_heads,
    stride_q_t, stride_q_h, stride_o_t, stride_o_h,
    STORED: tl.constexpr,
    TYPE: tl.constexpr,        # of products
    E4M3: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,         # `rows` describes the pool as rows of HEAD_DIM numbers
    TILE: tl.constexpr,
    HEADS: tl.constexpr,       # query heads a program
    GROUP: tl.constexpr,       # query heads a KV head
    SLICE: tl.constexpr,
    STEP: tl.constexpr,        # slices a step of the first loop
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,     # HEAD_DIM rounded up to a power of two
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    # grid: (num_tiles * num_kv_heads * cdiv(GROUP, HEADS),), programs that read the same slices side by side
    PARTS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    BLOCK_M: tl.constexpr = TILE * HEADS
    BLOCK_N: tl.constexpr = SLICE * STEP
    ROW_BYTES: tl.constexpr = HEAD_DIM * STORED.primitive_bitwidth // 8
    program = tl.program_id(0)
    row = (program // PARTS).to(tl.int64)
    kv_head = program // PARTS % num_kv_heads
    tile_start = first + program // PARTS // num_kv_heads * TILE

    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < HEAD_DIM
    positions = tile_start + offs_m % TILE
    head = program % PARTS * HEADS + offs_m // TILE  # in the group
    mask_m = (positions >= start) & (positions < end) & (head < GROUP)
    token = (positions - start).to(tl.int64)
    head = kv_head * GROUP + head
    offs_q = (token * stride_q_t + head * stride_q_h)[:, None] + offs_d[None, :]
    q = tl.load(q_ptr + offs_q, mask=mask_m[:, None] & mask_d[None, :], other=0.0).to(TYPE)  # [BLOCK_M, BLOCK_D]
    qk_scale *= load_scale(kv_scale_ptr, kv_head, 0, HAS_SCALE, E4M3)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    count = tl.load(counts_ptr + row)
    entries = addresses_ptr + row * capacity
    whole = count // STEP * STEP
    own_slice = tile_start // SLICE
    last_slice = (tl.minimum(tile_start + TILE, end) - 1) // SLICE
    offs_s = tl.arange(0, SLICE)
    offs_k = offs_s[:, None] * HEAD_DIM + offs_d[None, :]
    num_entries = count + last_slice - own_slice + 1
    tl.assume(whole < num_entries)
    for entry in tl.range(whole, num_entries, num_stages=NUM_STAGES):
        base = tl.multiple_of(tl.load(entries + entry).to(tl.pointer_type(STORED)), 16)
        tokens = (own_slice + entry - count) * SLICE + offs_s  # of what the first loop left over: some before the tile
        mask_k = (tokens < end)[:, None] & mask_d[None, :]
        k = _numbers(tl.load(base + offs_k, mask=mask_k, other=0), TYPE, E4M3)
        logits = tl.dot(q, k.T, input_precision=PRECISION)
        logits = tl.where(tokens[None, :] <= positions[:, None], logits, float("-inf"))
        top, weights, factor = _soften(logits, top, qk_scale)
        total = total * factor + tl.sum(weights, 1)
        v = _numbers(tl.load(base + PAGE_SIZE * HEAD_DIM + offs_k, mask=mask_k, other=0), TYPE, E4M3)
        acc = tl.dot(weights.to(TYPE), v, acc * factor[:, None], input_precision=PRECISION)

    # the next step's addresses are loaded a step ahead: a copy that waits for its address holds up everything behind it
    next_0 = tl.load(entries)
    next_1 = tl.load(entries + STEP - 1)
    if TMA:
        pool_base = pool_ptr.to(tl.int64)
        for entry in tl.range(0, whole, STEP, num_stages=NUM_STAGES):
            row_0 = ((next_0 - pool_base) // ROW_BYTES).to(tl.int32)
            row_1 = ((next_1 - pool_base) // ROW_BYTES).to(tl.int32)
            next_0 = tl.load(entries + entry + STEP)
            next_1 = tl.load(entries + entry + 2 * STEP - 1)
            k = _numbers(rows.load([row_0, 0]), TYPE, E4M3)
            logits = tl.dot(q, k.T, input_precision=PRECISION)
            if STEP == 1:
                top, weights, factor = _soften(logits, top, qk_scale)
                total = total * factor + tl.sum(weights, 1)
                v = _numbers(rows.load([row_0 + PAGE_SIZE, 0]), TYPE, E4M3)
                acc = tl.dot(weights.to(TYPE), v, acc * factor[:, None], input_precision=PRECISION)
            else:
                k_1 = _numbers(rows.load([row_1, 0]), TYPE, E4M3)
                logits_1 = tl.dot(q, k_1.T, input_precision=PRECISION)
                new_top = tl.maximum(top, tl.max(tl.maximum(logits, logits_1), 1) * qk_scale)
                factor = tl.exp2(top - new_top)
                top = new_top
                weights = tl.exp2(logits * qk_scale - top[:, None])
                weights_1 = tl.exp2(logits_1 * qk_scale - top[:, None])
                total = total * factor + tl.sum(weights + weights_1, 1)
                v = _numbers(rows.load([row_0 + PAGE_SIZE, 0]), TYPE, E4M3)
                v_1 = _numbers(rows.load([row_1 + PAGE_SIZE, 0]), TYPE, E4M3)
                acc = tl.dot(weights.to(TYPE), v, acc * factor[:, None], input_precision=PRECISION)
                acc = tl.dot(weights_1.to(TYPE), v_1, acc, input_precision=PRECISION)
    else:
        offs_n = tl.arange(0, BLOCK_N)
        offs_k = (offs_n % SLICE)[:, None] * HEAD_DIM + offs_d[None, :]
        for entry in tl.range(0, whole, STEP, num_stages=NUM_STAGES):
            if STEP == 1:
                base = tl.multiple_of(next_0.to(tl.pointer_type(STORED)), 16)
            else:
                address = tl.where(offs_n < SLICE, next_0, next_1)[:, None]
                base = tl.multiple_of(address.to(tl.pointer_type(STORED)), [16, 16])
            next_0 = tl.load(entries + entry + STEP)
            next_1 = tl.load(entries + entry + 2 * STEP - 1)
            k = _numbers(tl.load(base + offs_k, mask=mask_d[None, :], other=0), TYPE, E4M3)  # [BLOCK_N, BLOCK_D]
            logits = tl.dot(q, k.T, input_precision=PRECISION)
            top, weights, factor = _soften(logits, top, qk_scale)
            total = total * factor + tl.sum(weights, 1)
            v = _numbers(tl.load(base + PAGE_SIZE * HEAD_DIM + offs_k, mask=mask_d[None, :], other=0), TYPE, E4M3)
            acc = tl.dot(weights.to(TYPE), v, acc * factor[:, None], input_precision=PRECISION)

    factor = load_scale(kv_scale_ptr, kv_head, 1, HAS_SCALE, E4M3) / total
    offs_o = (token * stride_o_t + head * stride_o_h)[:, None] + offs_d[None, :]
    tl.store(out_ptr + offs_o, (acc * factor[:, None]).to(out_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_d[None, :])


def sparse_prefill(
    q: torch.Tensor,
    page_table: torch.Tensor,
    lists: torch.Tensor | None,
    *,
    first: int,
    start: int,
    end: int,
    tile_size: int,
    num_kv_heads: int,
    slice_size: int,
    window_size: int,
    sm_scale: float,
    kv: PagedKV,
    pool: torch.Tensor | None = None,
    use_tma: bool | None = None,
    heads: int | None = None,
    slices_per_step: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
) -> torch.Tensor:
    """Attention of the queries at positions [start, end) of one sequence; K and V of these positions are in their pages.

    Args:
        q:          [end - start, num_q_heads, head_dim]
        page_table: int64 [max_pages], addresses of the sequence's pages in this layer.
        lists:      int32 [num_tiles, num_kv_heads or 1, list_size], slices of each tile, in any order and padded with -1 at
                    any place; slice 0 and the window's are attended in any case, and once. None: everything.
        first:      position of the first tile's first query, a multiple of tile_size, at most `start`.
        pool:       what all pages of the sequence lie in, when all are on the device: lets Hopper copy them by descriptor.
        use_tma, heads, slices_per_step, num_warps, num_stages: how, not what; None: by the card. `heads`
                    are the query heads that a program attends, a power of two.

    Returns:
        [end - start, num_q_heads, head_dim]
    """
    _, num_q_heads, head_dim = q.shape
    num_tiles = triton.cdiv(end - first, tile_size)
    check_tensor("q", q, (end - start, num_q_heads, head_dim), FLOATS)
    check_tensor("page_table", page_table, (None,), (torch.int64,), q.device)
    if lists is not None:
        check_tensor("lists", lists, (num_tiles, None, None), (torch.int32,), q.device)
        if lists.shape[1] not in (1, num_kv_heads):
            raise ValueError(f"lists must have one list a tile, or one a KV head ({num_kv_heads}), got {lists.shape[1]}")
    if num_q_heads % num_kv_heads:
        raise ValueError(f"num_q_heads ({num_q_heads}) must be a multiple of num_kv_heads ({num_kv_heads})")
    if not first <= start < end or first % tile_size:
        raise ValueError(
            f"first ({first}) must be a multiple of tile_size ({tile_size}) and at most start ({start}) < end ({end})"
        )
    if kv.page_size % slice_size:
        raise ValueError(f"a page ({kv.page_size} tokens) must be a whole number of slices ({slice_size} tokens)")
    page_table = page_table.contiguous()
    if q.stride(2) != 1:
        q = q.contiguous()
    addresses, counts = list_addresses(
        page_table, lists, first, end, num_kv_heads, head_dim, tile_size, slice_size, window_size, kv
    )
    if use_tma is None:
        use_tma = capability(q.device) >= (9, 0)
    rows = describe_pool(pool, kv.dtype, slice_size, head_dim) if use_tma and pool is not None else None
    group = num_q_heads // num_kv_heads
    if heads is None:
        heads = 1 if tile_size >= 128 or group % 2 else 2
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    options = launch_options(tile_size * heads, slice_size, kv.dtype, capability(q.device))
    given = dict(slices_per_step=slices_per_step, num_warps=num_warps, num_stages=num_stages)
    options.update({name: value for name, value in given.items() if value is not None})
    _sparse_prefill_kernel[(num_tiles * num_kv_heads * triton.cdiv(group, heads),)](
        q, rows, None if rows is None else rows.base, addresses, counts, kv.scale, out,
        sm_scale * LOG2_E, first, start, end, addresses.shape[2], num_kv_heads,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1),
        **kv_constants(kv, q.device), TMA=rows is not None,
        TILE=tile_size, HEADS=heads, GROUP=group, SLICE=slice_size, STEP=options["slices_per_step"],
        HEAD_DIM=head_dim, BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        NUM_STAGES=options["num_stages"],
        num_warps=options["num_warps"], num_stages=options["num_stages"],
    )  # fmt: skip
    return out


def launch_options(num_rows: int, slice_size: int, dtype: torch.dtype, card: tuple[int, int]) -> dict[str, int]:
    """What is launched when the caller does not say: by the rows of a program, the type of K and V, the card."""
    if dtype == torch.float32:
        return dict(slices_per_step=1, num_warps=8, num_stages=1)
    if num_rows < 128:
        return (
            dict(slices_per_step=1, num_warps=4, num_stages=3)
            if card >= (9, 0)
            else dict(slices_per_step=1, num_warps=8, num_stages=2)
        )
    if card >= (9, 0):
        return dict(slices_per_step=2 if slice_size <= 64 else 1, num_warps=8, num_stages=3)
    return dict(slices_per_step=1, num_warps=8, num_stages=2)


def list_addresses(
    page_table: torch.Tensor,
    lists: torch.Tensor | None,
    first: int,
    end: int,
    num_kv_heads: int,
    head_dim: int,
    tile_size: int,
    slice_size: int,
    window_size: int,
    kv: PagedKV,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Addresses of K of all that each tile attends to, in the order in which it does.

    Returns:
        int64 [num_tiles, num_kv_heads, n]: slice 0, the listed slices, the window; unwritten behind.
        int32 [num_tiles, num_kv_heads]: how many of them lie before the tile; those of the tile itself follow.
    """
    num_tiles = triton.cdiv(end - first, tile_size)
    last_window = max(0, first + (num_tiles - 1) * tile_size + 1 - window_size) // slice_size
    list_size = max(0, last_window - 1) if lists is None else lists.shape[2]
    near = triton.cdiv(window_size + tile_size, slice_size) + 1
    addresses = torch.empty(num_tiles, num_kv_heads, 1 + list_size + near + SPARE, dtype=torch.int64, device=page_table.device)
    counts = torch.empty(num_tiles, num_kv_heads, dtype=torch.int32, device=page_table.device)
    if lists is not None and lists.stride(2) != 1:
        lists = lists.contiguous()
    stride_h = 0 if lists is None or lists.shape[1] == 1 else lists.stride(1)
    _list_addresses_kernel[(num_tiles, num_kv_heads)](
        page_table, lists, addresses, counts, first, end, list_size, addresses.shape[2],
        0 if lists is None else lists.stride(0), stride_h,
        TILE=tile_size, SLICE=slice_size, WINDOW=window_size, PAGE_SIZE=kv.page_size,
        ROW_BYTES=head_dim * kv.dtype.itemsize, EVERYTHING=lists is None,
        BLOCK=min(1024, max(16, triton.next_power_of_2(list_size + 1))), num_warps=4,
    )  # fmt: skip
    return addresses, counts


def describe_pool(pool: torch.Tensor, dtype: torch.dtype, slice_size: int, head_dim: int) -> Any:
    """A descriptor of the pool as rows of one token's K or V, read a slice at a time; None where rows are no power of two."""
    if triton.next_power_of_2(head_dim) != head_dim:
        return None
    stored = torch.uint8 if dtype == torch.float8_e4m3fn else dtype
    rows = pool.view(-1).view(stored).view(-1, head_dim)
    return TensorDescriptor.from_tensor(rows, [slice_size, head_dim])


class SparsePrefill(Operator):
    """sparse_prefill on a GPU."""

    forward = staticmethod(sparse_prefill)


register("sparse_prefill", "triton", SparsePrefill)
