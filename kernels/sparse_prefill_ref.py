"""Reference of sparse_prefill: every query attends to a set of tokens built one by one, in the given dtype."""

from __future__ import annotations

import torch


def sparse_prefill_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lists: torch.Tensor,
    *,
    start: int,
    tile_size: int,
    window_size: int,
    slice_size: int,
    sm_scale: float,
) -> torch.Tensor:
    """Causal attention of the queries [start, start + num_tokens), tile by tile.

    Args:
        q:     [num_tokens, num_q_heads, head_dim]
        k, v:  [num_kv_heads, seq_len, head_dim]
        lists: int64 [num_tiles, num_kv_heads or 1, list_size], slices of each tile, padded with -1. Tile 0 is the one that
            holds `start`.

    Returns:
        [num_tokens, num_q_heads, head_dim]
    """
    num_tokens, num_q_heads, _ = q.shape
    num_kv_heads = len(k)
    out = torch.empty_like(q)
    for row in range(num_tokens):
        position = start + row
        tile = position // tile_size
        window_start = max(0, tile * tile_size + 1 - window_size) // slice_size * slice_size
        for head in range(num_kv_heads):
            tokens = set(range(window_start, position + 1)) | set(range(min(slice_size, position + 1)))
            chosen = lists[tile - start // tile_size, head if lists.shape[1] > 1 else 0]
            for index in chosen.tolist():
                if index >= 0:
                    tokens |= {t for t in range(index * slice_size, (index + 1) * slice_size) if t <= position}
            kept = sorted(tokens)
            heads = slice(head * (num_q_heads // num_kv_heads), (head + 1) * (num_q_heads // num_kv_heads))
            weights = torch.softmax(q[row, heads] @ k[head, kept].T * sm_scale, -1)
            out[row, heads] = weights @ v[head, kept]
    return out
