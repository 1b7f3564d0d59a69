"""Reference of `minmax` and `mean`: a slice's vectors, and its score, in the dtype it is given."""

from __future__ import annotations

import torch


def slice_vectors_ref(keys: torch.Tensor, num_vectors: int) -> torch.Tensor:
    """The mean of every slice's keys (1 vector), or their minimum and maximum (2).

    Args:
        keys: [num_kv_heads, num_slices, slice_size, head_dim]

    Returns:
        [num_slices, num_kv_heads, num_vectors, head_dim]
    """
    parts = [keys.mean(2)] if num_vectors == 1 else [keys.amin(2), keys.amax(2)]
    return torch.stack(parts, 2).transpose(0, 1)


def vector_scan_ref(q: torch.Tensor, vectors: torch.Tensor, sm_scale: float) -> torch.Tensor:
    """q.k of the mean key, or the largest q.k of any key between minimum and maximum.

    Args:
        q:       [num_q_heads, head_dim]
        vectors: [num_slices, num_kv_heads, num_vectors, head_dim]

    Returns:
        [num_q_heads, num_slices]
    """
    grouped = q.view(vectors.shape[1], -1, 1, 1, q.shape[1])  # [num_kv_heads, group, 1, 1, head_dim]
    products = grouped * vectors.transpose(0, 1).unsqueeze(1)  # [num_kv_heads, group, num_slices, num_vectors, head_dim]
    return products.amax(3).sum(3).flatten(0, 1) * sm_scale
