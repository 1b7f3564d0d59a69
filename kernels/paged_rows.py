"""Slices of paged K and V as rows of one flat matrix, so that a gather of slices is one index_select.

A row is the longest run that both divides a chunk and never crosses a slice: `slice_size` tokens of one head when
head_dim is a power of two, else an equal part of it (head_dim 80: five rows of 16 numbers a token).
"""

from __future__ import annotations

import torch


class SliceRows:
    """Row numbers of the slices of a pool. Holds views and integers only, no memory of its own.

    pages: [num_chunks, num_kv_heads, 2, page_size, head_dim], a view whose chunk stride covers the whole chunk.
    """

    def __init__(self, pages: torch.Tensor, slice_size: int) -> None:
        _, num_kv_heads, _, page_size, head_dim = pages.shape
        if page_size % slice_size:
            raise ValueError(
                f"a page holds {page_size} tokens, fewer than the {slice_size} tokens of sparse.block_size_fine:"
                " a page must be a whole number of slices"
            )
        self.num_kv_heads, self.slice_size, self.head_dim = num_kv_heads, slice_size, head_dim
        unit = slice_size * (head_dim & -head_dim)  # numbers in a row: a power of two, as is a chunk
        self.parts = slice_size * head_dim // unit  # rows a slice
        self.slices_per_page = page_size // slice_size
        self.rows_per_chunk = pages.stride(0) // unit
        self.value_offset = page_size * head_dim // unit  # rows from a slice's K to its V
        self.flat = pages.as_strided((pages.shape[0] * self.rows_per_chunk, unit), (unit, 1))
        heads = torch.arange(num_kv_heads, device=pages.device) * (2 * self.value_offset)
        self.head_offsets = heads  # int64 [num_kv_heads]
        self._parts = torch.arange(self.parts, device=pages.device)
        self._in_page = torch.arange(self.slices_per_page, device=pages.device) * self.parts

    def bases(self, chunks: torch.Tensor) -> torch.Tensor:
        """Row of K of head 0 for every slice of the pages in `chunks`: [.., pages] -> [.., pages * slices_per_page]."""
        rows = chunks.unsqueeze(-1) * self.rows_per_chunk + self._in_page
        return rows.flatten(-2)

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Copy slices: [.., n] row numbers -> [.., n * slice_size, head_dim], contiguous."""
        if self.parts > 1:
            flat_rows = (rows.unsqueeze(-1) + self._parts).view(-1)
        else:
            flat_rows = rows.reshape(-1)
        gathered = self.flat.index_select(0, flat_rows)
        return gathered.view(*rows.shape[:-1], rows.shape[-1] * self.slice_size, self.head_dim)
