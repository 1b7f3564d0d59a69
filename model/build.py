"""build_stage: weights, attention and KV cache of one stage, joined. Actors, benchmarks and tests all start here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from qsa.errors import ConfigError
from qsa.kernels.registry import SparseConfig
from qsa.kernels.summaries.code import load_calibration
from qsa.memory.kv_cache import KVCache
from qsa.memory.layout import KVLayout
from qsa.model.attention import StageAttention
from qsa.model.checkpoint.load import Checkpoint
from qsa.model.decoder import PREFILL_COPY_BYTES, StageModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_dtype(name: str, default: torch.dtype = torch.bfloat16) -> torch.dtype:
    """The torch type of a setting; `auto` is `default`."""
    if name != "auto" and name not in DTYPES:
        raise ConfigError(f"dtype must be auto or one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES.get(name, default)


def kv_layout(checkpoint: Checkpoint, kv_dtype: torch.dtype) -> KVLayout:
    """How K and V of one layer of this model lie in chunks."""
    return KVLayout(checkpoint.spec.num_kv_heads, checkpoint.spec.head_dim, kv_dtype.itemsize)


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
    dtype: str = "auto",
    kv_dtype: str = "auto",
    quantization: str = "auto",
    device: str = "cpu",
    prefill_copy_bytes: int = PREFILL_COPY_BYTES,
) -> StageModel:
    """Build layers [first_layer, last_layer) with an empty KV cache of `num_chunks` chunks.

    Args:
        max_model_len:    longest sequence in tokens.
        sparse:           sparse-attention configurations by id.
        calibration_path: file of `qsa calibrate`, needed by a configuration whose summary is `code`.
        dtype:            activations and unquantised weights; auto: bfloat16.
        kv_dtype:         K and V; auto: as `dtype`.
        quantization:     auto: packed where a kernel exists; none: dequantised.

    Returns:
        The stage, with its `attention` and `cache`; `close` gives everything back.
    """
    spec = checkpoint.spec
    if max_model_len > spec.max_model_len:
        raise ConfigError(f"model.max_model_len is {max_model_len}, but {spec.name} reaches {spec.max_model_len} tokens")
    if not 0 <= first_layer < last_layer <= spec.num_layers:
        raise ValueError(f"a stage needs 0 <= first_layer < last_layer <= {spec.num_layers}, got [{first_layer}, {last_layer})")
    resolved = resolve_dtype(dtype)
    kv_resolved = resolve_dtype(kv_dtype, resolved)
    num_layers = last_layer - first_layer
    calibration = load_calibration(calibration_path, first_layer, num_layers) if calibration_path else None
    cache = KVCache(
        kv_layout(checkpoint, kv_resolved),
        kv_resolved,
        num_layers=num_layers,
        num_chunks=num_chunks,
        max_sequences=max_sequences,
        max_seq_len=max_model_len,
        device=torch.device(device),
    )
    attention = StageAttention(
        cache,
        first_layer=first_layer,
        num_layers=num_layers,
        num_q_heads=spec.num_q_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        sm_scale=spec.sm_scale,
        sparse=sparse,
        calibration=calibration,
    )
    return StageModel(
        checkpoint,
        first_layer=first_layer,
        last_layer=last_layer,
        attention=attention,
        dtype=resolved,
        quantization=quantization,
        max_model_len=max_model_len,
        device=torch.device(device),
        prefill_copy_bytes=prefill_copy_bytes,
    )
