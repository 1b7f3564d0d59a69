"""Write new K and V into their pages, and clear the rest of the last slice so that readers may take whole slices."""

from __future__ import annotations

from typing import Any

import torch

from qsa.kernels.registry import Operator, register


def kv_write(
    k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, chunks: torch.Tensor, offsets: torch.Tensor
) -> None:
    """Write token i to `pages[chunks[i], :, :, offsets[i]]`.

    Args:
        k, v:    [num_tokens, num_kv_heads, head_dim]
        pages:   [num_chunks, num_kv_heads, 2, page_size, head_dim]
        chunks:  int64 [num_tokens]
        offsets: int64 [num_tokens], place in the page
    """
    pages[chunks, :, 0, offsets] = k.to(pages.dtype)
    pages[chunks, :, 1, offsets] = v.to(pages.dtype)


class KVWrite(Operator):
    """kv_write on the CPU."""

    def forward(self, *args: Any, **kwargs: Any) -> None:
        kv_write(*args, **kwargs)


register("kv_write", "torch", KVWrite)
