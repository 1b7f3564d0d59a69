"""Reference of decode_prepare and prefill_prepare: heads after norm and RoPE, and what is kept of them, as plain functions."""

from __future__ import annotations

import torch

from qsa.kernels.pointwise_ref import rms_norm_ref, rotate_ref

E4M3_MAX = 448.0


def prepare_ref(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    num_kv_heads: int,
    head_dim: int,
    head_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Heads of some tokens, in the dtype of qkv.

    Args:
        qkv:       [num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim]
        cos, sin:  [num_tokens, head_dim], the rows of the plain tables that belong to the tokens
        head_norm: [num_q_heads + num_kv_heads, head_dim] or None

    Returns:
        q [num_tokens, num_q_heads, head_dim], k and v [num_tokens, num_kv_heads, head_dim].
    """
    heads = qkv.unflatten(1, (-1, head_dim))
    num_q_heads = heads.shape[1] - 2 * num_kv_heads
    turned, v = heads.split((num_q_heads + num_kv_heads, num_kv_heads), 1)
    if head_norm is not None:
        turned = rms_norm_ref(turned, head_norm, eps)
    q, k = rotate_ref(turned, cos.unsqueeze(1), sin.unsqueeze(1)).split((num_q_heads, num_kv_heads), 1)
    return q, k, v


def stored_ref(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None = None) -> torch.Tensor:
    """K or V [num_tokens, num_kv_heads, head_dim] as it is stored; scale [num_kv_heads]."""
    if scale is not None:
        x = x / scale.to(x.dtype).view(-1, 1)
    return (x.clamp(-E4M3_MAX, E4M3_MAX) if dtype == torch.float8_e4m3fn else x).to(dtype)


def query_directions_ref(q: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Queries on the code's directions, before they become whole numbers.

    Args:
        q:     [num_tokens, num_q_heads, head_dim]
        query: [num_kv_heads, head_dim, code_dim]

    Returns:
        [num_tokens, num_q_heads, code_dim]; numbers are the nearest whole ones after division by max|.| / 127.
    """
    return torch.einsum("thd,hdc->thc", q, query.repeat_interleave(q.shape[1] // len(query), 0))
