"""Small GGUF files for tests: a tiny model's folder converted to a given tensor type, or made of random quantised bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file
from tiny_models import CHAT_TEMPLATE, byte_tokenizer

Stored = tuple[np.ndarray, str]  # bytes or numbers as in the file, and their GGUF type
NAMES = {
    **{"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm"},
    **{"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"},
    **{"self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"},
    **{"post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"},
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """GGUF's name of a tensor with its Hugging Face name, with or without `model.`."""
    *path, kind = name.removeprefix("model.").split(".")
    if path[0] == "layers":
        return f"blk.{path[1]}.{NAMES['.'.join(path[2:])]}.{kind}"
    return f"{NAMES['.'.join(path)]}.{kind}"


def interleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from half-split to interleaved pairs, as llama.cpp's converter does for Llama models."""
    return weight.reshape(num_heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def convert_to_gguf(
    folder: Path, path: Path, kind: str = "F32", *, fields: Mapping[str, Any] | None = None, drop: tuple[str, ...] = ()
) -> dict[str, np.ndarray]:
    """Write a tiny model's folder (not sharded) as a GGUF file with matrices of type `kind`.

    Args:
        fields: metadata under the architecture's prefix, added or replaced.    drop: GGUF tensor names to leave out.

    Returns:
        What the matrices are after quantisation, float32 by canonical name, rows in half-split order.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    tensors: dict[str, Stored] = {}
    expected: dict[str, np.ndarray] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        heads = 0
        if architecture == "llama":
            heads = config["num_attention_heads"] * ("q_proj" in name) + config["num_key_value_heads"] * ("k_proj" in name)
        stored = quantize(value, kind if value.ndim == 2 else "F32")
        expected[name.removeprefix("model.")] = dequantize(stored)
        if heads:
            stored = quantize(interleave(value, heads), stored[1])
        if gguf_name(name) not in drop:
            tensors[gguf_name(name)] = stored
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    known = {
        **{"block_count": config["num_hidden_layers"], "context_length": config["max_position_embeddings"]},
        **{"embedding_length": config["hidden_size"], "feed_forward_length": config["intermediate_size"]},
        **{"attention.head_count": config["num_attention_heads"], "attention.head_count_kv": config["num_key_value_heads"]},
        **{"attention.layer_norm_rms_epsilon": config["rms_norm_eps"], "attention.key_length": head_dim},
        **{"attention.value_length": head_dim, "rope.freq_base": config["rope_parameters"]["rope_theta"]},
        "vocab_size": config["vocab_size"],
    }
    write_gguf(path, architecture, known | dict(fields or {}), tensors)
    return expected


def quantize(value: np.ndarray, kind: str) -> Stored:
    """A tensor as stored bytes, with its type."""
    return gguf.quants.quantize(value.astype(np.float32), gguf.GGMLQuantizationType[kind]), kind


def dequantize(stored: Stored) -> np.ndarray:
    """What stored bytes mean, according to the gguf library."""
    return gguf.quants.dequantize(stored[0], gguf.GGMLQuantizationType[stored[1]]).astype(np.float32)


def random_blocks(shape: tuple[int, int], kind: str, rng: np.random.Generator) -> Stored:
    """Random bytes of a quantised type, with scales that are finite numbers; for types the library cannot quantise to."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = rng.integers(0, 256, (shape[0], shape[1] // block, size), dtype=np.uint8)
    scales = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind]
    for byte in scales:
        values = rng.uniform(1e-3, 1e-2, data.shape[:2]).astype(np.float16)
        data[..., byte : byte + 2] = values[..., None].view(np.uint8)
    return data.reshape(shape[0], -1), kind


def write_gguf(
    path: Path, architecture: str, fields: Mapping[str, Any], tensors: Mapping[str, Stored], split_count: int = 0
) -> None:
    """Write metadata (`fields` under the architecture's prefix), the byte tokenizer and tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in fields.items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(f"{architecture}.{key}", value)
    if split_count:
        writer.add_uint16("split.count", split_count)
    rules = json.loads(byte_tokenizer().to_str())
    tokens = sorted(rules["model"]["vocab"], key=rules["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 4 + [1] * (len(tokens) - 4))
    writer.add_token_merges([" ".join(pair) for pair in rules["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
