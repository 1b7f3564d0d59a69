"""Every setting of the engine: one tree of frozen pydantic models, read from one YAML file.

An unknown key is an error, nothing is overwritten after validation, and what depends on other values is a property.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from qsa.errors import ConfigError
from qsa.kernels.registry import DEFAULT_SPARSE_ID, DENSE_ID, SparseConfig

MIB = 1 << 20


class FrozenModel(BaseModel):
    """Every configuration object: immutable, a misspelt key is an error, and so is a number that is none."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelConfig(FrozenModel):
    path: str = Field("default", description="`default`, a GGUF file, a model folder, or a Hugging Face id.")
    name: str | None = Field(None, description="Name that clients use; derived from `path` when not given.")
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="auto: read the weights; dummy: random ones, from config.json alone, for benchmarks."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Type of activations and unquantised weights; auto: bfloat16."
    )
    quantization: Literal["auto", "none", "int8", "int4", "fp8"] = Field(
        "auto",
        description="auto: keep the file's low-bit weights packed where a kernel exists; none: dequantise; int8, int4, fp8"
        " (cards): also quantise float weights while they are read, the layers' so, the head's to 8 bits.",
    )
    max_model_len: int | None = Field(None, ge=2, description="Longest sequence in tokens; default: the model's own.")
    calibration: str | None = Field(
        None, description="safetensors file of `qsa calibrate`; default: beside the model, then the shipped ones."
    )
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8"] = Field(
        "auto", description="Type of K and V; auto: as `dtype`; fp8: e4m3 with a scale a head (cards)."
    )


class CacheConfig(FrozenModel):
    device_bytes: int | None = Field(
        None, gt=0, description="Memory for KV chunks on each stage, in bytes, a multiple of 1 MiB; default: planned."
    )

    @field_validator("device_bytes", mode="before")
    @classmethod
    def _no_units(cls, value: Any) -> Any:
        if isinstance(value, str) and not value.strip().isdecimal():
            raise ValueError(f"wants a whole number of bytes, such as {1 << 30} for 1 GiB, got {value!r}")
        return value

    @field_validator("device_bytes")
    @classmethod
    def _whole_chunks(cls, value: int | None) -> int | None:
        if value is not None and value % MIB:
            raise ValueError(f"device_bytes must be a multiple of 1 MiB, such as {-(-value // MIB) * MIB}, got {value}")
        return value


# How slices are chosen, by name; figures of each in docs/attention.md. A preset says nothing of how many are attended.
PRESETS: dict[str, dict[str, Any]] = {
    "quality": {},  # the defaults
    "balanced": {"candidate_factor": 4, "candidate_factor_rare": 2, "prefill_tile": 128, "prefill_samples": 2},
    "fast": {"candidate_factor": 3, "candidate_factor_rare": 1, "prefill_tile": 128, "prefill_samples": 2},
}


class SparseSettings(FrozenModel):
    """One sparse-attention configuration; the fields are those of `qsa.kernels.registry.SparseConfig`."""

    preset: Literal["quality", "balanced", "fast"] | None = Field(
        None, description="Fills in fields that are not given: the same choices, ever cheaper."
    )
    dense: bool = Field(False, description="Attend to everything; the other fields are ignored.")
    window_size: int = Field(512, gt=0, description="Last tokens, always attended.")
    sink_size: int = Field(32, gt=0, description="First tokens, always attended.")
    block_size_coarse: int = Field(1024, gt=0, description="Tokens per block.")
    block_size_fine: int = Field(64, gt=0, description="Tokens per slice.")
    top_k_coarse: int = Field(32, gt=0, description="Blocks kept by the first selection.")
    top_k_fine: int = Field(16, gt=0, description="Slices kept per query and list.")
    summary: Literal["auto", "code", "sketch", "minmax", "mean"] = Field(
        "auto", description="What a slice is scored by; auto: code when the model is calibrated, else sketch."
    )
    propose: Literal["slices", "blocks"] = Field("slices", description="What the scan proposes.")
    candidate_factor: int | tuple[int, ...] = Field(
        4, description="Proposed slices as a multiple of `top_k_fine`; one number, or one a layer."
    )
    candidate_factor_rare: int | None = Field(
        None, gt=0, description="The same for the layers that scan most rarely; default: `candidate_factor`."
    )
    rerank: Literal["exact", "none"] = Field("exact", description="How the final list is chosen from the proposed pool.")
    reselect_every: int | tuple[int, ...] | Literal["auto"] = Field(
        "auto", description="Decode steps between two scans; one number, one a layer, or auto: from the calibration."
    )
    list_per: Literal["kv_head", "layer"] = Field("kv_head", description="One list a KV head, or one a layer.")
    prefill_tile: int = Field(64, gt=0, description="Queries that share one list during prefill.")
    prefill_factor: int = Field(2, gt=0, description="A tile's list is this many times `top_k_fine` slices.")
    prefill_samples: int = Field(16, gt=0, description="Queries of a tile that choose its list, its last one among them.")

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        preset = dict(PRESETS.get(str(value.get("preset")), {}))
        if isinstance(value.get("candidate_factor"), list | tuple):  # one a layer says it all
            preset.pop("candidate_factor_rare", None)
        return {**preset, **value}

    @model_validator(mode="after")
    def _one_way_of_saying(self) -> Self:
        if self.candidate_factor_rare is not None and not isinstance(self.candidate_factor, int):
            raise ValueError("candidate_factor has one number a layer, so candidate_factor_rare has no use; drop one")
        return self

    def resolve(self, calibrated: bool, scan_every: tuple[int, ...] | None) -> SparseConfig:
        """The operator's view, with `auto` replaced by what the calibration offers."""
        values: dict[str, Any] = self.model_dump(exclude={"preset", "candidate_factor_rare"})
        if self.summary == "auto":
            values["summary"] = "code" if calibrated else "sketch"
        elif self.summary == "code" and not calibrated and not self.dense:
            raise ConfigError(
                "sparse.summary is code, but the model has no calibration file: run `qsa calibrate` or use sketch"
            )
        if self.reselect_every == "auto":
            values["reselect_every"] = scan_every or 1
        intervals, factor, rare = values["reselect_every"], self.candidate_factor, self.candidate_factor_rare
        if rare is not None and isinstance(factor, int) and isinstance(intervals, tuple):
            rarest = max(intervals) if min(intervals) < max(intervals) else None
            values["candidate_factor"] = tuple(rare if every == rarest else factor for every in intervals)
        try:
            return SparseConfig(**values)
        except ValueError as error:
            raise ConfigError(f"{error} (preset {self.preset})" if self.preset else str(error)) from None


class LimitsConfig(FrozenModel):
    max_sequences: int = Field(8, gt=0, description="Sequences that hold KV at the same time.")
    max_waiting: int = Field(64, ge=0, description="Requests that may wait; one more is refused as busy (429).")
    prefill_chunk: int | None = Field(
        None,
        gt=0,
        description="Tokens of a prompt computed in one step, a multiple of 64; default: 512 on the CPU, 8192 on cards.",
    )
    busy_chunk: int | None = Field(
        None,
        gt=0,
        description="The same while others decode, whose tokens wait for it; default: 1536 on cards, else prefill_chunk.",
    )
    growth_horizon: int = Field(256, gt=0, description="Tokens of growth that admission keeps room for.")
    max_body_bytes: int = Field(32 * MIB, gt=0, description="Largest HTTP request body.")

    @field_validator("prefill_chunk", "busy_chunk")
    @classmethod
    def _whole_tiles(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value % 64:
            raise ValueError(f"{info.field_name} must be a multiple of 64, got {value}")
        return value

    @model_validator(mode="after")
    def _busy_is_smaller(self) -> Self:
        if self.busy_chunk is not None and self.prefill_chunk is not None and self.busy_chunk > self.prefill_chunk:
            raise ValueError(f"busy_chunk must not exceed prefill_chunk ({self.prefill_chunk}), got {self.busy_chunk}")
        return self


class PipelineConfig(FrozenModel):
    num_stages: int = Field(2, gt=0, description="Stage actors; each holds a run of layers.")
    lanes: int | None = Field(
        None, gt=0, le=2, description="Micro-batches that decodes are divided into; default: 2, and 1 where there is one stage."
    )
    burst_steps: int | None = Field(
        None,
        gt=0,
        description="Decode steps that stages run by themselves before the scheduler plans again, at most; default: 256 on"
        " cards, 32 on the CPU. Whoever has to wait for a burst's end has it ended early.",
    )
    transport: Literal["auto", "object_store", "rdt", "p2p"] = Field(
        "auto",
        description="How hidden states travel between stages: Ray's object store, its direct transport (NCCL, gloo), or point"
        " to point (torch.distributed); auto: chosen at start by what is there, and said.",
    )
    split: tuple[int, ...] | None = Field(
        None, description="Layers of each stage; default: so that the stages take equally long, as measured at the start."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where stages compute; auto: cuda where PyTorch, Triton and an NVIDIA card are there, else cpu."
    )
    gpus_per_stage: float | None = Field(
        None,
        ge=0.0001,
        le=1,
        description="Cards that Ray reserves for a stage; default: 1, or a share where stages outnumber the cards.",
    )
    threads_per_stage: int | None = Field(None, gt=0, description="CPU threads of a stage; default: cores / stages.")
    cpus_per_stage: float = Field(0.5, ge=0, description="CPUs that Ray reserves for a stage (a reservation, not a limit).")
    placement_strategy: Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"] = Field(
        "PACK",
        description="How stages are placed on the nodes of the Ray cluster, in Ray's words. PACK: on as few as have room;"
        " SPREAD: on as many as there are; STRICT_PACK: all on one, STRICT_SPREAD: each on one of its own, or no start.",
    )
    start_timeout_s: float = Field(
        120.0, gt=0, description="Longest start of all actors, and longest silence of their warm-up, in seconds."
    )


class ServerConfig(FrozenModel):
    host: str = Field("127.0.0.1", description="Address the HTTP server listens on.")
    port: int = Field(8000, gt=0, lt=65536, description="Port of the HTTP server.")
    api_keys: tuple[str, ...] = Field((), description="Accepted bearer tokens; empty: no authentication.")
    keepalive_s: float = Field(5.0, gt=0, description="A silent stream sends an SSE comment this often, in seconds.")
    drain_s: float = Field(30.0, ge=0, description="Longest wait for open streams at shutdown, in seconds.")
    default_max_tokens: int | None = Field(None, gt=0, description="max_tokens of a request without it; default: what fits.")

    @field_validator("api_keys")
    @classmethod
    def _no_empty_key(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(not key.strip() for key in value):
            raise ValueError("a key must not be empty: requests without a key would have it")
        return value


def _default_sparse() -> dict[int, SparseSettings]:
    return {DENSE_ID: SparseSettings(dense=True), DEFAULT_SPARSE_ID: SparseSettings()}


class EngineConfig(FrozenModel):
    """The whole tree. `EngineConfig()` serves the default model on this machine."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    sparse: dict[int, SparseSettings] = Field(
        default_factory=_default_sparse,
        description="Sparse-attention configurations by id, laid over the built-in 0 (dense) and 1; 0 must stay dense.",
    )
    default_sparse_id: int = Field(DEFAULT_SPARSE_ID, description="Configuration of a request that names none.")
    limits: LimitsConfig = LimitsConfig()
    pipeline: PipelineConfig = PipelineConfig()
    server: ServerConfig = ServerConfig()

    @field_validator("sparse", mode="before")
    @classmethod
    def _over_built_in(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {**_default_sparse(), **{int(key) if str(key).isdigit() else key: item for key, item in value.items()}}

    @model_validator(mode="after")
    def _known_ids(self) -> Self:
        if DENSE_ID not in self.sparse or not self.sparse[DENSE_ID].dense:
            raise ValueError(f"sparse.{DENSE_ID} must be there and dense: it is the baseline")
        if self.default_sparse_id not in self.sparse:
            raise ValueError(f"default_sparse_id is {self.default_sparse_id}, but sparse has {sorted(self.sparse)}")
        return self

    @model_validator(mode="after")
    def _split_matches(self) -> Self:
        split = self.pipeline.split
        if split is not None and len(split) != self.pipeline.num_stages:
            raise ValueError(f"pipeline.split has {len(split)} entries, but pipeline.num_stages is {self.pipeline.num_stages}")
        return self


TYPES = {"int": "a whole number", "tuple[int, ...]": "a list with one a layer", "literal['auto']": "auto"}  # by pydantic's tags


def _setting_names(location: tuple[str | int, ...]) -> list[str]:
    """The settings of the section that an error's location lies in."""
    model: Any = EngineConfig
    for part in location[:-1]:
        model = SparseSettings if model is SparseSettings or part == "sparse" else model.model_fields[str(part)].annotation
    return list(model.model_fields)


def explain(error: ValidationError) -> str:
    """A validation error as one line a setting: full name, what is wrong, what was found."""
    lines: list[str] = []
    types: dict[str, list[str]] = {}  # of settings that may have several, which have an error a type
    for item in error.errors():
        tag = next((place for place, part in enumerate(item["loc"]) if part in TYPES), None)
        name = ".".join(str(part) for part in item["loc"][:tag]) or "config"
        if tag is not None:
            text = TYPES[str(item["loc"][tag])]
            if name not in types:
                lines.append(f"{name}: wants {{{name}}}, got {item['input']!r}")
            if text not in types.setdefault(name, []):
                types[name].append(text)
            continue
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            near = difflib.get_close_matches(str(item["loc"][-1]), _setting_names(item["loc"]), n=1)
            lines.append(f"{name}: there is no such setting" + (f", did you mean {near[0]}?" if near else ""))
        elif item["type"] == "value_error" or "got" in message:
            lines.append(f"{name}: {message}" if item["loc"] else message)
        else:
            lines.append(f"{name}: {message}, got {item['input']!r}")
    text = "; ".join(lines)
    for name, wanted in types.items():
        text = text.replace(f"{{{name}}}", " or ".join(wanted), 1)
    return text


def make_config(values: dict[str, Any]) -> EngineConfig:
    """Validate a nested dict of settings.

    Raises:
        ConfigError: naming every wrong setting in one line.
    """
    try:
        return EngineConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error)) from None


def load_config(path: str | Path | None, overrides: dict[str, Any] | None = None) -> EngineConfig:
    """Read a YAML file, lay dotted `overrides` such as {"limits.max_sequences": 4} over it, validate.

    Raises:
        ConfigError: the file is missing, not YAML, or holds a wrong setting.
    """
    values: Any = {}
    if path is not None:
        try:
            values = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
        except OSError as error:
            raise ConfigError(f"cannot read config file {path}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"config file {path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
        except yaml.YAMLError as error:
            raise ConfigError(f"config file {path} is not YAML: {' '.join(str(error).split())}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"config file {path} must hold a mapping, found {type(values).__name__}")
        values = {name: value for name, value in values.items() if value is not None}  # a section with every line commented out
    for name, value in (overrides or {}).items():
        *parents, leaf = (int(part) if part.isdigit() else part for part in name.split("."))
        node = values
        for parent in parents:
            if node.get(parent) is None:
                node[parent] = {}
            node = node[parent]
            if not isinstance(node, dict):
                raise ConfigError(f"{name}: {parent} is a single value, not a section")
        node[leaf] = value
    return make_config(values)
