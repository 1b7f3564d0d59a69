"""Top-k as both selections use it: rising indices, padded with -1, entries of -inf never chosen.

Reference: kernels/topk_ref.py
"""

from __future__ import annotations

import torch

from qsa.kernels.registry import Operator, register

FAR = 1 << 62  # sorts behind every index


def topk(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest entries of the last axis that are above -inf; of equal scores any may win.

    Args:
        scores: [.., n]

    Returns:
        int64 [.., k], rising, padded with -1 at the end.
    """
    n = scores.shape[-1]
    values, indices = torch.topk(scores, min(k, n), sorted=False)
    indices = indices.masked_fill(values == -torch.inf, FAR).sort(-1).values
    indices = indices.masked_fill(indices == FAR, -1)
    if n < k:
        indices = torch.nn.functional.pad(indices, (0, k - n), value=-1)
    return indices


class TopK(Operator):
    """topk on the CPU."""

    forward = staticmethod(topk)


register("topk", "torch", TopK)
