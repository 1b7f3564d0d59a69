"""What the scans of all summaries share: the operator's interface, and an even division of slices among programs.

A decode scan has as many programs as the card runs at a time, whatever the batch: each takes an equal run of tiles, end to
end over the rows that are due. Where no row is due, the launch ends at once.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import triton
import triton.language as tl

from qsa.kernels.checks import check_tensor
from qsa.kernels.kv_write_triton import CodeWrite
from qsa.kernels.paged_kv import DecodeInputs, PagedKV
from qsa.kernels.registry import Operator
from qsa.kernels.summaries.base import slices_per_chunk

CHUNK_BYTES = 1 << 20
HOPPER_BYTES, EARLIER_BYTES = 100 * 1024, 64 * 1024  # of summaries that a program holds in shared memory
MIN_SLICE = 16  # tokens; tiles are cut so that a warp holds whole slices


@triton.jit
def due_tiles(
    seq_lens_ptr, due_ptr, batch, window_size,
    SLICE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Rows [BLOCK_B], their tokens before the window (0 where a row is not due), and their tiles of BLOCK_S slices."""
    rows = tl.arange(0, BLOCK_B)
    mask = rows < batch
    seq_lens = tl.load(seq_lens_ptr + rows, mask=mask, other=0).to(tl.int32)
    due = tl.load(due_ptr + rows, mask=mask, other=0)
    last = tl.where(due != 0, tl.maximum(seq_lens - window_size, 0), 0)
    return rows, last, tl.cdiv(tl.cdiv(last, SLICE), BLOCK_S)


@triton.jit
def share_of_program(total):
    """First and end of the tiles of this program, out of `total`."""
    each = total // tl.num_programs(0)
    more = total % tl.num_programs(0)  # programs that have one tile more
    place = tl.program_id(0) * each + tl.minimum(tl.program_id(0), more)
    return place, place + each + (tl.program_id(0) < more).to(tl.int32)


@triton.jit
def value_at(values, rows, row):
    """Entry `row` of a vector."""
    return tl.sum(tl.where(rows == row, values, 0), 0)


@triton.jit
def complete_slice(seq_lens_ptr, first_slice, SLICE: tl.constexpr, IS_DECODE: tl.constexpr):
    """Row, number of a slice to summarise, and whether there is one: a program's second number is a row, or a slice of row 0.

    In decode it is the slice that the row's last token completes.
    """
    if IS_DECODE:
        row = tl.program_id(1).to(tl.int64)
        seq_len = tl.load(seq_lens_ptr + row).to(tl.int32)
        index = seq_len // SLICE - 1
        is_complete = (seq_len > 0) & (seq_len % SLICE == 0)
    else:
        row = tl.full([], 0, tl.int64)
        index = first_slice + tl.program_id(1)
        is_complete = index >= 0
    return row, index, is_complete


class TritonSummary(Operator, ABC):
    """Summaries of some layers (numbered from 0) on a GPU, of slices of at least 16 tokens.

    Attributes:
        slice_bytes: bytes that summarise one slice in one layer, all KV heads.
        block_pool:  how scores of slices become a block's: "max", "lse" or "mean"; see select_decode.
    """

    block_pool = "max"

    def _set_sizes(self, num_kv_heads: int, head_dim: int, slice_size: int, slice_bytes: int) -> None:
        if slice_size < MIN_SLICE or slice_size & (slice_size - 1):
            raise ValueError(
                f"a slice (block_size_fine) must be a power of two of at least {MIN_SLICE} tokens, got {slice_size}"
            )
        self.num_kv_heads, self.head_dim, self.slice_size, self.slice_bytes = num_kv_heads, head_dim, slice_size, slice_bytes

    @property
    def chunk_slices(self) -> int:
        """Slices that one summary chunk holds."""
        return slices_per_chunk(CHUNK_BYTES, self.slice_bytes)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The same as `scan`."""
        return self.scan(*args, **kwargs)

    @abstractmethod
    def scan(
        self,
        layer: int,
        inputs: DecodeInputs,
        summary_table: torch.Tensor,
        seq_lens: torch.Tensor,
        due: torch.Tensor,
        *,
        max_slices: int,
        sink_size: int,
        window_size: int,
        sm_scale: float,
        **launch: Any,
    ) -> torch.Tensor:
        """Score the slices that begin before the window, for the rows that are due.

        Args:
            summary_table: int64 [batch, max_summary_chunks], addresses; entries of chunks without candidates are not read.
            seq_lens:      int32 or int64 [batch], the query's token included.
            due:           int32 [batch], 0 for a row to leave alone.
            max_slices:    columns of the result, at least the slices of the longest sequence.
            sink_size:     tokens to leave out at the start, where the summary is per token.

        Returns:
            float32 [batch, num_q_heads, max_slices], in nats up to a constant per row, -inf where no token of a slice
            counts; only candidates' columns of the rows due are written.
        """

    @abstractmethod
    def scan_rows(
        self,
        layer: int,
        q: torch.Tensor,
        summary_row: torch.Tensor,
        *,
        num_slices: int,
        sm_scale: float,
        **launch: Any,
    ) -> torch.Tensor:
        """Score complete slices [0, num_slices) of one sequence for many queries.

        Args:
            q:           [num_rows, num_q_heads, head_dim]
            summary_row: int64 [max_summary_chunks], addresses.

        Returns:
            float32 [num_rows, num_q_heads, num_slices], in nats up to a constant per row.
        """

    def code_write(self, layer: int, summary_table: torch.Tensor) -> CodeWrite | None:
        """What writes a new token's code with its key; None where a summary is made of whole slices."""
        return None

    def query(self, layer: int) -> torch.Tensor | None:
        """What queries are multiplied with before a scan, float32 [num_kv_heads, head_dim, code_dim], or None."""
        return None

    def update(
        self, layer: int, page_table_row: torch.Tensor, summary_row: torch.Tensor, first: int, last: int, paged: PagedKV
    ) -> None:
        """Summarise slices [first, last) of one sequence, whose keys lie in its pages."""

    def update_decode(
        self, layer: int, page_table: torch.Tensor, summary_table: torch.Tensor, seq_lens: torch.Tensor, paged: PagedKV
    ) -> None:
        """Summarise the slices that the last tokens of a batch completed."""


class KeySummary(TritonSummary, ABC):
    """A summary that is made from a slice's keys as soon as the last one is written."""

    def update(
        self, layer: int, page_table_row: torch.Tensor, summary_row: torch.Tensor, first: int, last: int, paged: PagedKV
    ) -> None:
        if first < last:
            self._summarise(page_table_row[None], summary_row[None], None, first, last - first, paged)

    def update_decode(
        self, layer: int, page_table: torch.Tensor, summary_table: torch.Tensor, seq_lens: torch.Tensor, paged: PagedKV
    ) -> None:
        self._summarise(page_table, summary_table, seq_lens, 0, len(seq_lens), paged)

    @abstractmethod
    def _summarise(
        self,
        page_table: torch.Tensor,
        summary_table: torch.Tensor,
        seq_lens: torch.Tensor | None,
        first: int,
        count: int,
        paged: PagedKV,
    ) -> None:
        """Summarise the last slice of each of `count` rows if seq_lens says that it is complete; None: slices of row 0."""


def check_scan(summary_table: torch.Tensor, seq_lens: torch.Tensor, due: torch.Tensor, batch: int) -> int:
    """Check what every decode scan is given; returns the batch rounded up to a power of two."""
    device = seq_lens.device
    check_tensor("summary_table", summary_table, (batch, None), (torch.int64,), device)
    check_tensor("seq_lens", seq_lens, (batch,), (torch.int32, torch.int64))
    check_tensor("due", due, (batch,), (torch.int32,), device)
    if summary_table.stride(1) != 1 or not (seq_lens.is_contiguous() and due.is_contiguous()):
        raise ValueError("seq_lens and due must be contiguous, summary_table in its last axis")
    return max(2, triton.next_power_of_2(batch))


def check_update(
    page_table: torch.Tensor, summary_table: torch.Tensor, seq_lens: torch.Tensor | None, paged: PagedKV, slice_size: int
) -> None:
    """Check what every update is given; seq_lens: of a decode step, None for slices of one sequence."""
    check_tensor("page_table", page_table, (None, None), (torch.int64,))
    check_tensor("summary_table", summary_table, (len(page_table), None), (torch.int64,), page_table.device)
    if seq_lens is not None:
        check_tensor("seq_lens", seq_lens, (len(page_table),), (torch.int32, torch.int64), page_table.device)
    if page_table.stride(1) != 1 or summary_table.stride(1) != 1:
        raise ValueError("page_table and summary_table must be contiguous in their last axis")
    if paged.page_size % slice_size:
        raise ValueError(f"page_size ({paged.page_size}) must be a multiple of slice_size ({slice_size})")


def empty_scores(num_rows: int, num_q_heads: int, num_slices: int, device: torch.device) -> torch.Tensor:
    """Room for the result of a scan: rows begin at multiples of 64 numbers, whatever num_slices is."""
    wide = torch.empty(num_rows, num_q_heads, -(-num_slices // 64) * 64, dtype=torch.float32, device=device)
    return wide[:, :, :num_slices]
