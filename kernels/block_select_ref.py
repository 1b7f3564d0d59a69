"""References of block_select and of its form for prefill tiles: one list at a time, in the dtype they are given."""

from __future__ import annotations

import torch


def block_select_ref(
    slice_scores: torch.Tensor,
    num_selected: int,
    *,
    per_layer: bool = False,
    candidates: torch.Tensor | None = None,
    block_scores: torch.Tensor | None = None,
    top_k_coarse: int = 0,
    slices_per_block: int = 1,
) -> torch.Tensor:
    """Selected slices of every list, rising, padded with -1. Arguments as for block_select, without weights."""
    lists, num_kv_heads, _, num_slices = slice_scores.shape
    heads = [list(range(num_kv_heads))] if per_layer else [[head] for head in range(num_kv_heads)]
    out = torch.full((lists, len(heads), num_selected), -1, dtype=torch.int64)
    for one in range(lists):
        for place, members in enumerate(heads):
            allowed = torch.ones(num_slices, dtype=torch.bool)
            if block_scores is not None and block_scores.shape[-1] > top_k_coarse:
                share = torch.softmax(block_scores[one, members], -1).sum((0, 1))
                best = share.argsort(descending=True)[:top_k_coarse].tolist()
                allowed = torch.tensor([index // slices_per_block in best for index in range(num_slices)])
            if candidates is not None:
                allowed &= candidates[one].expand(len(heads), -1)[place]
            indices = allowed.nonzero()[:, 0]
            share = torch.softmax(slice_scores[one, members][..., indices], -1).sum((0, 1))
            chosen = indices[share.argsort(descending=True)[:num_selected]].sort().values
            out[one, place, : len(chosen)] = chosen
    return out


def select_tiles_ref(
    scores: torch.Tensor,
    weights: torch.Tensor,
    window_slices: torch.Tensor,
    num_selected: int,
    *,
    num_kv_heads: int,
    per_layer: bool = False,
) -> torch.Tensor:
    """Selected slices of every prefill tile, rising, padded with -1.

    Args:
        scores:        [num_tiles, samples, num_q_heads, num_slices], in nats
        weights:       [num_tiles, samples], how much a sampled query counts
        window_slices: [num_tiles], candidates of a tile are slices 1 .. that - 1.

    Returns:
        int64 [num_tiles, num_kv_heads or 1, num_selected]
    """
    out = []
    for tile, end in enumerate(window_slices.tolist()):
        share = torch.softmax(scores[tile, :, :, 1:end], -1) * weights[tile, :, None, None]
        share = torch.where(weights[tile, :, None, None] > 0, share, 0.0).sum(0)
        share = share.view(1 if per_layer else num_kv_heads, -1, max(0, end - 1)).sum(1)
        best = share.argsort(dim=1, descending=True, stable=True)[:, :num_selected].sort(1).values + 1
        out.append(torch.nn.functional.pad(best, (0, num_selected - best.shape[1]), value=-1))
    return torch.stack(out)
