"""StageAttention: writes K, V and summaries of a stage's layers, selects slices, attends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from qsa.kernels.host_memory import keep_freed_memory
from qsa.kernels.paged_rows import SliceRows
from qsa.kernels.registry import SparseConfig, get_operator
from qsa.kernels.sparse_decode import mask_rows
from qsa.kernels.sparse_prefill import TilePlan
from qsa.kernels.summaries.base import Summary
from qsa.kernels.summaries.code import CodeCalibration
from qsa.kernels.summaries.make import make_summary, summary_slice_bytes
from qsa.memory.kv_cache import KVCache
from qsa.memory.layout import SummaryLayout
from qsa.model.attention_plan import AttentionStep, SparseRows, StepPlanner
from qsa.model.batch import Segment
from qsa.model.selection import SelectionState, SlotSelection, add_selections, count_decode

OPERATORS = ("kv_write", "block_select", "sparse_decode", "sparse_prefill", "dense_attention")


def summary_layout(config: SparseConfig, num_kv_heads: int, head_dim: int, code_dim: int | None) -> SummaryLayout:
    """How a sequence's summaries lie in chunks under a configuration. code_dim: of the calibration, for `code` alone."""
    size = config.block_size_fine
    if config.dense:
        return SummaryLayout(size, 0)
    return SummaryLayout(size, summary_slice_bytes(config.summary, num_kv_heads, head_dim, size, code_dim))


class _Method:
    """One sparse configuration with its summaries, its cut of the pool, and its memory of every slot."""

    def __init__(self, config: SparseConfig, summary: Summary, rows: SliceRows, table: torch.Tensor, state: SelectionState):
        self.config, self.summary, self.rows, self.table, self.state = config, summary, rows, table, state
        self.per_layer = config.list_per == "layer"
        self.slices_per_block = config.block_size_coarse // config.block_size_fine

    def block_scores(self, slice_scores: torch.Tensor) -> torch.Tensor | None:
        """Scores of the first selection, None for a configuration without one."""
        if self.config.propose == "slices":
            return None
        return self.summary.block_scores(slice_scores, self.slices_per_block)


class StageAttention:
    """Attention of layers [first_layer, first_layer + num_layers) over one KV cache.

    The state: the configuration of every open slot, and what selection remembers of it between decode steps.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        first_layer: int,
        num_layers: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        sm_scale: float,
        sparse: Mapping[int, SparseConfig],
        calibration: CodeCalibration | None = None,
        backend: str = "torch",
    ) -> None:
        """Set up for one stage.

        Raises:
            ValueError: a configuration that the model, its calibration or the page size does not allow, or a backend that
                lacks an operator.
        """
        if num_q_heads % num_kv_heads:
            raise ValueError(f"num_q_heads ({num_q_heads}) must be a multiple of num_kv_heads ({num_kv_heads})")
        keep_freed_memory()
        self.cache, self.first_layer, self.num_layers = cache, first_layer, num_layers
        self.num_q_heads, self.num_kv_heads, self.head_dim, self.sm_scale = num_q_heads, num_kv_heads, head_dim, sm_scale
        self.backend = backend
        self._operators = {name: get_operator(name, backend) for name in OPERATORS}
        for operator in self._operators.values():
            operator.init(num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, max_batch=cache.max_sequences)
        self._kv_write, self._block_select, self._sparse_decode, self._sparse_prefill, self._dense_decode = (
            operator.forward for operator in self._operators.values()
        )
        self._dense_prefill = self._operators["dense_attention"].forward_prefill
        self.sparse = dict(sparse)
        self._code_dim = calibration.code_dim if calibration is not None else None
        self._planner = StepPlanner(cache, self.sparse, first_layer, num_q_heads)
        self._methods = {
            number: self._make_method(number, config, calibration) for number, config in self.sparse.items() if not config.dense
        }
        self._figures: dict[int, SlotSelection] = {}
        self._uncounted: tuple[SparseRows, ...] = ()

    def _make_method(self, number: int, config: SparseConfig, calibration: CodeCalibration | None) -> _Method:
        size = config.block_size_fine
        if config.window_size < size:
            raise ValueError(
                f"sparse.{number}.window_size is {config.window_size}, but sparse.{number}.block_size_fine is {size}:"
                " the window must hold a slice until it is complete"
            )
        for of_layer in (config.scan_interval, config.pool_size):
            of_layer(self.first_layer + self.num_layers - 1)  # refuses a list that is too short
        summary = make_summary(config.summary, self.num_kv_heads, self.head_dim, size, calibration, self.backend)
        state = SelectionState(config, self.num_layers, self.cache.max_sequences, self.num_kv_heads)
        return _Method(config, summary, self._planner.slice_rows[size], self._planner.slice_tables[size], state)

    @property
    def operator_names(self) -> tuple[str, ...]:
        """Operators that compute here."""
        summaries = [f"{method.config.summary}_summary" for method in self._methods.values()]
        return tuple(dict.fromkeys((*self._operators, *summaries)))

    def summary_layout(self, sparse_id: int) -> SummaryLayout:
        """How the summaries of a sequence under that configuration lie in chunks."""
        if sparse_id not in self.sparse:
            raise ValueError(f"no sparse configuration {sparse_id}, there are {sorted(self.sparse)}")
        return summary_layout(self.sparse[sparse_id], self.num_kv_heads, self.head_dim, self._code_dim)

    def open(self, slot: int, sparse_id: int) -> None:
        """Start an empty sequence in a free slot, with nothing remembered of the one before."""
        layout = self.summary_layout(sparse_id)
        self._count()
        self._figures.pop(slot, None)
        self.cache.open(slot, layout)
        self._planner.open(slot, layout)
        if sparse_id in self._methods:
            self._methods[sparse_id].state.reset(slot)

    def forget(self, slot: int) -> None:
        """Forget what selection remembers of an open slot: its next decode step scans, as a request's first one does."""
        self._count()
        self._figures.pop(slot, None)
        self._planner.forget(slot)
        for method in self._methods.values():
            method.state.reset(slot)

    def release(self, slot: int) -> None:
        """Give the slot's memory back. Releasing a free slot does nothing."""
        self.cache.release(slot)

    def prepare(self, segments: Sequence[Segment]) -> AttentionStep:
        """Make room for the tokens of one group: either decode segments, or exactly one prefill segment.

        Raises:
            OutOfChunksError: the pool is short of chunks.
        """
        if len(segments) != 1 and (not segments or any(segment.is_prefill for segment in segments)):
            raise ValueError(f"a group is decode segments or one prefill segment, got {len(segments)} segments")
        self._count()
        step = self._planner.plan(segments)
        for group in step.sparse:
            self._place_rows(group)
        self._uncounted = step.sparse
        for dense in step.dense:
            tokens = float(self.num_layers * dense.seq_len)
            self._add(SlotSelection(dense.slot, tokens, tokens))
        if step.prefill is not None:
            self._add(self._prefill_figures(step))
        return step

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """Write the new tokens' K, V and summaries, then attend.

        Args:
            layer: number in the whole model.
            q:     [num_tokens, num_q_heads, head_dim], after RoPE; rows in the order of the step's segments.
            k, v:  [num_tokens, num_kv_heads, head_dim]

        Returns:
            [num_tokens, num_q_heads * head_dim]
        """
        if q.dtype != self.cache.dtype:  # attention runs in the type of the cache
            return self.forward(layer, q.to(self.cache.dtype), k, v, step).to(q.dtype)
        self.write(layer, k, v, step)
        local = layer - self.first_layer
        if step.prefill is not None:
            return self._prefill(local, q, step).reshape(len(q), -1)
        if len(step.sparse) == 1 and step.sparse[0].index is None:
            return self._decode(local, q, step.sparse[0]).view(len(q), -1)
        out = torch.empty_like(q)
        for dense in step.dense:
            chunks = self._planner.page_lists[dense.slot][local]
            out[dense.row] = self._dense_decode(q[dense.row], self.cache.pages, chunks, dense.seq_len, self.sm_scale)
        for group in step.sparse:
            out[group.index] = self._decode(local, q[group.rows], group)
        return out.view(len(q), -1)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, step: AttentionStep) -> None:
        """Write the new tokens' K and V, and the summaries of the slices that they complete; part of `forward`."""
        local = layer - self.first_layer
        self._kv_write(k, v, self._planner.token_rows, step.write_rows[local])
        for update in step.updates:
            method = self._methods[update.sparse_id]
            keys = method.rows.gather(update.key_rows[local]).unflatten(1, (-1, method.config.block_size_fine))
            method.summary.update(local, self.cache.pool.buffer, keys, update.chunks[local], update.offsets)

    def _decode(self, local: int, q: torch.Tensor, group: SparseRows) -> torch.Tensor:
        """Attention of the decode rows of one configuration, [batch, num_q_heads, head_dim]."""
        method = self._methods[group.sparse_id]
        state, slots = method.state, group.slots
        for row, due in enumerate(group.is_due[local]):
            if due:
                self._scan(local, q[row], method, slots[row], group.seq_lens[row])
        width, top_k = group.widths[local], method.config.top_k_fine
        near = group.near[width]
        if len(slots) == 1:
            index = slice(slots[0], slots[0] + 1)
            key_rows, masked = state.key_rows[local, index, :, :width], state.masked[local, index, :, :width]
        else:
            key_rows = state.key_rows[local, :, :, :width].index_select(0, group.slot_index)
            masked = state.masked[local, :, :, :width].index_select(0, group.slot_index) + near.mask_offsets
        out, places = self._sparse_decode(
            q, method.rows, key_rows, masked, near, top_k, self.sm_scale, has_padding=group.has_padding
        )
        if places is None and state.pool_size > top_k:  # in another layer there is something to choose
            places = torch.arange(top_k).expand(len(slots), masked.shape[1], top_k)
        if places is not None:
            group.places.append(places)
        return out

    def _place_rows(self, group: SparseRows) -> None:
        """Set what is known before the layers run: the near slices of every slot, and pools that hold every candidate."""
        method = self._methods[group.sparse_id]
        state = method.state
        near = state.num_near
        state.key_rows[:, group.slots, :, :near] = group.near_rows
        for slot, count, layers in group.all_slots:
            state.masked[layers, slot, :, near : near + count] = mask_rows(torch.arange(count), near)
            state.masked[layers, slot, :, near + count :] = near
            bases = method.table[:, slot, None, :count][layers] + method.rows.head_offsets.view(-1, 1)
            state.key_rows[layers, slot, :, near : near + count] = bases
            state.key_rows[layers, slot, :, near + count :] = bases[:, :, :1]

    def _scan(self, local: int, q: torch.Tensor, method: _Method, slot: int, seq_len: int) -> None:
        """Fill the slot's pool from the summaries of its whole context."""
        config, state = method.config, method.state
        chunks = self._planner.summary_lists[slot][local]
        grouped = q.view(self.num_kv_heads, -1, self.head_dim)
        last = seq_len - config.window_size
        scores = method.summary.scan(
            local, self.cache.pool.buffer, grouped, chunks, config.sink_size, last, self.sm_scale
        ).unsqueeze(0)
        pool, edge = self._block_select(
            scores,
            config.pool_size(self.first_layer + local),
            per_layer=method.per_layer,
            block_scores=method.block_scores(scores),
            top_k_coarse=config.top_k_coarse,
            slices_per_block=method.slices_per_block,
        )
        end = state.num_near + pool.shape[-1]
        torch.add(pool[0], state.num_near + 1, out=state.masked[local, slot, :, state.num_near : end])
        if config.propose == "blocks":
            pool = pool.clamp(min=0)
        bases = method.table[local, slot].take(pool[0])
        torch.add(bases, method.rows.head_offsets.view(-1, 1), out=state.key_rows[local, slot, :, state.num_near : end])
        if edge is not None:
            state.edges[local, slot] = edge[0]

    def _prefill(self, local: int, q: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """Attention of a prefill chunk, [num_tokens, num_q_heads, head_dim]."""
        segment, plan = step.segments[0], step.prefill
        assert plan is not None
        parts = []
        if plan.dense_end > segment.start:
            chunks = self._planner.page_lists[segment.slot][local]
            queries = q[: plan.dense_end - segment.start]
            parts.append(self._dense_prefill(queries, self.cache.pages, chunks, plan.dense_end, self.sm_scale))
        if plan.tiles is not None:
            assert plan.near_rows is not None
            method, tiles, queries = self._methods[segment.sparse_id], plan.tiles, q[plan.dense_end - segment.start :]
            lists = self._tile_lists(local, queries, method, segment.slot, tiles)
            is_padding = None
            if method.config.propose == "blocks":  # the best blocks may hold fewer candidates than a list has places
                padded = lists < 0
                is_padding, lists = (padded if bool(padded.any()) else None), lists.clamp(min=0)
            list_rows = method.table[local, segment.slot].take(lists) + method.rows.head_offsets.view(-1, 1)
            near_rows = plan.near_rows[local]
            parts.append(self._sparse_prefill(queries, method.rows, list_rows, near_rows, tiles, self.sm_scale, is_padding))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _tile_lists(self, local: int, q: torch.Tensor, method: _Method, slot: int, tiles: TilePlan) -> torch.Tensor:
        """Slices of every tile, int64 [num_tiles, num_kv_heads or 1, list size], by the summaries' own scores."""
        config = method.config
        num_samples = tiles.sampled.shape[1]
        sampled = q[tiles.sampled].view(tiles.num_tiles * num_samples, self.num_kv_heads, -1, self.head_dim)
        rows = sampled.transpose(0, 1).reshape(self.num_kv_heads, -1, self.head_dim)
        last = int(tiles.window_slices[-1])
        scores = method.summary.scan(
            local,
            self.cache.pool.buffer,
            rows,
            self._planner.summary_lists[slot][local],
            config.block_size_fine,
            last * config.block_size_fine,
            self.sm_scale,
        )
        scores = scores.view(self.num_kv_heads, tiles.num_tiles, -1, last).transpose(0, 1)
        slices = torch.arange(last)
        candidates = (slices > 0) & (slices < tiles.window_slices.view(-1, 1, 1))  # [num_tiles, 1, last]
        scores = scores.masked_fill(~candidates.unsqueeze(2), -torch.inf)
        group = self.num_q_heads // self.num_kv_heads
        weights = tiles.weights.repeat_interleave(group, 1).view(tiles.num_tiles, 1, -1, 1)
        lists, _ = self._block_select(
            scores,
            config.prefill_factor * config.top_k_fine,
            per_layer=method.per_layer,
            weights=weights,
            candidates=candidates,
            block_scores=method.block_scores(scores),
            top_k_coarse=config.top_k_coarse,
            slices_per_block=method.slices_per_block,
        )
        return lists

    def take_stats(self) -> list[SlotSelection]:
        """What selection did since the last call, one entry a slot that was computed."""
        self._count()
        figures, self._figures = list(self._figures.values()), {}
        return figures

    def _add(self, figures: SlotSelection) -> None:
        known = self._figures.get(figures.slot)
        self._figures[figures.slot] = figures if known is None else add_selections(known, figures)

    def _count(self) -> None:
        """Count what the last decode step selected, and make its lists the ones the next step is compared with."""
        for group in self._uncounted:
            method = self._methods[group.sparse_id]
            state, slots = method.state, group.slot_index
            chosen = state.pools(slots)
            if len(group.places) == self.num_layers:
                chosen = chosen.gather(-1, torch.stack(group.places))
            elif group.places or state.pool_size > method.config.top_k_fine:
                continue  # the step did not run to its end
            for figures in count_decode(
                chosen, state.chosen[:, slots], state.edges[:, slots], method.config, group.slots, group.seq_lens
            ):
                self._add(figures)
            state.chosen[:, slots] = chosen
        self._uncounted = ()

    def _prefill_figures(self, step: AttentionStep) -> SlotSelection:
        segment, plan = step.segments[0], step.prefill
        assert plan is not None
        context = attended = sum_of_lengths(segment.start, segment.end)
        if plan.tiles is not None:
            config = self.sparse[segment.sparse_id]
            near = (plan.tiles.near_mask == 0).sum(3).flatten()  # [num_tiles * tile_size], a padded query's too
            first = plan.dense_end - plan.tiles.first
            seen = int(near[first : first + segment.end - plan.dense_end].sum())
            far = config.prefill_factor * config.top_k_fine * config.block_size_fine
            attended = sum_of_lengths(segment.start, plan.dense_end) + seen + far * (segment.end - plan.dense_end)
        return SlotSelection(segment.slot, float(self.num_layers * attended), float(self.num_layers * context))

    def close(self) -> None:
        """Give the workspace back. Calling it again does nothing."""
        for method in self._methods.values():
            method.summary.free()
        for operator in self._operators.values():
            operator.free()
        self._methods.clear()
        self._operators.clear()
        self._uncounted = ()


def sum_of_lengths(start: int, end: int) -> int:
    """Context tokens of the queries at positions [start, end), their own included."""
    return (end * (end + 1) - start * (start + 1)) // 2
