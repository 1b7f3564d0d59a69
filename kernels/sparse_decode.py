"""Attention of one query token over sink, window and the best slices of a proposed pool, chosen by exact keys.

K of the pool and of the near slices (slice 0 and those that the window touches) is gathered and scored once: the scores
choose the final slices and are the attention's own logits as well, so that choosing costs no second read of K. V is
gathered for the chosen slices alone. All sequences of a batch have the same shapes (padding is masked), so a row's result
does not depend on its company.

Reference: kernels/sparse_decode_ref.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qsa.kernels.float_scores import float_scores
from qsa.kernels.paged_rows import SliceRows
from qsa.kernels.registry import Operator, register


@dataclass(frozen=True)
class NearPlan:
    """What lies near the queries of a batch, the same for every layer.

    Attributes:
        slices:       int64 [batch, num_near], slice 0 and the window's slices; numbers past the end repeat the last.
        mask:         float32 [rows, slice_size], 0 or -inf: for each sequence one row a near slice, one of -inf (what a
                      padded place of the pool shows), then one a slice of the sequence.
        mask_offsets: int64 [batch, 1, 1], first row of each sequence.
        places:       int64 [num_near], 0, 1, ...: where the near slices stand, in front of a pool.
        heads:        int64 [batch, num_kv_heads, group, 1], first row of a head's logits, in slices.
    """

    slices: torch.Tensor
    mask: torch.Tensor
    mask_offsets: torch.Tensor
    places: torch.Tensor
    heads: torch.Tensor


def num_near_slices(window_size: int, slice_size: int) -> int:
    """Slices gathered beside the pool: the first, and as many as a window can touch."""
    return 2 + (window_size + slice_size - 2) // slice_size


def plan_near(
    seq_lens: list[int],
    *,
    window_size: int,
    sink_size: int,
    slice_size: int,
    pool_size: int,
    num_q_heads: int,
    num_kv_heads: int,
) -> NearPlan:
    """Plan a batch of sequences whose windows begin behind the sink."""
    num_near = num_near_slices(window_size, slice_size)
    slices, masks, offsets, rows = [], [], [], 0
    for seq_len in seq_lens:
        start = seq_len - window_size
        first, last = start // slice_size, (seq_len - 1) // slice_size
        slices.append([0, *(min(first + i, last) for i in range(num_near - 1))])
        mask = torch.zeros(num_near + 1 + first + 1, slice_size)
        mask[0, sink_size:] = -torch.inf
        window = mask[1:num_near].view(-1)
        window[: start - first * slice_size] = -torch.inf
        window[seq_len - first * slice_size :] = -torch.inf
        mask[num_near] = -torch.inf
        mask[num_near + 1, :sink_size] = -torch.inf
        mask[num_near + 1 + first, start - first * slice_size :] = -torch.inf
        masks.append(mask)
        offsets.append(rows)
        rows += len(mask)
    return NearPlan(
        torch.tensor(slices),
        torch.cat(masks) if len(masks) > 1 else masks[0],
        torch.tensor(offsets).view(-1, 1, 1),
        torch.arange(num_near),
        first_rows(len(seq_lens), num_q_heads, num_kv_heads, num_near + pool_size),
    )


def first_rows(batch: int, num_q_heads: int, num_kv_heads: int, num_slices: int) -> torch.Tensor:
    """NearPlan.heads for near slices and a pool of `num_slices` together."""
    heads = torch.arange(batch * num_q_heads) * num_slices
    return heads.view(batch, num_kv_heads, num_q_heads // num_kv_heads, 1)


def mask_rows(pool: torch.Tensor, num_near: int) -> torch.Tensor:
    """Rows of NearPlan.mask, relative to the sequence's first, of the slices of a pool (padded with -1)."""
    return pool + (num_near + 1)


def sparse_decode(
    q: torch.Tensor,
    rows: SliceRows,
    key_rows: torch.Tensor,
    masked: torch.Tensor,
    plan: NearPlan,
    top_k: int,
    sm_scale: float,
    has_padding: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Choose and attend.

    Args:
        q:           [batch, num_q_heads, head_dim]
        key_rows:    int64 [batch, num_kv_heads, num_near + pool_size], rows of K of the near slices, then of the pool's;
                     any written slice's where the pool is padded.
        masked:      int64 [batch, num_kv_heads or 1, num_near + pool_size], rows of plan.mask of the same slices.
        top_k:       slices to choose from the pool; when the pool holds no more, all of it is attended.
        has_padding: whether a pool may be padded, at its end.

    Returns:
        out [batch, num_q_heads, head_dim], and places int64 [batch, num_kv_heads or 1, top_k], which of the pool were
        chosen, rising; None when all were.
    """
    batch, num_q_heads, head_dim = q.shape
    num_kv_heads, num_slices = key_rows.shape[1:]
    lists, size, heads = batch * num_kv_heads, rows.slice_size, masked.shape[1]
    group = num_q_heads // num_kv_heads
    grouped = q.reshape(lists, group, head_dim)

    keys = rows.gather(key_rows).view(lists, num_slices * size, head_dim)
    scores = float_scores(grouped, keys).view(batch, num_kv_heads, group, -1)
    mask = plan.mask.index_select(0, masked.reshape(-1)).view(batch, heads, 1, -1)
    logits = torch.add(mask, scores, alpha=sm_scale)
    weights = torch.softmax(logits, -1)

    num_near = len(plan.places)
    places = None
    value_rows = key_rows
    if num_slices - num_near > top_k:
        # a head's say in the choice is the mass it has in the pool: one that looks at its window does not outvote the others
        share = weights.view(batch, num_kv_heads, group, num_slices, size)[..., num_near:, :].sum((2, 4))
        if heads < num_kv_heads:
            share = share.sum(1, keepdim=True)
        if has_padding:  # behind any real slice, also one whose share is 0
            share = share.masked_fill(masked[..., num_near:] == plan.mask_offsets + num_near, -1.0)
        places = share.topk(top_k, -1, sorted=False).indices.sort(-1).values  # [batch, heads, top_k]
        kept = torch.cat((plan.places.expand(batch, heads, -1), places + num_near), -1)
        value_rows = key_rows.gather(-1, kept.expand(batch, num_kv_heads, -1))
        kept_rows = (kept.unsqueeze(2) + plan.heads).view(-1)
        # from logits: what is left of a head that was outvoted may be 0 as a share of its whole mass
        weights = torch.softmax(logits.view(-1, size).index_select(0, kept_rows).view(lists, group, -1), -1)
    values = rows.gather(value_rows + rows.value_offset).view(lists, -1, head_dim)
    out = torch.bmm(weights.view(lists, group, -1).to(q.dtype), values)
    return out.view(batch, num_q_heads, head_dim), places


class SparseDecode(Operator):
    """sparse_decode on the CPU."""

    forward = staticmethod(sparse_decode)


register("sparse_decode", "torch", SparseDecode)
