"""Write new K and V into their pages.

Reference: kernels/kv_write_ref.py
"""

from __future__ import annotations

import torch

from qsa.kernels.paged_rows import SliceRows
from qsa.kernels.registry import Operator, register


def write_rows(token_rows: SliceRows, chunks: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Rows that tokens are written to, first all of K, then all of V.

    Args:
        token_rows: the pool cut in slices of one token.
        chunks:     int64 [.., num_tokens], chunk number of each token's page.
        offsets:    int64 [num_tokens], token's place in the page.

    Returns:
        int64 [.., 2 * num_tokens * num_kv_heads * parts]
    """
    first = chunks * token_rows.rows_per_chunk + offsets * token_rows.parts
    parts = torch.arange(token_rows.parts, device=chunks.device)
    keys = (first.unsqueeze(-1) + token_rows.head_offsets).unsqueeze(-1) + parts  # [.., num_tokens, num_kv_heads, parts]
    keys = keys.flatten(-3)
    return torch.cat((keys, keys + token_rows.value_offset), -1)


def kv_write(k: torch.Tensor, v: torch.Tensor, token_rows: SliceRows, rows: torch.Tensor) -> None:
    """Write K and V, each [num_tokens, num_kv_heads, head_dim], to the rows that write_rows gave."""
    flat = token_rows.flat
    new = torch.cat((k, v))
    flat.index_copy_(0, rows, new.to(flat.dtype).view(-1, flat.shape[1]))


class KVWrite(Operator):
    """kv_write on the CPU."""

    forward = staticmethod(kv_write)


register("kv_write", "torch", KVWrite)
