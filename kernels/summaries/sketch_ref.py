"""Reference of `sketch`: four bits a number of a key, and the scores of slices, in the dtype it is given."""

from __future__ import annotations

import torch


def sketch_keys_ref(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers -7 .. 7 and a float16 scale a key: the key is about numbers * scale.

    Args:
        keys: [.., head_dim]

    Returns:
        numbers, like keys, and scale float16 [..]
    """
    scale = (keys.abs().amax(-1) / 7).clamp(min=2.0**-24, max=65504.0).half()
    return (keys / scale.to(keys.dtype).unsqueeze(-1)).round().clamp(-7, 7), scale


def sketch_scan_ref(
    q: torch.Tensor, numbers: torch.Tensor, scale: torch.Tensor, slice_size: int, first: int, last: int, sm_scale: float
) -> torch.Tensor:
    """A slice's score is the log-sum-exp of its tokens' approximate logits, tokens outside [first, last) left out.

    Queries take part as int8 numbers, too.

    Args:
        q:       [num_q_heads, head_dim]
        numbers: [num_kv_heads, num_tokens, head_dim]
        scale:   [num_kv_heads, num_tokens]

    Returns:
        [num_q_heads, cdiv(last, slice_size)]; -inf where no token of a slice counts.
    """
    largest = q.abs().amax(-1, keepdim=True) / 127
    query = ((q / largest).nan_to_num().round() * largest).view(len(numbers), -1, q.shape[1])
    logits = torch.einsum("hgd,htd->hgt", query, numbers[:, :last]) * scale[:, None, :last].to(q.dtype) * sm_scale
    logits[..., :first] = -torch.inf
    logits = torch.nn.functional.pad(logits, (0, -last % slice_size), value=-torch.inf)
    return logits.unflatten(2, (-1, slice_size)).logsumexp(3).flatten(0, 1)
