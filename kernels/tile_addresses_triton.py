"""Addresses of all that each prefill tile attends to, made for sparse_prefill by a small kernel.

Reference: kernels/sparse_prefill_ref.py, which builds the same sets token by token.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qsa.kernels.paged_kv import PagedKV

SPARE = 4  # addresses behind the last one that may be loaded, never used


@triton.jit(do_not_specialize=["first", "end", "list_size", "capacity"])  # chunks of any length take what is compiled
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
