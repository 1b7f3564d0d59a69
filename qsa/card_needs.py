"""What a stage takes on a card beside its KV: weights in the form they are held there, and workspace. Arithmetic only.

Estimates are on the safe side by some percent; a stage that still runs out says so in its warm-up, by name.
"""

from __future__ import annotations

from qsa.config import EngineConfig
from qsa.memory.layout import cdiv
from qsa.model.build import resolve_dtype
from qsa.model.checkpoint.load import Checkpoint
from qsa.model.spec import ModelSpec

LIBRARY_BYTES = 384 << 20  # cuBLAS, cuDNN and compiled kernels, beyond the context that is there when a card is looked at
GRAPH_BYTES = 384 << 20  # captured decode graphs and the memory they keep
SAMPLE_EVERY = 4  # in prefill every fourth query of a tile scores the slices
QUANTIZED_BYTES = {"int8": 1.01, "fp8": 1.01, "int4": 0.625}  # a weight, its share of scales and zeros included


def card_weight_bytes(checkpoint: Checkpoint, config: EngineConfig, first: int, last: int) -> int:
    """Weights of layers [first, last) on a card: as stored where they are packed, else in `dtype` or as quantised."""
    spec = checkpoint.spec
    element_bytes = resolve_dtype(config.model.dtype).itemsize
    tables = _num_tables(spec, first == 0, last == spec.num_layers) * spec.vocab_size * spec.hidden_size
    is_gguf = checkpoint.path.is_file()  # whose kinds are counted as if they were dequantised
    if checkpoint.is_quantized and config.model.quantization != "none" and not is_gguf:
        return checkpoint.stage_weight_bytes(first, last) + element_bytes * tables  # tables may be dequantised
    if config.model.quantization in QUANTIZED_BYTES:
        return quantised_weight_bytes(checkpoint, config.model.quantization, element_bytes, first, last)
    return checkpoint.stage_weight_bytes(first, last, bytes_per_weight=element_bytes)


def quantised_weight_bytes(checkpoint: Checkpoint, kind: str, element_bytes: int, first: int, last: int) -> int:
    """Weights of layers [first, last) that are quantised while they are read: matrices in that form, the embedding as it is.

    The head is held in 8 bits, beside the table that it shares with the embedding in a tied model.
    """
    spec = checkpoint.spec
    numbers = spec.vocab_size * spec.hidden_size
    tables = _num_tables(spec, first == 0, last == spec.num_layers) * numbers
    head = 1.1 * numbers if spec.tie_word_embeddings and last == spec.num_layers else 0
    matrices = checkpoint.stage_weight_bytes(first, last, bytes_per_weight=1) - tables
    return int(matrices * QUANTIZED_BYTES[kind] + element_bytes * tables + head)


def _num_tables(spec: ModelSpec, has_embedding: bool, has_head: bool) -> int:
    """Tables of the vocabulary that a stage holds; a tied one serves as both."""
    return 1 if spec.tie_word_embeddings and (has_embedding or has_head) else has_embedding + has_head


def card_workspace_bytes(spec: ModelSpec, config: EngineConfig, chunk: int, max_model_len: int, slice_size: int) -> int:
    """Everything that a stage allocates on a card and is neither weights nor KV.

    Args:
        chunk:      tokens of a prefill step.
        slice_size: of the finest sparse configuration.
    """
    element_bytes = resolve_dtype(config.model.dtype).itemsize
    q_width, kv_width = spec.num_q_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    row = 5 * spec.hidden_size + 3 * spec.intermediate_size + 4 * q_width + 4 * kv_width
    activations = element_bytes * chunk * row
    slice_scores = 4 * cdiv(chunk, SAMPLE_EVERY) * spec.num_q_heads * cdiv(max_model_len, slice_size)
    gathered = 2 * element_bytes * max_model_len * kv_width  # K and V of one layer in one piece, for dense prefill
    rotation = 2 * 4 * max_model_len * spec.head_dim
    decode_rows = config.limits.max_sequences
    decode = 4 * decode_rows * spec.num_q_heads * (cdiv(max_model_len, slice_size) + 2 * 512 * slice_size)
    logits = 4 * spec.vocab_size * 3 * (decode_rows + 1)
    return LIBRARY_BYTES + GRAPH_BYTES + activations + max(slice_scores, gathered) + rotation + decode + logits
