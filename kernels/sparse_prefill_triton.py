"""Causal attention of tiles of queries on a GPU, each tile over its own list of slices, the first slice and its window.

One program attends a tile's queries of one head (or of a few heads of a group). It reads a list of addresses that
tile_addresses has made beforehand: slice 0, the listed slices and the window's, in rising order. All but the last of them
lie before the tile and need no mask; they go through a loop without one, the slices of the tile itself through a second.

The first loop reads K and V in one of two ways: from their addresses (any card, any tier), or as boxes of rows of the
pool through a tensor descriptor, which Hopper's copy unit fetches on its own (pages on the device only). Masked slices first,
or a loop turned by half a step so that products run beside exponentials, were measured on an H200: 8 % and 15 % slower.

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
from qsa.kernels.tile_addresses_triton import list_addresses

LOG2_E = 1.4426950408889634
TUNE = [  # parameters of sparse_prefill worth timing: through addresses, then through a tensor descriptor
    dict(use_tma=False, slices_per_step=2, num_warps=8, num_stages=3),
    dict(use_tma=False, slices_per_step=2, num_warps=8, num_stages=2),
    dict(use_tma=False, slices_per_step=1, num_warps=4, num_stages=2),
    dict(use_tma=True, slices_per_step=1, num_warps=4, num_stages=2),
    dict(use_tma=True, slices_per_step=1, num_warps=8, num_stages=3),
]


@triton.jit
def as_multiplied(stored, TYPE: tl.constexpr, E4M3: tl.constexpr):
    """K or V as they are multiplied; load_scale says what they lack."""
    if E4M3 == "cast":
        stored = stored.to(tl.float8e4nv, bitcast=True).to(TYPE)
    elif E4M3 == "bits":  # as in load_rows of split_triton
        stored = (((stored.to(tl.int16) << 8) >> 1) & -16385).to(TYPE, bitcast=True)
    return stored


@triton.jit
def _load_slices(
    rows, pool_base, address_0, address_1, offs_n, offs_d, row,
    STORED: tl.constexpr, TYPE: tl.constexpr, E4M3: tl.constexpr, TMA: tl.constexpr,
    SLICE: tl.constexpr, STEP: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """The numbers of whole slices, which begin `row` rows behind their addresses: [SLICE * STEP, BLOCK_D]."""
    if TMA:
        first = ((address_0 - pool_base) // (HEAD_DIM * STORED.primitive_bitwidth // 8)).to(tl.int32) + row
        stored = rows.load([first, 0])
    else:
        if STEP == 1:
            base = tl.multiple_of(address_0.to(tl.pointer_type(STORED)), 16)
        else:
            address = tl.where(offs_n < SLICE, address_0, address_1)[:, None]
            base = tl.multiple_of(address.to(tl.pointer_type(STORED)), [16, 16])
        offs = (row + offs_n % SLICE)[:, None] * HEAD_DIM + offs_d[None, :]
        stored = tl.load(base + offs, mask=(offs_d < HEAD_DIM)[None, :], other=0)
    return as_multiplied(stored, TYPE, E4M3)


@triton.jit(do_not_specialize=["first", "start", "end", "capacity"])
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
    STEP: tl.constexpr,        # slices a step of the first loop; 1 with TMA
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,     # HEAD_DIM rounded up to a power of two
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    # grid: (num_tiles * num_kv_heads * cdiv(GROUP, HEADS),), programs that read the same slices side by side
    PARTS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    BLOCK_M: tl.constexpr = TILE * HEADS
    BLOCK_N: tl.constexpr = SLICE * STEP
    program = tl.program_id(0)
    row = (program // PARTS).to(tl.int64)
    kv_head = program // PARTS % num_kv_heads
    tile_start = first + program // PARTS // num_kv_heads * TILE
    count = tl.load(counts_ptr + row)
    entries = addresses_ptr + row * capacity

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
    whole = count // STEP * STEP
    # Addresses are loaded a step ahead: a copy that waits for its address holds up everything behind it.
    pool_base = pool_ptr.to(tl.int64) if TMA else 0
    offs_n = tl.arange(0, BLOCK_N)
    k_0 = tl.load(entries)
    k_1 = tl.load(entries + STEP - 1)
    for entry in tl.range(0, whole, STEP, num_stages=NUM_STAGES):
        v_0 = k_0
        v_1 = k_1
        k = _load_slices(rows, pool_base, k_0, k_1, offs_n, offs_d, 0, STORED, TYPE, E4M3, TMA, SLICE, STEP, HEAD_DIM)
        k_0 = tl.load(entries + entry + STEP)
        k_1 = tl.load(entries + entry + 2 * STEP - 1)
        logits = tl.dot(q, k.T, input_precision=PRECISION)
        new_top = tl.maximum(top, tl.max(logits, 1) * qk_scale)
        weights = tl.exp2(logits * qk_scale - new_top[:, None])
        factor = tl.exp2(top - new_top)
        top = new_top
        total = total * factor + tl.sum(weights, 1)
        v = _load_slices(
            rows, pool_base, v_0, v_1, offs_n, offs_d, PAGE_SIZE, STORED, TYPE, E4M3, TMA, SLICE, STEP, HEAD_DIM
        )  # fmt: skip
        acc = tl.dot(weights.to(TYPE), v, acc * factor[:, None], input_precision=PRECISION)

    own_slice = tile_start // SLICE
    last_slice = (tl.minimum(tile_start + TILE, end) - 1) // SLICE
    offs_s = tl.arange(0, SLICE)
    offs_k = offs_s[:, None] * HEAD_DIM + offs_d[None, :]
    num_entries = count + last_slice - own_slice + 1
    for entry in tl.range(whole, num_entries, num_stages=min(NUM_STAGES, 2)):
        base = tl.multiple_of(tl.load(entries + entry).to(tl.pointer_type(STORED)), 16)
        tokens = (own_slice + entry - count) * SLICE + offs_s  # of what the first loop left over: some before the tile
        mask_k = (tokens < end)[:, None] & mask_d[None, :]
        k = as_multiplied(tl.load(base + offs_k, mask=mask_k, other=0), TYPE, E4M3)
        logits = tl.dot(q, k.T, input_precision=PRECISION)
        logits = tl.where(tokens[None, :] <= positions[:, None], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1) * qk_scale)
        weights = tl.exp2(logits * qk_scale - new_top[:, None])
        factor = tl.exp2(top - new_top)
        top = new_top
        total = total * factor + tl.sum(weights, 1)
        v = as_multiplied(tl.load(base + PAGE_SIZE * HEAD_DIM + offs_k, mask=mask_k, other=0), TYPE, E4M3)
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
    use_tma: bool = False,
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
        pool:       what all pages of the sequence lie in, when all are on the device; needed for use_tma.
        use_tma, heads, slices_per_step, num_warps, num_stages: how, not what; None: by the card. use_tma: a
                    descriptor of the pool, on Hopper. heads: query heads that a program attends, a power of two.

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
    rows = describe_pool(pool, kv.dtype, slice_size, head_dim) if use_tma and pool is not None else None
    group = num_q_heads // num_kv_heads
    if heads is None:  # two heads of tiles of 64, unless too many programs would be left with one
        heads = 2 if tile_size < 128 and (group % 2 == 0 or group >= 7) else 1
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    options = launch_options(tile_size * heads, slice_size, rows is not None, kv.dtype, capability(q.device))
    given = dict(slices_per_step=slices_per_step, num_warps=num_warps, num_stages=num_stages)
    options.update({name: value for name, value in given.items() if value is not None})
    if options["slices_per_step"] not in ((1, 2) if rows is None else (1,)):
        raise ValueError(f"a step reads 1 or 2 slices, by descriptor 1, got {options['slices_per_step']}")
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


def launch_options(num_rows: int, slice_size: int, is_tma: bool, dtype: torch.dtype, card: tuple[int, int]) -> dict[str, int]:
    """What is launched when the caller does not say: by the rows of a program, the type of K and V, the card."""
    if dtype == torch.float32:
        return dict(slices_per_step=1, num_warps=8, num_stages=1)
    if card < (9, 0):
        return dict(slices_per_step=1, num_warps=8, num_stages=2)
    if dtype == torch.float8_e4m3fn:  # converted K is written to shared memory, and a product with it is waited for
        return dict(slices_per_step=1, num_warps=8 if num_rows >= 128 else 4, num_stages=3)
    if num_rows < 128:
        return dict(slices_per_step=1, num_warps=4, num_stages=3)
    return dict(slices_per_step=1 if is_tma or slice_size > 64 else 2, num_warps=8, num_stages=3)


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
