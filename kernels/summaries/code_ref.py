"""Reference of `code`: a token's numbers, and the scores of slices, in the dtype it is given."""

from __future__ import annotations

import torch


def token_codes_ref(keys: torch.Tensor, mean: torch.Tensor, project: torch.Tensor) -> torch.Tensor:
    """Codes before rounding, within -127 .. 127.

    Args:
        keys:    [num_tokens, num_kv_heads * head_dim], all KV heads end to end
        mean:    [num_kv_heads * head_dim]
        project: [num_kv_heads * head_dim, code_dim]

    Returns:
        [num_tokens, code_dim]; the code is the nearest whole number.
    """
    return ((keys - mean) @ project).clamp(-127, 127)


def code_scan_ref(
    numbers: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor, slice_size: int, first: int, last: int
) -> torch.Tensor:
    """A slice's score is its best token's, tokens outside [first, last) left out.

    Args:
        numbers: [num_q_heads, code_dim], whole numbers that stand for the queries
        scales:  [num_q_heads], what a product of numbers and codes is multiplied by
        codes:   [num_tokens, code_dim]

    Returns:
        [num_q_heads, cdiv(last, slice_size)]; -inf where no token of a slice counts.
    """
    scores = (numbers @ codes[:last].T) * scales.unsqueeze(1)
    scores[:, :first] = -torch.inf
    scores = torch.nn.functional.pad(scores, (0, -last % slice_size), value=-torch.inf)
    return scores.unflatten(1, (-1, slice_size)).amax(2)
