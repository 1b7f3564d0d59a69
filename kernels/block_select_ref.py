"""Reference of block_select: one list at a time, in the dtype it is given."""

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
