"""Attention of one query token over sink, window and the best slices of a proposed pool, chosen by exact keys.

K of pool, sink and window is gathered and scored once: the scores choose the final slices and are the attention's own
logits as well, so that choosing costs no second read of K. V is gathered for the chosen slices alone.
All sequences of a batch have the same shapes (padding is masked), so a row's result does not depend on its company.

Reference: kernels/sparse_decode_ref.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from qsa.kernels.float_scores import float_scores
from qsa.kernels.paged_rows import SliceRows
from qsa.kernels.registry import Operator, register


@dataclass(frozen=True)
class SparseDecodePlan:
    """What is the same for every layer of a step.

    Attributes:
        sink_size, top_k: as configured.
        window_starts: int64 [batch, 1, 1, 1], first token of each sequence's window.
        near_mask:     bool [batch, 1, 1, near slices * slice_size], True for gathered tokens that are in neither sink
                       nor window. The near slices are slice 0 and the slices that the window touches.
        token_offsets: int64 [slice_size], 0, 1, ...
    """

    sink_size: int
    top_k: int
    window_starts: torch.Tensor
    near_mask: torch.Tensor
    token_offsets: torch.Tensor


def near_slices(window_size: int, slice_size: int) -> int:
    """Slices gathered beside the selected ones: the first, and as many as a window can touch."""
    return 2 + (window_size + slice_size - 2) // slice_size


def plan_near(
    seq_lens: torch.Tensor, *, window_size: int, sink_size: int, slice_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Window starts, near slice numbers and near mask of a batch whose windows begin after the sink.

    seq_lens: int64 [batch]. Returns window_starts [batch], slices [batch, n] (numbers past the end repeat the last), and
    mask [batch, n * slice_size], True for tokens that are not attended.
    """
    window_starts = seq_lens - window_size
    count = near_slices(window_size, slice_size)
    slices = torch.cat(
        (torch.zeros_like(window_starts).unsqueeze(1), window_starts.unsqueeze(1) // slice_size + torch.arange(count - 1)), 1
    )
    positions = slices.unsqueeze(2) * slice_size + torch.arange(slice_size)  # [batch, n, slice_size]
    masked = (positions < window_starts.view(-1, 1, 1)) | (positions >= seq_lens.view(-1, 1, 1))
    masked[:, 0] = torch.arange(slice_size) >= sink_size
    last = (seq_lens - 1).unsqueeze(1) // slice_size
    return window_starts, torch.minimum(slices, last), masked.flatten(1)


def sparse_decode(
    q: torch.Tensor,
    rows: SliceRows,
    pool: torch.Tensor,
    pool_rows: torch.Tensor,
    near_rows: torch.Tensor,
    plan: SparseDecodePlan,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose and attend.

    Args:
        q:         [batch, num_q_heads, head_dim]
        pool:      int64 [batch, num_kv_heads or 1, pool_size], proposed slices, rising, padded with -1; at most `top_k` of
                   them: all are attended.
        pool_rows: int64 [batch, num_kv_heads, pool_size], their rows of K; any written slice's where pool is -1.
        near_rows: int64 [batch, num_kv_heads, near slices], rows of K of slice 0 and of the window's slices.

    Returns:
        out [batch, num_q_heads, head_dim], slice_indices int64 [batch, num_kv_heads or 1, top_k].
    """
    batch, num_q_heads, head_dim = q.shape
    num_kv_heads, pool_size = pool_rows.shape[1:]
    group = num_q_heads // num_kv_heads
    size = rows.slice_size
    lists = batch * num_kv_heads
    grouped = q.reshape(lists, group, head_dim)

    gathered = rows.gather(torch.cat((pool_rows, near_rows), 2))  # [batch, num_kv_heads, n * size, head_dim]
    logits = float_scores(grouped, gathered.view(lists, -1, head_dim)).mul_(sm_scale).view(batch, num_kv_heads, group, -1)
    far, near = logits.split((pool_size * size, logits.shape[3] - pool_size * size), 3)

    positions = pool.unsqueeze(-1) * size + plan.token_offsets  # [batch, heads, pool_size, size], negative where padded
    outside = (positions < plan.sink_size) | (positions >= plan.window_starts)
    far = far.masked_fill(outside.flatten(2).unsqueeze(2), -torch.inf)
    if pool_size > plan.top_k:
        share = torch.softmax(far, -1).view(batch, num_kv_heads, group, pool_size, size).sum((2, 4))
        if pool.shape[1] == 1 and num_kv_heads > 1:
            share = share.sum(1, keepdim=True)
        share = share.masked_fill(pool < 0, -1.0)  # behind any real slice
        places = share.topk(plan.top_k, -1, sorted=False).indices.sort(-1).values  # [batch, heads, top_k]
        slice_indices = pool.gather(-1, places)
        places = places.expand(batch, num_kv_heads, plan.top_k)
        rows_kept = pool_rows.gather(-1, places)
        index = places[:, :, None, :, None].expand(batch, num_kv_heads, group, plan.top_k, size)
        far = far.view(batch, num_kv_heads, group, pool_size, size).gather(3, index).flatten(3)
    else:
        slice_indices, rows_kept = pool, pool_rows

    near = near.masked_fill(plan.near_mask, -torch.inf)
    weights = torch.softmax(torch.cat((far, near), -1), -1).to(q.dtype)
    values = rows.gather(torch.cat((rows_kept, near_rows), 2) + rows.value_offset)
    out = torch.bmm(weights.view(lists, group, -1), values.view(lists, -1, head_dim))
    return out.view(batch, num_q_heads, head_dim), slice_indices


class SparseDecode(Operator):
    """sparse_decode on the CPU."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return sparse_decode(*args, **kwargs)


register("sparse_decode", "torch", SparseDecode)
