"""What layers, embedding and head of a model cost in a decode step here, measured on a few real layers of it.

Nothing is timed by itself: a stage of one layer is compared with one of several, with one that has the embedding too, and
with one that has head and sampler. All of them are there at the same time and take turns, so that a machine that gets slower
gets slower for all of them. A card counts its own time: it is kept busy until its host has launched the whole step, as it is
when steps follow each other. On the CPU other memory is read between two steps: in a whole stage a layer does not find its
weights in the cache, since those of all others have been there meanwhile. What disturbs a step only makes it slower, so of all
its times the lower quartile counts.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from qsa.errors import ConfigError
from qsa.kernels.registry import SparseConfig
from qsa.kernels.summaries.code import load_calibration
from qsa.memory.layout import sequence_chunks
from qsa.model.attention import summary_layout
from qsa.model.batch import Segment
from qsa.model.build import build_stage, kv_layout, resolve_dtype, resolve_kv_dtype
from qsa.model.checkpoint.load import Checkpoint
from qsa.model.checkpoint.open import DummyCheckpoint, dummy_calibration, dummy_code_dim
from qsa.model.sampler import SampleRow, begin_sample

CPU_CONTEXT, CARD_CONTEXT = 8192, 65536  # half of it, or of model.max_model_len, is the context that is measured at
MORE_LAYERS = 3  # that the longer stage has more than the shorter one
WARM_STEPS = 2  # the first one scans in every layer
MIN_ROUNDS, MAX_ROUNDS = 6, 24  # even numbers: there are two halves
MAX_STEPS = WARM_STEPS + MAX_ROUNDS
ROUNDS_S = 0.5  # rounds after the first few end after so long
QUANTILE = 0.25
MAX_BETWEEN_BYTES = 48 << 20  # read between two steps on the CPU; not more than half of the model has
NEVER = 1 << 30  # steps between two scans
AHEAD_CYCLES = 4_000_000  # of a card, about 2 ms: longer than a host takes to launch a step
HEAD_SAMPLING = SampleRow(temperature=1.0)

Layers = tuple[int, int]  # the first one and the one after the last


@dataclass(frozen=True)
class LayerTimes:
    """Times of a decode step of `batch` sequences of `context` tokens, in milliseconds.

    Attributes:
        layer_ms: of each layer, its scans as often as the configuration has them.
        head_ms:  of the last norm, the head and the sampler.
        first_ms: of the embedding.
        device:   where it was measured.
        step_ms:  what a step takes on any stage besides.
        spread:   by which share one half of the measurements differs from the other.
    """

    layer_ms: tuple[float, ...]
    head_ms: float
    first_ms: float
    batch: int
    context: int
    device: str
    step_ms: float = 0.0
    spread: float = 0.0

    def __str__(self) -> str:
        return (
            f"a layer {fmean(self.layer_ms):.3f} ms, head and sampler {self.head_ms:.3f}, embedding {self.first_ms:.3f}, the"
            f" step itself {self.step_ms:.3f} (batch {self.batch}, {self.context} tokens of context, {self.device})"
        )


@dataclass(frozen=True)
class _Kind:
    """A kind of layer: slices that its scan proposes as a multiple of a list, and whether it scans in every step or in none."""

    factor: int
    scans: bool


def measure_layer_times(
    checkpoint: Checkpoint,
    *,
    batch: int,
    sparse: SparseConfig,
    max_model_len: int,
    calibration_path: Path | None = None,
    dtype: str = "auto",
    kv_dtype: str = "auto",
    quantization: str = "auto",
    device: str = "cpu",
    backend: str | None = None,
    num_threads: int | None = None,
) -> LayerTimes:
    """Build a few layers as `build_stage` would for a stage, run decode steps on them, and give everything back.

    Layers differ in how often they scan and in how many slices they propose. One that scans in every step and one that never
    does are measured, for each number of proposed slices; a layer of the model is the latter and its share of the difference.

    Args:
        batch:       sequences of a step: those of a lane.
        sparse:      the configuration that they have.
        backend:     as `build_stage` takes it.
        num_threads: CPU threads of the operators; None: as many as there are now.

    Raises:
        ConfigError: the model has fewer than three layers, or reaches too few tokens.
        QSAError:    as `build_stage`.
    """
    spec, is_cpu = checkpoint.spec, device == "cpu"
    if spec.num_layers < 3:
        raise ConfigError(f"{spec.name} has {spec.num_layers} layers, but telling a layer from what surrounds it takes 3")
    context = min(CPU_CONTEXT if is_cpu else CARD_CONTEXT, max_model_len) // 2 - MAX_STEPS
    if context < 1:
        raise ConfigError(f"measuring takes {2 * MAX_STEPS} tokens, but model.max_model_len is {max_model_len}")
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads or threads)
    is_random = isinstance(checkpoint, DummyCheckpoint) and calibration_path is None
    loaded = load_calibration(calibration_path, 0, 1) if calibration_path is not None else None
    code_dim = loaded.code_dim if loaded is not None else dummy_code_dim(spec) if is_random else None
    kv = kv_layout(checkpoint, resolve_kv_dtype(kv_dtype, resolve_dtype(dtype)))
    chunks = sequence_chunks(kv, summary_layout(sparse, spec.num_kv_heads, spec.head_dim, code_dim), 1, context + MAX_STEPS)
    parts = _Parts.of(spec.num_layers)
    kinds = _kinds(sparse, spec.num_layers)
    stages: dict[Layers, _Stage] = {}
    try:
        for layers in parts.all:
            variants = kinds if layers == parts.longer else kinds[:1]
            model = build_stage(
                checkpoint,
                first_layer=layers[0],
                last_layer=layers[1],
                num_chunks=chunks * batch * len(variants) * (layers[1] - layers[0]),
                max_sequences=batch * len(variants),
                max_model_len=context + MAX_STEPS if is_cpu else max_model_len,  # on cards kernels are made for the length
                sparse={
                    number: _variant(sparse, kinds[0], kind, layers, spec.num_layers) for number, kind in enumerate(variants)
                },
                calibration_path=calibration_path,
                calibration=dummy_calibration(spec, *layers) if is_random else None,
                dtype=dtype,
                kv_dtype=kv_dtype,
                quantization=quantization,
                device=device,
                backend=backend,
            )
            stages[layers] = _Stage(model, layers, len(variants), batch, context)
        between = min(MAX_BETWEEN_BYTES, checkpoint.stage_weight_bytes(0, spec.num_layers) // 2) if is_cpu else 0
        figures = _take_turns(stages, torch.zeros(between // 4))
    finally:
        for stage in stages.values():
            stage.close()
        stages.clear()
        torch.set_num_threads(threads)
        if not is_cpu:
            gc.collect()  # a model and its decode steps know each other
            torch.cuda.empty_cache()
    return _times(figures, parts, kinds, sparse, spec.num_layers, batch=batch, context=context, device=device)


@dataclass(frozen=True)
class _Parts:
    """Layers of the stages that are compared: a shorter and a longer one, and three of one layer."""

    shorter: Layers
    longer: Layers
    first: Layers
    middle: Layers
    last: Layers

    @classmethod
    def of(cls, num_layers: int) -> _Parts:
        begin = 1 if num_layers > 3 else 0  # else there are not two without embedding and head
        more = min(MORE_LAYERS, num_layers - 2 - begin)
        last = (num_layers - 1, num_layers)
        return cls((begin, begin + 1), (begin, begin + 1 + more), (0, 1), (1, 2), last)

    @property
    def all(self) -> list[Layers]:
        return list(dict.fromkeys((self.shorter, self.longer, self.first, self.middle, self.last)))

    @property
    def num_more(self) -> int:
        return self.longer[1] - self.shorter[1]


def _kinds(sparse: SparseConfig, num_layers: int) -> list[_Kind]:
    """Kinds of layers that are measured; the first one is the reference, which the one layer of a short stage has."""
    if sparse.dense:
        return [_Kind(1, True)]
    factors = dict.fromkeys(_factor(sparse, layer) for layer in range(num_layers))
    rarely = [layer for layer in range(num_layers) if sparse.scan_interval(layer) > 1]
    seldom = dict.fromkeys(_factor(sparse, layer) for layer in rarely)
    return [*(_Kind(factor, True) for factor in factors), *(_Kind(factor, False) for factor in seldom)]


def _factor(sparse: SparseConfig, layer: int) -> int:
    return sparse.pool_size(layer) // sparse.top_k_fine


def _variant(sparse: SparseConfig, reference: _Kind, kind: _Kind, layers: Layers, num_layers: int) -> SparseConfig:
    """The configuration with layers of one kind after a stage's first, which is of the reference kind.

    So a card has a layer that scans more often than others, beside which those that never scan launch no scan.
    """
    if sparse.dense:
        return sparse
    all_of = [reference if layer <= layers[0] else kind for layer in range(num_layers)]
    return replace(
        sparse,
        reselect_every=tuple(1 if one.scans else NEVER for one in all_of),
        candidate_factor=tuple(one.factor for one in all_of) if sparse.rerank == "exact" else 1,
    )


class _Stage:
    """A stage and its open sequences, some of every kind. The state: how long these are."""

    def __init__(self, model: Any, layers: Layers, num_kinds: int, batch: int, context: int) -> None:
        """Open the sequences, over K and V of zeros."""
        self._model, self._kinds, self._batch = model, num_kinds, batch
        self._device = torch.device(model.device)
        cache, spec = model.cache, model.spec
        cache.pool.buffer.zero_()
        for slot in range(num_kinds * batch):
            model.attention.open(slot, slot // batch)
            cache.extend(slot, context)
        self._places = [context] * num_kinds
        self._token_ids = torch.arange(batch) if layers[0] == 0 else None
        self._hidden = None
        if layers[0]:
            self._hidden = torch.randn(batch, spec.hidden_size).to(self._device, model.dtype)
        self._rows = list(range(batch)) if layers[1] == spec.num_layers else []
        capture = getattr(model, "capture", None)
        for kind in range(num_kinds):
            if capture is not None:
                capture(kind, batch)
            for _ in range(WARM_STEPS):
                self.step_ms(kind)

    @property
    def kinds(self) -> range:
        return range(self._kinds)

    def step_ms(self, kind: int) -> float:
        """Run the next decode step of the sequences of a kind; how long it took."""
        place, batch = self._places[kind], self._batch
        self._places[kind] += 1
        segments = [Segment(slot, place, place + 1, kind, False) for slot in range(kind * batch, (kind + 1) * batch)]
        clock = _CardClock(self._device) if self._device.type == "cuda" else _HostClock()
        out = self._model.forward(segments, self._token_ids, self._hidden, self._rows)
        choices = begin_sample(out, [replace(HEAD_SAMPLING, position=place) for _ in self._rows]) if self._rows else None
        took_ms = clock.stop_ms()
        if choices is not None:
            choices.wait()
        self._model.attention.take_stats()
        return took_ms

    def close(self) -> None:
        self._model.close()


class _HostClock:
    """Runs from its making on."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def stop_ms(self) -> float:
        return (time.perf_counter() - self._began) * 1e3


class _CardClock:
    """The same on a card, whose launches wait until the host has made all of them."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(AHEAD_CYCLES)  # private, and the only work whose length does not depend on the card's memory
        self._begin.record()

    def stop_ms(self) -> float:
        self._end.record()
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end))


Figures = dict[tuple[Layers, int], list[float]]  # by a stage's layers and the kind of its sequences: ms of each round


def _take_turns(stages: dict[Layers, _Stage], other_memory: torch.Tensor) -> Figures:
    """Rounds in which every stage runs a step of every kind. other_memory: read before each of them."""
    figures: Figures = {(layers, kind): [] for layers, stage in stages.items() for kind in stage.kinds}
    began = time.perf_counter()
    for number in range(MAX_ROUNDS):
        if number >= MIN_ROUNDS and number % 2 == 0 and time.perf_counter() - began > ROUNDS_S:
            break
        for (layers, kind), found in figures.items():
            other_memory.sum()
            found.append(stages[layers].step_ms(kind))
    return figures


def _times(
    figures: Figures, parts: _Parts, kinds: list[_Kind], sparse: SparseConfig, num_layers: int, **where: Any
) -> LayerTimes:
    """All rounds as LayerTimes, and how those from every other round differ from the rest's."""

    def solve(take: Callable[[list[float]], list[float]]) -> LayerTimes:
        found = {key: float(np.quantile(take(values), QUANTILE)) for key, values in figures.items()}
        one, middle = found[parts.shorter, 0], found[parts.middle, 0]
        each = {kind: (found[parts.longer, number] - one) / parts.num_more for number, kind in enumerate(kinds)}
        return LayerTimes(
            layer_ms=tuple(_layer_ms(each, sparse, layer) for layer in range(num_layers)),
            head_ms=max(0.0, found[parts.last, 0] - middle),
            first_ms=max(0.0, found[parts.first, 0] - middle),
            step_ms=max(0.0, middle - each[kinds[0]]),
            **where,
        )

    times = solve(lambda values: values)
    halves = [solve(lambda values, half=half: values[half::2]) for half in range(2)]  # type: ignore[misc]
    totals = [sum(half.layer_ms) + half.head_ms for half in halves]
    spread = abs(totals[0] - totals[1]) / max(max(totals), 1e-9)
    return replace(times, spread=spread)


def _layer_ms(each: dict[_Kind, float], sparse: SparseConfig, layer: int) -> float:
    if sparse.dense:
        return each[_Kind(1, True)]
    factor, interval = _factor(sparse, layer), sparse.scan_interval(layer)
    scans = each[_Kind(factor, True)]
    if interval == 1:
        return scans
    quiet = min(scans, each[_Kind(factor, False)])
    return quiet + (scans - quiet) / interval
