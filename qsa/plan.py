"""Memory planner: what fits, where it goes, what to change when it does not. Reads headers only, starts nothing.

`plan_memory` is what an engine's start and `qsa plan` both call, so what is printed is what would happen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qsa.card_needs import QUANTIZED_BYTES, card_weight_bytes, card_workspace_bytes
from qsa.config import EngineConfig
from qsa.device import num_lanes, planned_device, prefill_chunk, settle, stage_cards
from qsa.errors import BudgetError, ConfigError
from qsa.host_needs import host_weight_bytes, host_workspace_bytes
from qsa.kernels.registry import SparseConfig
from qsa.kernels.sparse_decode import num_near_slices
from qsa.kernels.summaries.code import load_calibration
from qsa.link_needs import link_bytes
from qsa.memory.budget import CardMemory, StageNeed, available_host_bytes, gib, share_cards, share_host
from qsa.memory.layout import CHUNK_BYTES, KVLayout, SummaryLayout, sequence_chunks
from qsa.model.attention import summary_layout
from qsa.model.build import kv_layout, resolve_dtype, resolve_kv_dtype
from qsa.model.checkpoint.load import Checkpoint, resolve_model
from qsa.model.checkpoint.open import dummy_code_dim
from qsa.model.layer_times import LayerTimes
from qsa.model.spec import ModelSpec
from qsa.split import LayerSplit, plan_split


@dataclass(frozen=True)
class StagePlan:
    """One stage: its layers, where its memory goes, and what its pool holds. Sizes in bytes, chunks of 1 MiB.

    `sequence_chunks`: of one sequence at full length, with the configuration that needs most.
    """

    first_layer: int
    last_layer: int
    weight_bytes: int
    workspace_bytes: int
    num_chunks: int
    sequence_chunks: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.workspace_bytes + (self.num_chunks << 20)


@dataclass(frozen=True)
class MemoryPlan:
    """What every stage takes and what fits.

    Attributes:
        available_bytes:  free on the host, or on the card of each stage.
        cards:            the card of each stage; none on the CPU.
        split:            how layers are divided, and why.
        longest_sequence: tokens of a request that is alone.
    """

    model_name: str
    device: str
    available_bytes: tuple[int, ...]
    cards: tuple[CardMemory, ...]
    stages: tuple[StagePlan, ...]
    split: LayerSplit
    max_model_len: int
    max_sequences: int
    page_size: int
    longest_sequence: int

    @property
    def full_sequences(self) -> int:
        """Sequences of full length that fit at the same time."""
        return min(stage.num_chunks // stage.sequence_chunks for stage in self.stages)

    def table(self) -> str:
        """The plan for a terminal."""
        rows: list[tuple[str, ...]] = [
            ("stage", "layers", "decode step", "weights", "workspace", "KV pool", "total", "a full sequence")
        ]
        for number, (stage, time) in enumerate(zip(self.stages, self.split.cells, strict=True)):
            layers = f"{stage.first_layer}-{stage.last_layer - 1}"
            sizes = (stage.weight_bytes, stage.workspace_bytes, stage.num_chunks << 20, stage.total_bytes)
            rows.append((str(number), layers, time, *map(gib, sizes), f"{stage.sequence_chunks} of {stage.num_chunks} chunks"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([f"{self.model_name} on {self.device}, {self._available()}", *lines, *self._remarks()])

    def _available(self) -> str:
        if self.device == "cpu":
            total = sum(stage.total_bytes for stage in self.stages)
            return f"{gib(self.available_bytes[0])} available, {gib(total)} planned (a chunk takes memory once it is used)"
        found = {card.card: f"{gib(card.free_bytes)} of {gib(card.total_bytes)} free on {card.name}" for card in self.cards}
        return ", ".join(found.values())

    def _remarks(self) -> list[str]:
        lines = [
            self.split.line,
            f"a page is {self.page_size} tokens of one layer; limits.max_sequences {self.max_sequences},"
            f" model.max_model_len {self.max_model_len}",
        ]
        if len({card.card for card in self.cards}) < len(self.cards):
            lines.append("stages share a card; with pipeline.num_stages as many as there are cards it is faster")
        if self.full_sequences >= self.max_sequences:
            lines.append(f"all {self.max_sequences} sequences fit at full length")
        elif self.full_sequences:
            lines.append(
                f"{self.full_sequences} of {self.max_sequences} sequences fit at full length, the others wait or are shorter;"
                f" all would need cache.device_bytes of {self._wanted_mib()} MiB"
            )
        else:
            one_mib = max(stage.sequence_chunks for stage in self.stages)
            lines.append(
                f"a request may have {self.longest_sequence} tokens at most, not the {self.max_model_len} of"
                f" model.max_model_len; one of full length needs cache.device_bytes of {one_mib} MiB"
            )
        return lines

    def _wanted_mib(self) -> int:
        return max(stage.sequence_chunks for stage in self.stages) * self.max_sequences


def plan_memory(
    checkpoint: Checkpoint,
    config: EngineConfig,
    *,
    sparse: Mapping[int, SparseConfig],
    code_dim: int | None,
    times: LayerTimes | None = None,
    available: Sequence[int] | None = None,
    cards: Sequence[CardMemory] | None = None,
) -> MemoryPlan:
    """Share the memory between weights, workspace and KV of every stage.

    Args:
        sparse:    configurations by id, with `auto` resolved.
        code_dim:  of the model's calibration; None without one.
        times:     of layers and head, which decide on the layers of each stage (`plan_split`) where the memory allows it.
        available: free bytes of the host, one number; default: probed now.
        cards:     the card of each stage, when they compute on cards; default: those of this machine.

    Raises:
        BudgetError: it does not fit; the message says which setting to change.
        ConfigError: settings that do not go with this model.
    """
    spec = checkpoint.spec
    max_model_len = model_len(spec, config)
    _check_every_layer(sparse, spec.num_layers)
    split = plan_split(spec, config, times)
    config = settle(config)
    device = planned_device(config)
    _check_device(config, device)
    kv = kv_layout(checkpoint, resolve_kv_dtype(config.model.kv_dtype, resolve_dtype(config.model.dtype)))
    summaries = [summary_layout(entry, spec.num_kv_heads, spec.head_dim, code_dim) for entry in sparse.values()]
    for number, summary in zip(sparse, summaries, strict=True):
        if summary.slice_bytes > CHUNK_BYTES:
            raise ConfigError(
                f"sparse.{number}.block_size_fine is {summary.slice_size}: the summaries of one slice are"
                f" {summary.slice_bytes} bytes, but a chunk has {CHUNK_BYTES}; lower it"
            )
    slot_bytes = _slot_bytes(sparse, kv, max_model_len)
    if device == "cpu":
        cards = ()
        available = available if available is not None else [available_host_bytes()]
    else:
        cards = cards if cards is not None else stage_cards(config)
        available = [card.free_bytes for card in cards]

    def share(split: LayerSplit) -> tuple[StagePlan, ...]:
        needs = [
            _stage_need(checkpoint, config, kv, summaries, max_model_len, first, last, slot_bytes)
            for first, last in split.layers
        ]
        if device == "cpu":
            chunks = share_host(needs, available[0], config.cache.device_bytes)
        else:
            chunks = share_cards(needs, cards, config.cache.device_bytes)
        return tuple(
            StagePlan(first, last, need.weight_bytes, need.workspace_bytes, num_chunks, need.sequence_chunks)
            for (first, last), need, num_chunks in zip(split.layers, needs, chunks, strict=True)
        )

    try:
        stages = share(split)
    except BudgetError as error:
        if split.source != "measured" or split.counts == split.estimate:
            raise
        split = replace(split, counts=split.estimate, source="estimated", remark=f"by measured times it would not fit: {error}")
        stages = share(split)
    longest = min(
        _longest_sequence(kv, summaries, stage.last_layer - stage.first_layer, stage.num_chunks, max_model_len)
        for stage in stages
    )
    return MemoryPlan(
        model_name=config.model.name or spec.name,
        device=device,
        available_bytes=tuple(available),
        cards=tuple(cards),
        stages=stages,
        split=split,
        max_model_len=max_model_len,
        max_sequences=config.limits.max_sequences,
        page_size=kv.page_size,
        longest_sequence=longest,
    )


# what the configuration means for a model


def model_len(spec: ModelSpec, config: EngineConfig) -> int:
    """Longest sequence in tokens.

    Raises:
        ConfigError: model.max_model_len is more than the model reaches.
    """
    wanted = config.model.max_model_len or spec.max_model_len
    if wanted > spec.max_model_len:
        raise ConfigError(f"model.max_model_len is {wanted}, but {spec.name} reaches {spec.max_model_len} tokens; lower it")
    return wanted


def find_calibration(config: EngineConfig) -> Path | None:
    """The `code` calibration to use: the configured file, else one beside the model, else one shipped with QSA."""
    if config.model.calibration is not None:
        return Path(config.model.calibration)
    model = resolve_model(config.model.path)
    shipped = Path(__file__).resolve().parent.parent / "model" / "data"
    candidates = (calibration_beside(model), shipped / f"{model.name}.code.safetensors")
    return next((path for path in candidates if path.is_file()), None)


def calibration_beside(model: Path) -> Path:
    """Where a model's own calibration lies: beside its file or folder."""
    return model.with_name(f"{model.name}.code.safetensors")


def sparse_configs(
    config: EngineConfig, calibration: Path | None, spec: ModelSpec | None = None
) -> tuple[dict[int, SparseConfig], int | None]:
    """All sparse configurations by id, with `auto` resolved by what the calibration offers, and its code_dim.

    spec: of the model; one of random weights without a calibration gets one that is as random.
    """
    loaded = load_calibration(calibration, 0, 1) if calibration else None
    code_dim = loaded.code_dim if loaded else None
    if loaded is None and spec is not None and config.model.load_format == "dummy":
        code_dim = dummy_code_dim(spec)
    scan_every = loaded.scan_every if loaded else None
    sparse = {number: entry.resolve(code_dim is not None, scan_every) for number, entry in config.sparse.items()}
    return sparse, code_dim


def _check_every_layer(sparse: Mapping[int, SparseConfig], num_layers: int) -> None:
    for number, entry in sparse.items():
        for name in ("reselect_every", "candidate_factor"):
            values = getattr(entry, name)
            if isinstance(values, tuple) and len(values) != num_layers and not entry.dense:
                raise ConfigError(
                    f"sparse.{number}.{name} has {len(values)} entries, but the model has {num_layers} layers;"
                    " give one number, or one a layer"
                )


# parts of plan_memory


def _check_device(config: EngineConfig, device: str) -> None:
    """Refuse on the CPU what is computed on cards only."""
    model = config.model
    if device == "cpu" and model.kv_dtype == "fp8":
        raise ConfigError("model.kv_dtype is fp8, which is for cards; set it to auto, or pipeline.device to cuda")
    if device == "cpu" and model.quantization == "fp8":
        raise ConfigError("model.quantization is fp8, which is for cards; use int8 or int4, or set pipeline.device to cuda")
    refused = ("float32",) if device == "cuda" else ("float32", "float16")
    if model.quantization in QUANTIZED_BYTES and model.dtype in refused:
        raise ConfigError(
            f"model.quantization is {model.quantization}, which does not go with model.dtype {model.dtype}; use bfloat16"
        )


def _stage_need(
    checkpoint: Checkpoint,
    config: EngineConfig,
    kv: KVLayout,
    summaries: Sequence[SummaryLayout],
    max_model_len: int,
    first: int,
    last: int,
    slot_bytes: int,
) -> StageNeed:
    def chunks(seq_len: int) -> int:
        return max(sequence_chunks(kv, summary, last - first, seq_len) for summary in summaries)

    if config.pipeline.device == "cuda":
        weights = card_weight_bytes(checkpoint, config, first, last)
        finest = min(summary.slice_size for summary in summaries)
        workspace = card_workspace_bytes(checkpoint.spec, config, prefill_chunk(config), max_model_len, finest)
    else:
        weights = host_weight_bytes(checkpoint, config, first, last)
        workspace = host_workspace_bytes(checkpoint.spec, config, prefill_chunk(config))
    is_first, is_last = first == 0, last == checkpoint.spec.num_layers
    row_bytes = checkpoint.spec.hidden_size * resolve_dtype(config.model.dtype).itemsize
    workspace += link_bytes(
        config,
        is_first=is_first,
        is_last=is_last,
        lanes=num_lanes(config),
        prefill_chunk=prefill_chunk(config),
        row_bytes=row_bytes,
    )
    full = chunks(max_model_len)
    return StageNeed(
        weight_bytes=weights,
        workspace_bytes=workspace + (last - first) * config.limits.max_sequences * slot_bytes,
        wanted_chunks=full * config.limits.max_sequences,
        sequence_chunks=full,
        least_chunks=chunks(1),
    )


def _slot_bytes(sparse: Mapping[int, SparseConfig], kv: KVLayout, max_model_len: int) -> int:
    """What a layer keeps of every sequence beside its KV: the table of its pages, and what each configuration has selected."""
    numbers = kv.num_pages(max_model_len)
    for entry in sparse.values():
        if not entry.dense:
            near_and_pool = num_near_slices(entry.window_size, entry.block_size_fine) + entry.max_pool_size
            numbers += kv.num_kv_heads * (2 * near_and_pool + entry.top_k_fine)
    return 8 * numbers


def _longest_sequence(
    kv: KVLayout, summaries: Sequence[SummaryLayout], num_layers: int, num_chunks: int, max_model_len: int
) -> int:
    """Most tokens, up to max_model_len, of a sequence that has the pool to itself."""
    low, high = 0, max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        fits = all(sequence_chunks(kv, summary, num_layers, middle) <= num_chunks for summary in summaries)
        low, high = (middle, high) if fits else (low, middle - 1)
    return low
