"""q.k in float32 from half-precision inputs, on backends whose matmul rounds its result to the input's type.

A bfloat16 matmul sums in float32 but rounds the sum to 8 bits, an error of 0.06 at a score of 20: enough to choose a
wrong slice. A second matmul returns what the first one rounded away: r = q.k - round(q.k), and the sum of the two has
an error below 2^-16 of the score. Both read K in its own type, so this costs less than a float32 copy of K.
"""

from __future__ import annotations

import torch


def float_scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Scores in float32. q [batch, num_q, head_dim], k [batch, num_k, head_dim] -> [batch, num_q, num_k]."""
    k_t = k.transpose(1, 2)
    if q.dtype != torch.bfloat16:  # a float16 product is slow on a CPU, and beyond 65504 it is infinite
        return torch.bmm(q.float(), k_t.float())
    rounded = torch.bmm(q, k_t)
    return torch.baddbmm(rounded, q, k_t, beta=-1).float().add_(rounded)
