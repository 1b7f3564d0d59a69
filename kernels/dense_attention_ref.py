"""Reference of dense_attention: plain softmax attention over contiguous K and V, in the dtype it is given."""

from __future__ import annotations

import torch


def dense_attention_ref(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float, first: int) -> torch.Tensor:
    """Causal attention of the queries at positions `first` and on.

    Args:
        q:    [num_tokens, num_q_heads, head_dim]
        k, v: [num_kv_heads, seq_len, head_dim]

    Returns:
        [num_tokens, num_q_heads, head_dim]
    """
    num_tokens, num_q_heads, _ = q.shape
    group = num_q_heads // len(k)
    scores = torch.einsum("thd,hsd->hts", q, k.repeat_interleave(group, 0)) * sm_scale
    hidden = torch.arange(k.shape[1]) > (first + torch.arange(num_tokens)).unsqueeze(1)
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
    return torch.einsum("hts,hsd->thd", weights, v.repeat_interleave(group, 0))
