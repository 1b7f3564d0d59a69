"""What a stage takes on the host beside its KV, when it computes there: weights in the form they are held, and workspace."""

from __future__ import annotations

from qsa.card_needs import QUANTIZED_BYTES, quantised_weight_bytes
from qsa.config import EngineConfig
from qsa.model.build import resolve_dtype
from qsa.model.checkpoint.load import Checkpoint
from qsa.model.decoder import PREFILL_COPY_BYTES
from qsa.model.spec import ModelSpec

PROCESS_BYTES = 400 << 20  # interpreter, torch and Ray of one stage


def host_weight_bytes(checkpoint: Checkpoint, config: EngineConfig, first: int, last: int) -> int:
    """Weights of layers [first, last) in memory: packed as stored, with copies for prefill where the model makes them, else in
    `dtype`."""
    element_bytes = resolve_dtype(config.model.dtype).itemsize
    kind = config.model.quantization
    if kind == "none" or not (checkpoint.is_quantized or kind in QUANTIZED_BYTES):
        return checkpoint.stage_weight_bytes(first, last, bytes_per_weight=element_bytes)
    if checkpoint.is_quantized:
        packed = checkpoint.stage_weight_bytes(first, last)
    else:
        packed = quantised_weight_bytes(checkpoint, kind, element_bytes, first, last)
    whole = checkpoint.stage_weight_bytes(0, checkpoint.spec.num_layers, bytes_per_weight=2)
    each = 2.0 if whole <= PREFILL_COPY_BYTES else 0.5 * (kind == "int4")  # without copies, nibbles that are quick to unpack
    return packed + checkpoint.stage_weight_bytes(first, last, bytes_per_weight=each)


def host_workspace_bytes(spec: ModelSpec, config: EngineConfig, chunk: int) -> int:
    """Activations of a chunk of a prompt and the logits of a step, in float32, and the process itself."""
    row = 8 * spec.hidden_size + 3 * spec.intermediate_size + 3 * spec.num_q_heads * spec.head_dim
    activations = 4 * chunk * row
    logits = 4 * spec.vocab_size * (config.limits.max_sequences + 1)
    return activations + logits + PROCESS_BYTES
