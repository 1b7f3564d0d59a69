"""What is the same for every layer of a step: built once by StepPlanner, read by each layer's attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from qsa.kernels.kv_write import write_rows
from qsa.kernels.paged_rows import SliceRows
from qsa.kernels.registry import SparseConfig
from qsa.kernels.sparse_decode import NearPlan, first_rows, plan_near
from qsa.kernels.sparse_prefill import TilePlan, first_sparse_tile, plan_tiles
from qsa.memory.kv_cache import KVCache
from qsa.memory.layout import SummaryLayout, cdiv
from qsa.model.batch import Segment

MAX_ROWS = 4  # decode rows that select together: the keys of more do not stay in the cache


@dataclass(frozen=True)
class SummaryUpdate:
    """Slices of one sequence that this step completes.

    key_rows: int64 [num_layers, num_kv_heads, num_slices]; chunks: int64 [num_layers, num_slices]; offsets: [num_slices].
    """

    sparse_id: int
    key_rows: torch.Tensor
    chunks: torch.Tensor
    offsets: torch.Tensor


@dataclass(frozen=True)
class DenseRow:
    """A decode row that attends to everything."""

    row: int
    slot: int
    seq_len: int


@dataclass(frozen=True)
class SparseRows:
    """Decode rows that select, all under one configuration and from pools of one width.

    Attributes:
        rows:        their places among the step's rows.
        index:       the same as a tensor, None when they are all of the step's rows.
        slot_index:  the rows' slots as a tensor.
        widths:      by layer, near slices and the places of a pool that are read together.
        is_due:      [num_layers][batch], whether a layer scans for a row in this step.
        near:        by width, the slices near the queries.
        near_rows:   int64 [num_layers, batch, num_kv_heads, num_near], their rows of K.
        all_slots:   slots whose pool is every candidate in some layers: the slot, its candidates, the layers.
        has_padding: whether a pool may be padded.
        places:      per layer which of a pool's slices were chosen, int64 [batch, lists, top_k], filled layer by layer.
    """

    sparse_id: int
    rows: list[int]
    index: torch.Tensor | None
    slots: list[int]
    slot_index: torch.Tensor
    seq_lens: list[int]
    widths: list[int]
    is_due: list[list[bool]]
    near: dict[int, NearPlan]
    near_rows: torch.Tensor
    all_slots: list[tuple[int, int, slice | list[int]]]
    has_padding: bool
    places: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class PrefillPlan:
    """A prefill chunk: queries before `dense_end` attend to everything, those of `tiles` select.

    near_rows: int64 [num_layers, num_tiles, num_kv_heads, near slices].
    """

    dense_end: int
    tiles: TilePlan | None
    near_rows: torch.Tensor | None


@dataclass(frozen=True)
class AttentionStep:
    """One group of a step: all decode segments, or one prefill segment.

    write_rows: int64 [num_layers, 2 * rows of the new tokens], where K and V go.
    """

    segments: tuple[Segment, ...]
    write_rows: torch.Tensor
    updates: tuple[SummaryUpdate, ...]
    dense: tuple[DenseRow, ...]
    sparse: tuple[SparseRows, ...]
    prefill: PrefillPlan | None


class StepPlanner:
    """Plans steps over one KV cache. The state: where the slices of every open slot lie, and which slots have scanned.

    Attributes:
        slice_rows:      by slice size, the pool cut in slices.
        slice_tables:    by slice size, int64 [num_layers, max_sequences, max_slices], row of K of head 0 of each slice.
        page_lists:      by slot, chunk numbers of its pages, one list a layer.
        summary_lists:   by slot, chunk numbers of its summaries, one list a layer.
    """

    def __init__(self, cache: KVCache, sparse: Mapping[int, SparseConfig], first_layer: int, num_q_heads: int) -> None:
        self.cache, self.first_layer, self._num_q_heads = cache, first_layer, num_q_heads
        self.token_rows = SliceRows(cache.pages, 1)
        self.slice_rows: dict[int, SliceRows] = {}
        self.slice_tables: dict[int, torch.Tensor] = {}
        self.page_lists: dict[int, list[list[int]]] = {}
        self.summary_lists: dict[int, list[list[int]]] = {}
        self._sparse = {number: config for number, config in sparse.items() if not config.dense}
        self._layouts: dict[int, SummaryLayout] = {}  # by slot
        self._scanned: dict[int, int] = {}  # by slot, decode steps from its first scan on
        for size in {config.block_size_fine for config in self._sparse.values()}:
            rows = SliceRows(cache.pages, size)
            shape = (cache.num_layers, cache.max_sequences, cache.page_chunks.shape[2] * rows.slices_per_page)
            self.slice_rows[size], self.slice_tables[size] = rows, torch.zeros(shape, dtype=torch.int64)
        self._clear_size = max(self.slice_rows, default=1)

    def open(self, slot: int, layout: SummaryLayout) -> None:
        self._layouts[slot] = layout
        self._scanned.pop(slot, None)
        self.page_lists[slot] = self.summary_lists[slot] = [[] for _ in range(self.cache.num_layers)]

    def forget(self, slot: int) -> None:
        """The slot's next decode step counts as its first."""
        self._scanned.pop(slot, None)

    def plan(self, segments: Sequence[Segment]) -> AttentionStep:
        """Make room for the new tokens and plan the step."""
        for segment in segments:
            self._extend(segment)
        page_size = self.cache.kv.page_size
        slots = torch.tensor([segment.slot for segment in segments for _ in range(segment.extend_len)])
        positions = torch.cat([torch.arange(segment.start, segment.end) for segment in segments])
        chunks = self.cache.page_chunks[:, slots, positions // page_size]
        rows = write_rows(self.token_rows, chunks, positions % page_size)
        updates = tuple(update for segment in segments if (update := self._plan_update(segment)) is not None)
        if segments[0].is_prefill:
            return AttentionStep(tuple(segments), rows, updates, (), (), self._plan_prefill(segments[0]))
        dense, sparse = self._plan_decode(segments)
        return AttentionStep(tuple(segments), rows, updates, dense, sparse, None)

    def _extend(self, segment: Segment) -> None:
        """Make room, learn where new pages lie, and clear what the new tokens leave of their last slice.

        Readers take whole slices; what lies behind a sequence's last token must not be NaN, or 0 * NaN reaches the result.
        """
        cache, slot = self.cache, segment.slot
        cache.extend(slot, segment.end)
        page_size = cache.kv.page_size
        num_pages = cdiv(segment.end, page_size)
        num_summaries = self._layouts[slot].num_chunks(segment.end)
        known, known_summaries = len(self.page_lists[slot][0]), len(self.summary_lists[slot][0])
        if num_pages > known:
            pages = cache.page_chunks[:, slot, :num_pages]
            self.page_lists[slot] = pages.tolist()
            for size, table in self.slice_tables.items():
                rows = self.slice_rows[size]
                first = known * rows.slices_per_page
                table[:, slot, first : num_pages * rows.slices_per_page] = rows.bases(pages[:, known:])
        if num_summaries > known_summaries:
            self.summary_lists[slot] = cache.summary_chunks[:, slot, :num_summaries].tolist()
        end = segment.end
        if end % self._clear_size and (end - 1) // self._clear_size >= cdiv(segment.start, self._clear_size):
            chunks = cache.page_chunks[:, slot, end // page_size]
            first, last = end % page_size, cdiv(end, self._clear_size) * self._clear_size % page_size or page_size
            cache.pages[:, :, :, first:last].index_fill_(0, chunks, 0)

    def _plan_update(self, segment: Segment) -> SummaryUpdate | None:
        config = self._sparse.get(segment.sparse_id)
        if config is None:
            return None
        size, slot = config.block_size_fine, segment.slot
        first, last = segment.start // size, segment.end // size
        if first == last:
            return None
        layout, rows = self._layouts[slot], self.slice_rows[size]
        keys = self.slice_tables[size][:, slot, None, first:last] + rows.head_offsets.view(-1, 1)
        slices = torch.arange(first, last)
        chunks = self.cache.summary_chunks[:, slot, slices // layout.slices_per_chunk]
        return SummaryUpdate(segment.sparse_id, keys, chunks, slices % layout.slices_per_chunk)

    def _plan_decode(self, segments: Sequence[Segment]) -> tuple[tuple[DenseRow, ...], tuple[SparseRows, ...]]:
        dense = []
        selecting: dict[tuple[int, int], list[int]] = {}  # by configuration and width of the pool
        for row, segment in enumerate(segments):
            config = self._sparse.get(segment.sparse_id)
            if config is None or num_candidates(config, segment.end) <= config.top_k_fine:
                dense.append(DenseRow(row, segment.slot, segment.end))
            else:
                selecting.setdefault((segment.sparse_id, pool_width(config, segment.end)), []).append(row)
        groups = [
            self._plan_rows(number, width, rows[first : first + MAX_ROWS], segments)
            for (number, width), rows in selecting.items()
            for first in range(0, len(rows), MAX_ROWS)
        ]
        return tuple(dense), tuple(groups)

    def _plan_rows(self, sparse_id: int, width: int, rows: list[int], segments: Sequence[Segment]) -> SparseRows:
        config, kv = self._sparse[sparse_id], self.cache.kv
        size, layers = config.block_size_fine, range(self.first_layer, self.first_layer + self.cache.num_layers)
        slots, seq_lens = [segments[row].slot for row in rows], [segments[row].end for row in rows]
        slot_index = torch.tensor(slots)
        near = plan_near(
            seq_lens,
            window_size=config.window_size,
            sink_size=config.sink_size,
            slice_size=size,
            pool_size=width,
            num_q_heads=self._num_q_heads,
            num_kv_heads=kv.num_kv_heads,
        )
        bases = self.slice_tables[size][:, slot_index.unsqueeze(1), near.slices]  # [num_layers, batch, num_near]
        near_rows = bases.unsqueeze(2) + self.slice_rows[size].head_offsets.view(-1, 1)
        candidates = [num_candidates(config, seq_len) for seq_len in seq_lens]
        # without a rerank the summaries choose also from candidates that would all fit
        most = {layer: config.pool_size(layer) if config.rerank == "exact" else 0 for layer in layers}
        fits = [count <= max(most.values()) for count in candidates]  # some layer's pool: the others scan at every step
        steps = [self._scanned.get(slot, 0) for slot in slots]
        is_due = [
            [
                count > most[layer] and (fit or step % config.scan_interval(layer) == 0)
                for count, fit, step in zip(candidates, fits, steps)
            ]
            for layer in layers
        ]
        for slot, step, fit in zip(slots, steps, fits):
            self._scanned[slot] = step if fit else step + 1
        all_slots: list[tuple[int, int, slice | list[int]]] = []
        for slot, count, fit in zip(slots, candidates, fits):
            local = [layer - self.first_layer for layer in layers if count <= most[layer]]
            if fit:
                all_slots.append((slot, count, local if len(local) < len(layers) else slice(None)))
        has_padding = config.propose == "blocks" or any(count < width for count in candidates)
        num_near = near.slices.shape[1]
        widths = [num_near + min(config.pool_size(layer), width) for layer in layers]
        heads = (len(slots), self._num_q_heads, kv.num_kv_heads)
        plans = {one: replace(near, heads=first_rows(*heads, one)) for one in set(widths)}
        index = None if len(rows) == len(segments) else torch.tensor(rows)
        return SparseRows(
            sparse_id, rows, index, slots, slot_index, seq_lens, widths, is_due, plans, near_rows, all_slots, has_padding
        )

    def _plan_prefill(self, segment: Segment) -> PrefillPlan:
        config = self._sparse.get(segment.sparse_id)
        if config is None:
            return PrefillPlan(segment.end, None, None)
        size, tile = config.block_size_fine, config.prefill_tile
        list_size = config.prefill_factor * config.top_k_fine
        first = first_sparse_tile(segment.start, tile, config.window_size, size, list_size)
        dense_end = min(max(first, segment.start), segment.end)
        if dense_end == segment.end:
            return PrefillPlan(dense_end, None, None)
        tiles = plan_tiles(
            first,
            dense_end,
            segment.end,
            tile_size=tile,
            window_size=config.window_size,
            slice_size=size,
            sample_every=config.sample_every,
            dtype=self.cache.dtype,
        )
        bases = self.slice_tables[size][:, segment.slot][:, tiles.near_slices]
        return PrefillPlan(dense_end, tiles, bases.unsqueeze(2) + self.slice_rows[size].head_offsets.view(-1, 1))


def num_candidates(config: SparseConfig, seq_len: int) -> int:
    """Slices that begin before the window of a decode query with `seq_len` tokens of context, its own included."""
    return cdiv(max(0, seq_len - config.window_size), config.block_size_fine)


def pool_width(config: SparseConfig, seq_len: int) -> int:
    """Places of the largest pool that are read: all, or while there are fewer candidates than that, these rounded up.

    It depends on the sequence alone, so that a row has the same shapes in any company.
    """
    rounded = cdiv(num_candidates(config, seq_len), config.top_k_fine) * config.top_k_fine
    return min(config.max_pool_size, rounded)
