"""Reference of kv_write: one token at a time, straight into the pages."""

from __future__ import annotations

import torch


def kv_write_ref(k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, chunks: torch.Tensor, offsets: torch.Tensor) -> None:
    """Write token i of K and V, each [num_tokens, num_kv_heads, head_dim], to place offsets[i] of page chunks[i].

    pages: [num_chunks, num_kv_heads, 2, page_size, head_dim]
    """
    for i in range(len(k)):
        pages[chunks[i], :, 0, offsets[i]] = k[i].to(pages.dtype)
        pages[chunks[i], :, 1, offsets[i]] = v[i].to(pages.dtype)
