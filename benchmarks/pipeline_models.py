"""Stage models for measuring the pipeline: one that computes nothing, and one whose prompts are in the cache by magic.

Both are ModelBuilders for `Engine.start(..., build=...)`; they live here because nothing in the product uses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from qsa.actors.stage_spec import StageSpec
from qsa.actors.stage_steps import Model, build_model
from qsa.config import EngineConfig
from qsa.memory.kv_cache import KVCache
from qsa.memory.layout import CHUNK_BYTES, KVLayout, SummaryLayout
from qsa.model.batch import Segment

EMPTY_HIDDEN_SIZE, EMPTY_VOCAB_SIZE = 576, 64
FILLED = 100  # added to the id of a sparse configuration: its prompts are filled in, not computed
TEMPLATE_CHUNKS = 64  # of random bytes that the pool's chunks are copied from


class _NoAttention:
    """Opens and releases slots, and does nothing else."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    def summary_layout(self, sparse_id: int) -> SummaryLayout:
        return SummaryLayout(64, 0)

    def open(self, slot: int, sparse_id: int) -> None:
        self._cache.open(slot, self.summary_layout(sparse_id))

    def release(self, slot: int) -> None:
        self._cache.release(slot)

    def take_stats(self) -> list[Any]:
        return []


class EmptyModel:
    """A stage that returns what it must, without computing it, in memory of its device."""

    dtype = torch.bfloat16
    weight_bytes = 0
    hidden_size = EMPTY_HIDDEN_SIZE

    def __init__(self, spec: StageSpec) -> None:
        self._is_last, device = spec.is_last, torch.device(spec.device)
        self.cache = KVCache(
            KVLayout(1, 64, 2),
            self.dtype,
            num_layers=1,
            num_chunks=spec.num_chunks,
            max_sequences=spec.max_sequences,
            max_seq_len=spec.max_model_len,
            device=device,
        )
        self.attention = _NoAttention(self.cache)
        self._hidden = torch.zeros(max(1024, spec.prefill_chunk), EMPTY_HIDDEN_SIZE, dtype=self.dtype, device=device)
        self._logits = torch.zeros(64, EMPTY_VOCAB_SIZE, device=device)

    def forward(self, segments: Any, token_ids: Any, hidden: Any, sample_rows: Any) -> torch.Tensor:
        num_tokens = sum(segment.extend_len for segment in segments)
        return self._logits[: len(sample_rows)] if self._is_last else self._hidden[:num_tokens]

    def close(self) -> None:
        self.cache.close()


def with_filled(config: EngineConfig) -> EngineConfig:
    """The configuration with a second id, FILLED higher, of every sparse configuration; for `build_filling`."""
    filled = {sparse_id + FILLED: settings for sparse_id, settings in config.sparse.items()}
    return config.model_copy(update={"sparse": {**config.sparse, **filled}})


def build_filling(spec: StageSpec) -> Model:
    """The product's model; sequences of a FILLED configuration get random K, V and summaries in place of a prefill."""
    real = {sparse_id: sparse for sparse_id, sparse in spec.sparse.items() if sparse_id < FILLED}
    return FillingModel(build_model(replace(spec, sparse=real)), spec)


build_filling.has_real_layers = True  # type: ignore[attr-defined]  # so the engine measures them


class _RealIds:
    """The inner model's attention under the higher ids too."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def summary_layout(self, sparse_id: int) -> SummaryLayout:
        layout: SummaryLayout = self._inner.summary_layout(sparse_id % FILLED)
        return layout

    def open(self, slot: int, sparse_id: int) -> None:
        self._inner.open(slot, sparse_id % FILLED)


class FillingModel:
    """A model whose prefill of FILLED configurations takes no time; decode steps, and all others, are the inner model's."""

    def __init__(self, inner: Any, spec: StageSpec) -> None:
        self._inner, self._spec = inner, spec
        self.attention = _RealIds(inner.attention)
        buffer, dtype = inner.cache.pool.buffer, inner.cache.dtype
        shape = (TEMPLATE_CHUNKS, CHUNK_BYTES // dtype.itemsize)
        self._pages = torch.randn(shape, device=buffer.device).to(dtype).view(torch.uint8)
        self._codes = torch.randint(0, 255, (TEMPLATE_CHUNKS, CHUNK_BYTES), dtype=torch.uint8, device=buffer.device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(
        self,
        segments: Sequence[Segment],
        token_ids: torch.Tensor | None,
        hidden: torch.Tensor | None,
        sample_rows: Sequence[int],
    ) -> torch.Tensor:
        if not any(segment.is_prefill and segment.sparse_id >= FILLED for segment in segments):
            real = [replace(segment, sparse_id=segment.sparse_id % FILLED) for segment in segments]
            out: torch.Tensor = self._inner.forward(real, token_ids, hidden, sample_rows)
            return out
        for segment in segments:
            self._fill(segment)
        inner, device = self._inner, self._inner.cache.pool.buffer.device
        if self._spec.is_last:
            return torch.zeros(len(sample_rows), inner.spec.vocab_size, device=device)
        num_tokens = sum(segment.extend_len for segment in segments)
        return torch.zeros(num_tokens, inner.spec.hidden_size, dtype=inner.dtype, device=device)

    def prepare_decode(self, segments: Sequence[Segment]) -> Any:
        """The inner model's, which only some have."""
        prepare = getattr(self._inner, "prepare_decode", None)
        real = [replace(segment, sparse_id=segment.sparse_id % FILLED) for segment in segments]
        return None if prepare is None else prepare(real)

    def _fill(self, segment: Segment) -> None:
        """Room for the segment's tokens, with random bytes in the chunks that are new."""
        cache, slot = self._inner.cache, segment.slot
        layout = self.attention.summary_layout(segment.sparse_id)
        cache.extend(slot, segment.end)
        for table, template, count in (
            (cache.page_chunks, self._pages, cache.kv.num_pages),
            (cache.summary_chunks, self._codes, layout.num_chunks),
        ):
            new = table[:, slot, count(segment.start) : count(segment.end)].flatten()
            for part in new.split(TEMPLATE_CHUNKS):
                cache.pool.buffer.index_copy_(0, part, template[: len(part)])
