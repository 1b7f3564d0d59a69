"""Causal attention of tiles of queries, each tile over its own list of slices, the first slice and its window.

The queries of a tile share a list a KV head. A tile's window begins at a slice boundary, at least `window_size` tokens
before its first query (itself included), so a list holds whole slices before the window and needs no mask, except where
it is padded; slice 0 is always attended in whole. In bfloat16 both parts are scored together by plain products, in other
types by the fused operator and merged by their log-sum-exp.

Reference: kernels/sparse_prefill_ref.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qsa.kernels.dense_attention import attend, attend_heads, merge_attention
from qsa.kernels.paged_rows import SliceRows
from qsa.kernels.registry import Operator, register


@dataclass(frozen=True)
class TilePlan:
    """The tiles of a chunk that select, the same for every layer.

    Attributes:
        tile_size:     queries a tile.
        first:         position of the first tile's first query; may lie before `start` when a chunk cuts a tile.
        start, end:    positions of the real queries.
        window_slices: int64 [num_tiles], first slice of each tile's window; candidates are slices 1 .. that - 1.
        near_slices:   int64 [num_tiles, n], slice 0 and the window's slices, numbers past the end repeat the last.
        near_mask:     float [num_tiles, 1, tile_size, n * slice_size], -inf where a query must not look.
        sampled:       int64 [num_tiles, s], rows of q (0 = position `start`) that choose a tile's list.
        weights:       float32 [num_tiles, s], 0 where a sampled row is not a real query.
    """

    tile_size: int
    first: int
    start: int
    end: int
    window_slices: torch.Tensor
    near_slices: torch.Tensor
    near_mask: torch.Tensor
    sampled: torch.Tensor
    weights: torch.Tensor

    @property
    def num_tiles(self) -> int:
        return len(self.window_slices)


def tile_window_slice(tile_start: int, window_size: int, slice_size: int) -> int:
    """First slice of the window of the tile that begins at `tile_start`."""
    return max(0, tile_start + 1 - window_size) // slice_size


def first_sparse_tile(start: int, tile_size: int, window_size: int, slice_size: int, list_size: int) -> int:
    """Position of the first tile, at `start` or after, whose candidates do not all fit its list; earlier ones are dense.

    A tile that `start` cuts begins before it.
    """
    tile_start = start // tile_size * tile_size
    while tile_window_slice(tile_start, window_size, slice_size) - 1 <= list_size:
        tile_start += tile_size
    return tile_start


def plan_tiles(
    first: int,
    start: int,
    end: int,
    *,
    tile_size: int,
    window_size: int,
    slice_size: int,
    sample_every: int,
    dtype: torch.dtype,
) -> TilePlan:
    """Plan tiles from position `first` (a multiple of tile_size) for the queries [start, end)."""
    num_tiles = -(-(end - first) // tile_size)
    tile_starts = first + torch.arange(num_tiles) * tile_size
    window_slices = (tile_starts + 1 - window_size) // slice_size
    count = max(
        (tile_start + tile_size - 1) // slice_size - tile_window_slice(tile_start, window_size, slice_size) + 1
        for tile_start in tile_starts.tolist()
    )
    windows = window_slices.unsqueeze(1) + torch.arange(count)  # [num_tiles, count]
    slices = torch.cat((torch.zeros_like(windows[:, :1]), windows), 1)
    positions = (slices.unsqueeze(2) * slice_size + torch.arange(slice_size)).flatten(1)  # [num_tiles, n * slice_size]
    queries = tile_starts.unsqueeze(1) + torch.arange(tile_size)
    hidden = positions.unsqueeze(1) > queries.unsqueeze(2)
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf).unsqueeze(1)
    step = min(sample_every, tile_size)
    sampled = tile_starts.unsqueeze(1) + torch.arange(step - 1, tile_size, step)
    # the last real query of a tile is always asked: at a prompt's end it is the one that says the next token
    sampled[:, -1] = (tile_starts + tile_size).clamp(max=end) - 1
    real = (sampled >= start) & (sampled < end)
    rows = sampled.clamp(start, end - 1) - start
    near = slices.clamp(max=(end - 1) // slice_size)
    return TilePlan(tile_size, first, start, end, window_slices, near, mask, rows, real.float())


def sparse_prefill(
    q: torch.Tensor,
    rows: SliceRows,
    list_rows: torch.Tensor,
    near_rows: torch.Tensor,
    plan: TilePlan,
    sm_scale: float,
    is_padding: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the queries [plan.start, plan.end).

    Args:
        q:          [plan.end - plan.start, num_q_heads, head_dim]
        list_rows:  int64 [num_tiles, num_kv_heads, list_size], rows of K of each tile's slices, none of them slice 0;
                    any written slice's where a list is padded.
        near_rows:  int64 [num_tiles, num_kv_heads, n], rows of K of plan.near_slices.
        is_padding: bool [num_tiles, num_kv_heads or 1, list_size], where lists are padded; None: nowhere.

    Returns:
        [plan.end - plan.start, num_q_heads, head_dim]
    """
    num_tokens, num_q_heads, head_dim = q.shape
    num_tiles, num_kv_heads, _ = list_rows.shape
    group, tile = num_q_heads // num_kv_heads, plan.tile_size
    before = plan.start - plan.first
    after = num_tiles * tile - num_tokens - before
    if before or after:
        q = torch.nn.functional.pad(q, (0, 0, 0, 0, before, after))
    tiled = q.view(num_tiles, tile, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    tiled = tiled.reshape(num_tiles, num_kv_heads, group * tile, head_dim)
    mask = plan.near_mask.repeat(1, 1, group, 1)
    if is_padding is not None:
        far_mask = torch.zeros(is_padding.shape, dtype=mask.dtype).masked_fill_(is_padding, -torch.inf)
        far_mask = far_mask.repeat_interleave(rows.slice_size, -1).unsqueeze(2)
        heads = far_mask.shape[1]
        mask = torch.cat((far_mask.expand(-1, -1, mask.shape[2], -1), mask.expand(-1, heads, -1, -1)), -1)
    out = q.new_empty(num_tiles, num_kv_heads, group * tile, head_dim)
    for one in range(num_tiles):  # one at a time: a tile's K and V stay in the cache
        tile_rows = torch.cat((list_rows[one], near_rows[one]), 1)
        k, v = rows.gather(tile_rows), rows.gather(tile_rows + rows.value_offset)
        if q.dtype == torch.bfloat16:
            attend_heads(tiled[one], k, v, sm_scale, mask[one], out[one])
        elif is_padding is not None:
            out[one] = attend(tiled[one, None], k[None], v[None], sm_scale, mask=mask[one, None])[0][0]
        else:
            cut = list_rows.shape[2] * rows.slice_size
            far, far_lse = attend(tiled[one, None], k[None, :, :cut], v[None, :, :cut], sm_scale)
            near, near_lse = attend(tiled[one, None], k[None, :, cut:], v[None, :, cut:], sm_scale, mask=mask[one, None])
            out[one] = merge_attention((far, near), (far_lse, near_lse))[0]
    out = out.view(num_tiles, num_kv_heads, group, tile, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(num_tiles * tile, num_q_heads, head_dim)[before : before + num_tokens]


class SparsePrefill(Operator):
    """sparse_prefill on the CPU."""

    forward = staticmethod(sparse_prefill)


register("sparse_prefill", "torch", SparsePrefill)
