"""Reference of sparse_decode: builds the attended set of one query token by token, then attends in the given dtype."""

from __future__ import annotations

import torch


def far_tokens(index: int, slice_size: int, sink_size: int, window_start: int) -> list[int]:
    """Tokens of a slice that neither the sink nor the window holds already."""
    return [t for t in range(index * slice_size, (index + 1) * slice_size) if sink_size <= t < window_start]


def rerank_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    pool: list[int],
    top_k: int,
    sm_scale: float,
    slice_size: int,
    sink_size: int,
    window_start: int,
) -> list[int]:
    """The `top_k` slices of `pool` with the largest attention mass, by exact keys, for the heads that share a list.

    A head's mass is taken over pool, sink and window together, so that heads that look far have the larger say.

    Args:
        q: [heads, group, head_dim], the KV heads that share the list
        k: [heads, seq_len, head_dim]
    """
    scores = []
    for index in pool:
        tokens = far_tokens(index, slice_size, sink_size, window_start)
        logits = torch.einsum("hgd,htd->hgt", q, k[:, tokens]) * sm_scale
        scores.append(torch.logsumexp(logits, -1))
    near = [*range(min(sink_size, window_start)), *range(window_start, k.shape[1])]
    scores.append(torch.logsumexp(torch.einsum("hgd,htd->hgt", q, k[:, near]) * sm_scale, -1))
    share = torch.softmax(torch.stack(scores, -1), -1)[..., :-1].sum((0, 1))
    return sorted(pool[i] for i in share.argsort(descending=True)[:top_k].tolist())


def sparse_decode_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pool: torch.Tensor,
    *,
    top_k: int,
    slice_size: int,
    sink_size: int,
    window_size: int,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, list[list[int]]]:
    """Attention of one decode query over sink, window and the best slices of a pool.

    Args:
        q:    [num_q_heads, head_dim]
        k, v: [num_kv_heads, seq_len, head_dim], contiguous in token order
        pool: int64 [num_kv_heads or 1, pool_size], padded with -1

    Returns:
        out [num_q_heads, head_dim], slice_indices int64 [num_kv_heads or 1, top_k] padded with -1, and the attended
        tokens of every KV head in rising order.
    """
    num_kv_heads, seq_len, head_dim = k.shape
    grouped = q.view(num_kv_heads, -1, head_dim)
    window_start = max(0, seq_len - window_size)
    per_layer = len(pool) == 1 and num_kv_heads > 1
    out = torch.empty_like(grouped)
    selected = torch.full((len(pool), top_k), -1, dtype=torch.int64)
    attended: list[list[int]] = []
    for head in range(num_kv_heads):
        place = 0 if per_layer else head
        members = slice(None) if per_layer else slice(head, head + 1)
        proposed = [index for index in pool[place].tolist() if index >= 0]
        if len(proposed) > top_k:
            chosen = rerank_ref(grouped[members], k[members], proposed, top_k, sm_scale, slice_size, sink_size, window_start)
        else:
            chosen = sorted(proposed)
        selected[place, : len(chosen)] = torch.tensor(chosen, dtype=torch.int64)
        far = {t for index in chosen for t in far_tokens(index, slice_size, sink_size, window_start)}
        tokens = sorted(far | set(range(min(sink_size, seq_len))) | set(range(window_start, seq_len)))
        weights = torch.softmax(grouped[head] @ k[head, tokens].T * sm_scale, -1)
        out[head] = weights @ v[head, tokens]
        attended.append(tokens)
    return out.view(q.shape), selected, attended
