"""Choose slices by their scores, coarse to fine: what a scan proposes, per list, on the device, in float32.

A query head's scores become shares by a softmax over the candidate slices; the heads that share a list add theirs.
With `slices_per_block` the first selection keeps `top_k_coarse` blocks by the same rule and the second chooses inside.

Reference: kernels/block_select_ref.py
"""

from __future__ import annotations

import torch

from qsa.kernels.registry import Operator, register
from qsa.kernels.topk import topk


def shares(scores: torch.Tensor, weights: torch.Tensor | None, per_layer: bool) -> torch.Tensor:
    """Scores [lists, num_kv_heads, rows, n] in nats -> share of each slice [lists, num_kv_heads or 1, n].

    weights: [lists, 1, rows, 1] factor of each row, or None.
    """
    share = torch.softmax(scores, -1)
    if weights is not None:
        share = share * weights
    return share.sum((1, 2)).unsqueeze(1) if per_layer else share.sum(2)


def block_select(
    slice_scores: torch.Tensor,
    num_selected: int,
    *,
    per_layer: bool = False,
    weights: torch.Tensor | None = None,
    candidates: torch.Tensor | None = None,
    block_scores: torch.Tensor | None = None,
    top_k_coarse: int = 0,
    slices_per_block: int = 1,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Select slices for every list.

    Args:
        slice_scores: float32 [lists, num_kv_heads, rows, num_slices], in nats; rows are the query heads (and queries)
            that share a list.
        num_selected: slices to select.
        per_layer:    one list for all KV heads instead of one each.
        weights:      float32 [lists, 1, rows, 1], 0 for rows that do not count.
        candidates:   bool [lists, 1, num_slices], slices that may be selected; None: all.
        block_scores: float32 [lists, num_kv_heads, rows, num_blocks]; when given, and when there are more blocks than
            `top_k_coarse`, only slices of the best `top_k_coarse` blocks are candidates.

    Returns:
        slice_indices int64 [lists, num_kv_heads or 1, num_selected], rising, padded with -1.
        edge float32 [lists, num_kv_heads or 1, 2], shares of the last kept and the first dropped slice; None if all were kept.
    """
    if slice_scores.dtype != torch.float32:
        raise ValueError(f"slice_scores must be float32, got {slice_scores.dtype}: half-precision scores choose wrongly")
    num_slices = slice_scores.shape[-1]
    if block_scores is not None and block_scores.shape[-1] > top_k_coarse:
        num_blocks = block_scores.shape[-1]
        blocks = topk(shares(block_scores, weights, per_layer), top_k_coarse)  # [lists, heads, top_k_coarse]
        kept = torch.zeros(*blocks.shape[:-1], num_blocks + 1, dtype=torch.bool, device=blocks.device)
        kept.scatter_(-1, blocks.masked_fill(blocks < 0, num_blocks), True)
        inside = kept[..., :-1].repeat_interleave(slices_per_block, -1)[..., :num_slices]
        candidates = inside if candidates is None else inside & candidates
    if candidates is not None:
        slice_scores = slice_scores.masked_fill(~candidates.unsqueeze(2), -torch.inf)
    share = shares(slice_scores, weights, per_layer)
    if candidates is not None:
        share = share.masked_fill(~candidates, -torch.inf)
    count = min(num_selected + 1, num_slices)
    values, indices = torch.topk(share, count, sorted=True)
    if count <= num_selected:
        return topk(share, num_selected), None
    edge = values[..., num_selected - 1 :]
    if candidates is not None:
        return topk(share, num_selected), edge
    return indices[..., :num_selected].sort(-1).values, edge


class BlockSelect(Operator):
    """block_select on the CPU."""

    forward = staticmethod(block_select)


register("block_select", "torch", BlockSelect)
