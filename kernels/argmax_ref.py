"""Reference of argmax: the first of a row's largest logits."""

from __future__ import annotations

import torch


def greedy_tokens_ref(logits: torch.Tensor) -> torch.Tensor:
    """The greedy token of each row of [rows, vocab_size]; -1 where a logit is NaN or infinite."""
    numbers = torch.arange(logits.shape[1], device=logits.device)
    is_best = logits == logits.amax(1, keepdim=True)
    first = torch.where(is_best, numbers, logits.shape[1]).amin(1)
    return torch.where(logits.isfinite().all(1), first, -1)
