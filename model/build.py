"""build_stage: weights, attention and KV cache of one stage, joined. Actors, benchmarks and tests all start here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from qsa.errors import ConfigError, UnsupportedModelError
from qsa.kernels.pointwise import signed_sine
from qsa.kernels.registry import SparseConfig
from qsa.kernels.summaries.code import CodeCalibration, load_calibration
from qsa.memory.kv_cache import KVCache
from qsa.memory.layout import CHUNK_BYTES, KVLayout
from qsa.model.attention import StageAttention, summary_layout
from qsa.model.checkpoint.load import Checkpoint
from qsa.model.decoder import PREFILL_COPY_BYTES, StageModel
from qsa.model.rope import rope_table
from qsa.model.weights import WeightPolicy

if TYPE_CHECKING:
    from qsa.model.gpu_decoder import GpuStageModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_dtype(name: str, default: torch.dtype = torch.bfloat16) -> torch.dtype:
    """The torch type of a setting; `auto` is `default`."""
    if name != "auto" and name not in DTYPES:
        raise ConfigError(f"dtype must be auto or one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES.get(name, default)


def resolve_kv_dtype(name: str, default: torch.dtype) -> torch.dtype:
    """The torch type of K and V in memory; `auto` is `default`, `fp8` is e4m3 with a scale a head."""
    return torch.float8_e4m3fn if name == "fp8" else resolve_dtype(name, default)


def kv_layout(checkpoint: Checkpoint, kv_dtype: torch.dtype) -> KVLayout:
    """How K and V of one layer of this model lie in chunks.

    Raises:
        UnsupportedModelError: not even one token's go into a chunk.
    """
    layout = KVLayout(checkpoint.spec.num_kv_heads, checkpoint.spec.head_dim, kv_dtype.itemsize)
    if layout.token_bytes > CHUNK_BYTES:
        raise UnsupportedModelError(
            f"{checkpoint.path}: K and V of one token in one layer are {layout.token_bytes} bytes, a chunk has {CHUNK_BYTES}"
        )
    return layout


def build_stage(
    checkpoint: Checkpoint,
    *,
    first_layer: int,
    last_layer: int,
    num_chunks: int,
    max_sequences: int,
    max_model_len: int,
    sparse: Mapping[int, SparseConfig],
    calibration_path: Path | None = None,
    calibration: CodeCalibration | None = None,
    dtype: str = "auto",
    kv_dtype: str = "auto",
    quantization: str = "auto",
    device: str = "cpu",
    backend: str | None = None,
    prefill_chunk: int = 8192,
    prefill_copy_bytes: int = PREFILL_COPY_BYTES,
) -> StageModel | GpuStageModel:
    """Build layers [first_layer, last_layer) with an empty KV cache of `num_chunks` chunks.

    Args:
        max_model_len:    longest sequence in tokens.
        sparse:           sparse-attention configurations by id.
        calibration_path: file of `qsa calibrate`, needed by a configuration whose summary is `code`.
        calibration:      of the stage's layers, in place of a file.
        dtype:            activations and unquantised weights; auto: bfloat16.
        kv_dtype:         K and V; auto: as `dtype`; fp8: triton only.
        quantization:     auto: packed where a kernel exists; none: dequantised; int8, int4 or fp8: quantised as they are read.
        backend:          torch or triton; None: triton on a card. Without one, Triton's interpreter runs small models.
        prefill_chunk:    most tokens of a prefill segment, for the warm-up of a card.

    Returns:
        The stage, with its `attention` and `cache`; `close` gives everything back.
    """
    spec, where = checkpoint.spec, torch.device(device)
    if max_model_len > spec.max_model_len:
        raise ConfigError(f"model.max_model_len is {max_model_len}, but {spec.name} reaches {spec.max_model_len} tokens")
    if not 0 <= first_layer < last_layer <= spec.num_layers:
        raise ValueError(f"a stage needs 0 <= first_layer < last_layer <= {spec.num_layers}, got [{first_layer}, {last_layer})")
    backend = backend or ("triton" if where.type == "cuda" else "torch")
    resolved = resolve_dtype(dtype)
    kv_resolved = resolve_kv_dtype(kv_dtype, resolved)
    if backend == "torch" and kv_resolved.itemsize == 1:
        raise ConfigError(f"model.kv_dtype is {kv_dtype}, which only cards can do; set it to auto")
    num_layers = last_layer - first_layer
    if calibration is None and calibration_path is not None:
        calibration = load_calibration(calibration_path, first_layer, num_layers)
    code_dim = None if calibration is None else calibration.code_dim
    usable = [config for config in sparse.values() if config.dense or config.summary != "code" or code_dim is not None]
    cache = KVCache(
        kv_layout(checkpoint, kv_resolved),
        kv_resolved,
        num_layers=num_layers,
        num_chunks=num_chunks,
        max_sequences=max_sequences,
        max_seq_len=max_model_len,
        device=where,
        summaries=[summary_layout(config, spec.num_kv_heads, spec.head_dim, code_dim) for config in usable],
    )
    sizes: dict[str, Any] = dict(
        first_layer=first_layer,
        num_layers=num_layers,
        num_q_heads=spec.num_q_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        sm_scale=spec.sm_scale,
        sparse=sparse,
        calibration=calibration,
    )
    if backend == "triton":
        # these import Triton, which a machine without a card may lack
        from qsa.model.gpu_attention import GpuAttention  # noqa: PLC0415
        from qsa.model.gpu_decoder import GpuStageModel  # noqa: PLC0415

        cos, sin = rope_table(spec.rope, max_model_len)
        rotation = cos.to(where), signed_sine(sin).to(where)
        return GpuStageModel(
            checkpoint,
            first_layer=first_layer,
            last_layer=last_layer,
            attention=GpuAttention(cache, rotation=rotation, eps=spec.rms_norm_eps, **sizes),
            dtype=resolved,
            policy=WeightPolicy.choose(quantization, resolved, where, backend="triton"),
            prefill_chunk=prefill_chunk,
        )
    return StageModel(
        checkpoint,
        first_layer=first_layer,
        last_layer=last_layer,
        attention=StageAttention(cache, **sizes),
        dtype=resolved,
        quantization=quantization,
        max_model_len=max_model_len,
        device=where,
        prefill_copy_bytes=prefill_copy_bytes,
    )
