"""GpuAttention: a stage's attention on a card. Nothing in a decode step depends on the host but the numbers in its buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from qsa.kernels.block_select_triton import select_decode, select_tiles
from qsa.kernels.decode_prepare_triton import decode_prepare
from qsa.kernels.dense_attention_triton import dense_decode
from qsa.kernels.dense_prefill_triton import dense_prefill
from qsa.kernels.paged_kv import PagedKV
from qsa.kernels.prefill_prepare_triton import prefill_prepare
from qsa.kernels.registry import SparseConfig, get_operator
from qsa.kernels.rerank_decode_triton import rerank_decode
from qsa.kernels.selection_figures_triton import selection_figures
from qsa.kernels.sparse_decode_triton import sparse_decode
from qsa.kernels.sparse_prefill_triton import sparse_prefill
from qsa.kernels.summaries.code import CodeCalibration
from qsa.memory.kv_cache import KVCache
from qsa.memory.layout import SummaryLayout, cdiv
from qsa.model.attention import sum_of_lengths, summary_layout
from qsa.model.batch import Segment
from qsa.model.decode_graph import DecodeBuffers, DecodeRows, HostFigures
from qsa.model.gpu_selection import DeviceSelection, ScanClock, SelectionFigures
from qsa.model.gpu_tiles import GpuTiles, near_tokens, plan_gpu_tiles
from qsa.model.selection import SlotSelection

SCORE_BYTES = 1 << 27  # scores of sampled prefill queries in memory at once
SMALL_CHUNK = 1 << 25  # queries times keys: what sparse prompts attend to densely, but for a whole first chunk
MIN_TILE = 16  # queries of a prefill tile: rows of a product on the tensor cores


@dataclass(frozen=True)
class DecodeStep:
    """What the layers of a decode step share; all on the device, a row a row of the buffers.

    Attributes:
        page_table, summary_table: int64 [num_layers, batch, ..], the rows' lines of the cache's tables.
        due:                       int32 [num_layers, batch]
        scans_rare:                whether layers that scan less often than others launch a scan.
    """

    sparse_id: int
    slots: torch.Tensor
    seq_lens: torch.Tensor
    due: torch.Tensor
    page_table: torch.Tensor
    summary_table: torch.Tensor
    scans_rare: bool = True


@dataclass(frozen=True)
class PrefillStep:
    """A prefill chunk: queries before `dense_end` attend to everything, those of `tiles` select."""

    segment: Segment
    dense_end: int
    tiles: GpuTiles | None


class _Method:
    """One sparse configuration with its summaries and what it remembers of every slot."""

    def __init__(self, config: SparseConfig, summary: Any, state: DeviceSelection, clock: ScanClock) -> None:
        self.config, self.summary, self.state, self.clock = config, summary, state, clock
        size, is_coarse = config.block_size_fine, config.propose == "blocks"
        self.is_rare = clock.is_rare
        self.near: dict[str, Any] = dict(slice_size=size, window_size=config.window_size)
        self.select: dict[str, Any] = dict(
            per_layer=config.list_per == "layer",
            block_pool=summary.block_pool,
            top_k_coarse=config.top_k_coarse if is_coarse else 0,
            slices_per_block=config.block_size_coarse // size if is_coarse else 1,
        )


class GpuAttention:
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
        rotation: tuple[torch.Tensor, torch.Tensor],
        eps: float,
        calibration: CodeCalibration | None = None,
        kv_scale: torch.Tensor | None = None,
    ) -> None:
        """Set up for one stage.

        Args:
            rotation:     cosines, and sines from `signed_sine`, float32 [max_model_len, head_dim].
            eps:          of the norms of q and k, for models that have them.
            kv_scale:     float32 [num_layers, num_kv_heads, 2], what stored K and V are multiplied with; for a cache in float8
                          alone, where None is ones.

        Raises:
            ValueError: a configuration that the model, its calibration or the page size does not allow.
        """
        if num_q_heads % num_kv_heads:
            raise ValueError(f"num_q_heads ({num_q_heads}) must be a multiple of num_kv_heads ({num_kv_heads})")
        self.cache, self.first_layer, self.num_layers = cache, first_layer, num_layers
        self.num_q_heads, self.num_kv_heads, self.head_dim, self.sm_scale = num_q_heads, num_kv_heads, head_dim, sm_scale
        self.sparse, self._rotation = dict(sparse), rotation
        self._code_dim = calibration.code_dim if calibration is not None else None
        page_size = cache.kv.page_size
        if cache.dtype != torch.float8_e4m3fn:
            self._paged = [PagedKV(cache.dtype, page_size)] * num_layers
        else:
            scale = torch.ones(num_layers, num_kv_heads, 2) if kv_scale is None else kv_scale
            scale = scale.to(cache.device, torch.float32)
            self._paged = [PagedKV(cache.dtype, page_size, scale[layer]) for layer in range(num_layers)]
        self._prepare: dict[str, Any] = dict(
            num_kv_heads=num_kv_heads, head_dim=head_dim, kv_dtype=cache.dtype, page_size=page_size, eps=eps
        )
        self._methods = {
            number: self._make_method(number, config, calibration) for number, config in self.sparse.items() if not config.dense
        }
        self._layouts: dict[int, SummaryLayout] = {}  # by slot
        self._figures = SelectionFigures()

    def _make_method(self, number: int, config: SparseConfig, calibration: CodeCalibration | None) -> _Method:
        size, page_size = config.block_size_fine, self.cache.kv.page_size
        if config.window_size < size:
            raise ValueError(
                f"sparse.{number}.window_size is {config.window_size}, but sparse.{number}.block_size_fine is {size}:"
                " the window must hold a slice until it is complete"
            )
        if page_size % size:
            raise ValueError(f"sparse.{number}.block_size_fine is {size}, but a page has {page_size} tokens: no multiple of it")
        tile = config.prefill_tile
        if tile < MIN_TILE or tile & (tile - 1):
            raise ValueError(f"sparse.{number}.prefill_tile is {tile}; on a card it must be a power of two from {MIN_TILE}")
        summary = get_operator(f"{config.summary}_summary", "triton")
        summary.init(
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            slice_size=size,
            calibration=calibration,
            device=self.cache.device,
        )
        state = DeviceSelection(config, self.num_layers, self.cache.max_sequences, self.num_kv_heads, self.cache.device)
        return _Method(config, summary, state, ScanClock(config, self.first_layer, self.num_layers))

    @property
    def operator_names(self) -> tuple[str, ...]:
        """Operators that compute here."""
        names = ["decode_prepare", "prefill_prepare", "dense_attention"]
        for method in self._methods.values():
            decode = "sparse_decode" if method.config.rerank == "none" else "rerank_decode"
            names += [f"{method.config.summary}_summary", "block_select", decode, "sparse_prefill"]
        return tuple(dict.fromkeys(names))

    # slots

    def summary_layout(self, sparse_id: int) -> SummaryLayout:
        """How the summaries of a sequence under that configuration lie in chunks."""
        if sparse_id not in self.sparse:
            raise ValueError(f"no sparse configuration {sparse_id}, there are {sorted(self.sparse)}")
        return summary_layout(self.sparse[sparse_id], self.num_kv_heads, self.head_dim, self._code_dim)

    def open(self, slot: int, sparse_id: int) -> None:
        """Start an empty sequence in a free slot, with nothing remembered of the one before."""
        self.cache.open(slot, self.summary_layout(sparse_id))
        self.forget(slot)

    def forget(self, slot: int) -> None:
        """Forget what selection remembers of an open slot: its next decode step scans, as a request's first one does."""
        self._figures.forget(slot)
        for method in self._methods.values():
            method.clock.forget(slot)
            method.state.reset(slot)

    def release(self, slot: int) -> None:
        """Give the slot's memory back, and forget its figures. Releasing a free slot does nothing."""
        self.cache.release(slot)
        self._figures.forget(slot)

    def take_stats(self) -> list[SlotSelection]:
        """What selection did since the last call, one entry a slot; a step the device has not finished counts next time."""
        return self._figures.take()

    # decode

    def plan_decode(self, sparse_id: int, segments: Sequence[Segment], places: Sequence[int] | None) -> DecodeRows:
        """Make room for the new tokens of decode segments of one configuration, and say what is due.

        Raises:
            OutOfChunksError: the pool is short of chunks.
        """
        for segment in segments:
            self.cache.extend(segment.slot, segment.end)
        slots, seq_lens = [segment.slot for segment in segments], [segment.end for segment in segments]
        method = self._methods.get(sparse_id)
        if method is None:
            return DecodeRows(sparse_id, slots, seq_lens, np.zeros((self.num_layers, len(slots)), np.int32), places)
        due = method.clock.tick(slots, seq_lens)
        scans_rare = not method.is_rare.any() or bool(due[method.is_rare].any())
        return DecodeRows(sparse_id, slots, seq_lens, due, places, scans_rare)

    def unplan_decode(self, rows: DecodeRows) -> None:
        """Take back what `plan_decode` has planned, for a step that is not run; the room that was made stays."""
        method = self._methods.get(rows.sparse_id)
        if method is not None:
            method.clock.tick_back(rows.slots, rows.seq_lens)

    def scan_forms(self, sparse_id: int) -> tuple[bool, ...]:
        """With or without scans in layers that rarely scan: the forms of a configuration's decode steps."""
        method = self._methods.get(sparse_id)
        return (True, False) if method is not None and method.is_rare.any() else (True,)

    def begin(self, sparse_id: int, buffers: DecodeBuffers, scans_rare: bool = True) -> DecodeStep:
        """What the layers of a step share, from its buffers."""
        slots = buffers.slots
        pages, summaries = (table.index_select(1, slots) for table in (self.cache.page_table, self.cache.summary_table))
        return DecodeStep(sparse_id, slots, buffers.seq_lens, buffers.due, pages, summaries, scans_rare)

    def decode(self, local: int, qkv: torch.Tensor, step: DecodeStep, head_norm: torch.Tensor | None) -> torch.Tensor:
        """Write the new tokens' K, V and summaries in a layer of the stage, then attend.

        Args:
            qkv:       [batch, (num_q_heads + 2 * num_kv_heads) * head_dim], before norm and rotation of q and k.
            head_norm: float32 [num_q_heads + num_kv_heads, head_dim], weights of the norm of q and k; None: no norm.

        Returns:
            [batch, num_q_heads * head_dim], zeros in rows that are not used.
        """
        method, kv = self._methods.get(step.sparse_id), self._paged[local]
        pages, seq_lens, slots = step.page_table[local], step.seq_lens, step.slots
        code = query = None
        if method is not None:
            summaries = step.summary_table[local]
            code, query = method.summary.code_write(local, summaries), method.summary.query(local)
        inputs = decode_prepare(
            qkv, *self._rotation, pages, seq_lens, **self._prepare,
            head_norm=head_norm, kv_scale=kv.scale, code=code, query=query,
        )  # fmt: skip
        heads: dict[str, Any] = dict(num_kv_heads=self.num_kv_heads, sm_scale=self.sm_scale, kv=kv)
        if method is None:
            return dense_decode(inputs.q, pages, seq_lens, **heads).flatten(1)
        config, state, near = method.config, method.state, method.near
        method.summary.update_decode(local, pages, summaries, seq_lens, kv)
        pools = state.pool(local, config.pool_size(self.first_layer + local))
        if step.scans_rare or not method.is_rare[local]:
            scores = method.summary.scan(
                local, inputs, summaries, seq_lens, step.due[local],
                max_slices=cdiv(self.cache.max_seq_len, config.block_size_fine),
                sink_size=config.sink_size, window_size=config.window_size, sm_scale=self.sm_scale,
            )  # fmt: skip
            select_decode(
                scores, seq_lens, step.due[local], slots, pools, state.edges[local],
                num_kv_heads=self.num_kv_heads, **near, **method.select,
            )  # fmt: skip
        if pools.shape[-1] == config.top_k_fine:
            out = sparse_decode(inputs.q, pages, seq_lens, slots, pools, sink_size=config.sink_size, **near, **heads)
        else:
            out = rerank_decode(
                inputs.q, pages, seq_lens, slots, pools, state.chosen[local],
                top_k=config.top_k_fine, sink_size=config.sink_size, **near, **heads,
            )  # fmt: skip
        return out.flatten(1)

    def figures(self, step: DecodeStep) -> torch.Tensor | None:
        """What selection did in a step that has been through all layers: float32 [num_layers, batch, 5]."""
        method = self._methods.get(step.sparse_id)
        if method is None:
            return None
        state = method.state
        return selection_figures(
            state.chosen, state.previous, state.edges, step.slots, step.seq_lens,
            sink_size=method.config.sink_size, **method.near,
        )  # fmt: skip

    def count(self, rows: DecodeRows, figures: HostFigures | None) -> None:
        """Take the figures of a decode step into account once they arrive; dense rows have none to wait for."""
        if figures is None:
            for slot, seq_len in zip(rows.slots, rows.seq_lens):
                self._figures.add(SlotSelection(slot, *(float(self.num_layers * seq_len),) * 2))
        else:
            self._figures.add_later(self.sparse[rows.sparse_id], rows, figures)

    # prefill

    def plan_prefill(self, segment: Segment) -> PrefillStep:
        """Make room for the tokens of a prefill segment and plan what its queries attend to.

        Raises:
            OutOfChunksError: the pool is short of chunks.
        """
        self.cache.extend(segment.slot, segment.end)
        method = self._methods.get(segment.sparse_id)
        if method is None:
            step = PrefillStep(segment, segment.end, None)
        else:
            dense_end, tiles = plan_gpu_tiles(segment, method.config, self.cache.device)
            step = PrefillStep(segment, dense_end, tiles)
        context = attended = sum_of_lengths(segment.start, segment.end)
        if method is not None and step.tiles is not None:
            config = method.config
            far = config.prefill_factor * config.top_k_fine * config.block_size_fine
            attended = sum_of_lengths(segment.start, step.dense_end) + far * (segment.end - step.dense_end)
            attended += near_tokens(step.dense_end, segment.end, config)
        self._figures.add(SlotSelection(segment.slot, float(self.num_layers * attended), float(self.num_layers * context)))
        return step

    def write(self, local: int, qkv: torch.Tensor, step: PrefillStep, head_norm: torch.Tensor | None) -> torch.Tensor:
        """Write K, V and summaries of a chunk in a layer of the stage. Returns q for `prefill`."""
        segment, kv = step.segment, self._paged[local]
        method = self._methods.get(segment.sparse_id)
        pages, summaries = self.cache.page_table[local, segment.slot], self.cache.summary_table[local, segment.slot]
        code = None if method is None else method.summary.code_write(local, summaries)
        q = prefill_prepare(
            qkv, *self._rotation, pages, segment.start, **self._prepare, head_norm=head_norm, kv_scale=kv.scale, code=code
        )
        if method is not None:
            size = method.config.block_size_fine
            first, last = segment.start // size, segment.end // size
            if first < last:
                method.summary.update(local, pages, summaries, first, last, kv)
        return q if kv.scale is not None else q.to(kv.dtype)  # prefill attention runs in the type of the cache

    def prefill(self, local: int, q: torch.Tensor, step: PrefillStep) -> torch.Tensor:
        """Attention of a chunk whose K, V and summaries are written: [num_tokens, num_q_heads * head_dim] in q's type.

        q: [num_tokens, num_q_heads, head_dim], from `write`.
        """
        segment, tiles = step.segment, step.tiles
        pages = self.cache.page_table[local, segment.slot]
        heads: dict[str, Any] = dict(num_kv_heads=self.num_kv_heads, sm_scale=self.sm_scale, kv=self._paged[local])
        num_dense = step.dense_end - segment.start
        parts = []
        if num_dense:
            # libraries plan every length anew, which for little work takes longer than the work
            way = "triton" if q.is_cuda and num_dense * step.dense_end <= SMALL_CHUNK else None
            span: dict[str, Any] = dict(start=segment.start, end=step.dense_end, pool=self.cache.pool.buffer)
            parts.append(dense_prefill(q[:num_dense], pages, way=way, **span, **heads))
        if tiles is not None:
            method = self._methods[segment.sparse_id]
            lists = self._tile_lists(local, q[num_dense:], step, method)
            parts.append(
                sparse_prefill(
                    q[num_dense:],
                    pages,
                    lists,
                    first=tiles.first,
                    start=step.dense_end,
                    end=segment.end,
                    tile_size=method.config.prefill_tile,
                    pool=self.cache.pool.buffer,
                    **method.near,
                    **heads,
                )
            )
        return (torch.cat(parts) if len(parts) > 1 else parts[0]).flatten(1)

    def _tile_lists(self, local: int, q: torch.Tensor, step: PrefillStep, method: _Method) -> torch.Tensor:
        """Slices of every tile, int32 [num_tiles, num_kv_heads or 1, list size]."""
        tiles, config = step.tiles, method.config
        assert tiles is not None
        summaries = self.cache.summary_table[local, step.segment.slot]
        samples = tiles.sampled.shape[1]
        at_once = max(1, SCORE_BYTES // (4 * samples * self.num_q_heads * tiles.num_slices))
        lists = []
        for begin in range(0, tiles.num_tiles, at_once):
            part = slice(begin, begin + at_once)
            rows = q.index_select(0, tiles.sampled[part].flatten())
            scores = method.summary.scan_rows(local, rows, summaries, num_slices=tiles.num_slices, sm_scale=self.sm_scale)
            lists.append(
                select_tiles(
                    scores.view(-1, samples, self.num_q_heads, tiles.num_slices),
                    tiles.weights[part],
                    tiles.window_slices[part],
                    config.prefill_factor * config.top_k_fine,
                    num_kv_heads=self.num_kv_heads,
                    **method.select,
                )
            )
        return torch.cat(lists) if len(lists) > 1 else lists[0]

    def close(self) -> None:
        """Give summaries and selection state back. Calling it again does nothing."""
        for method in self._methods.values():
            method.summary.free()
        self._methods.clear()
