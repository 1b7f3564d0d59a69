"""K and V of one sequence scattered over a pool whose other bytes are NaN, for tests of the paged operators."""

from __future__ import annotations

from dataclasses import dataclass

import torch

CHUNK_BYTES = 1 << 20


@dataclass
class PagedSequence:
    """k, v: [num_kv_heads, seq_len, head_dim]; pages: the pool; chunks: chunk number of every page."""

    k: torch.Tensor
    v: torch.Tensor
    pages: torch.Tensor
    chunks: list[int]


def make_pool(num_chunks: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """[num_chunks, num_kv_heads, 2, page_size, head_dim] full of NaN, chunk stride 1 MiB."""
    numbers = CHUNK_BYTES // dtype.itemsize
    page_size = 1 << (numbers // (2 * num_kv_heads * head_dim)).bit_length() - 1
    flat = torch.full((num_chunks, numbers), float("nan"), dtype=dtype)
    return flat[:, : 2 * num_kv_heads * page_size * head_dim].view(num_chunks, num_kv_heads, 2, page_size, head_dim)


def make_sequence(seq_len: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, slice_size: int = 64) -> PagedSequence:
    """A random sequence in pages in falling order, every second chunk of the pool unused; its last slice padded with 0."""
    k = torch.randn(num_kv_heads, seq_len, head_dim).to(dtype)
    v = torch.randn(num_kv_heads, seq_len, head_dim).to(dtype)
    page_size = make_pool(1, num_kv_heads, head_dim, dtype).shape[3]
    num_pages = -(-seq_len // page_size)
    pages = make_pool(2 * num_pages + 1, num_kv_heads, head_dim, dtype)
    chunks = [2 * (num_pages - page) - 1 for page in range(num_pages)]
    for page, chunk in enumerate(chunks):
        first, last = page * page_size, min(seq_len, (page + 1) * page_size)
        pages[chunk, :, 0, : last - first] = k[:, first:last]
        pages[chunk, :, 1, : last - first] = v[:, first:last]
        pages[chunk, :, :, last - first : -(-(last - first) // slice_size) * slice_size] = 0
    return PagedSequence(k, v, pages, chunks)
