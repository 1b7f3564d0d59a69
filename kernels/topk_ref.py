"""Reference of topk: the k largest finite entries of each row, as rising indices padded with -1."""

from __future__ import annotations

import torch


def topk_ref(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest entries of the last axis that are above -inf.

    Args:
        scores: [.., n]

    Returns:
        int64 [.., k], rising, padded with -1 at the end. Of equal scores the first index wins.
    """
    rows = scores.reshape(-1, scores.shape[-1])
    out = torch.full((len(rows), k), -1, dtype=torch.int64, device=scores.device)
    for row, values in enumerate(rows):
        order = sorted((i for i, value in enumerate(values.tolist()) if value > -float("inf")), key=lambda i: -values[i].item())
        chosen = sorted(order[:k])
        out[row, : len(chosen)] = torch.tensor(chosen, dtype=torch.int64)
    return out.view(*scores.shape[:-1], k)
