"""Random tiny models of every supported family, made by transformers, with a byte-level tokenizer beside them.

Every parameter is random and large enough to matter (norm weights and biases too), so a tensor that is left out,
transposed or mixed up with another changes the logits.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 320
MAX_LEN = 256  # max_position_embeddings, in tokens
ORIGINAL_LEN = 64  # what scaled kinds were "pretrained" at
SPECIAL = ("<|begin|>", "<|turn|>", "<|end|>", "<|stop|>")  # ids 0..3
CHAT_TEMPLATE = (
    "<|begin|>{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
CONFIGS = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
HALF = 8  # head_dim / 2 of the models below

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "yarn": {
        **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL_LEN},
        **{"beta_fast": 8.0, "beta_slow": 1.0},
    },
    "llama3": {
        **{"rope_type": "llama3", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL_LEN},
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
    "longrope": {
        **{"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL_LEN},
        "short_factor": [1.0 + 0.05 * i for i in range(HALF)],
        "long_factor": [1.5 + 0.4 * i for i in range(HALF)],
    },
}


@dataclass(frozen=True)
class TinyModel:
    """A recipe; `options` are keyword arguments of the family's configuration class."""

    family: str
    rope: str = "default"
    sharded: bool = False
    options: dict[str, Any] = field(default_factory=dict)


TINY_MODELS: dict[str, TinyModel] = {
    "llama": TinyModel("llama"),
    "llama-tied-sharded": TinyModel("llama", sharded=True, options={"tie_word_embeddings": True}),
    "llama-biases": TinyModel("llama", options={"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": TinyModel("llama", options={"head_dim": 32, "num_key_value_heads": 1}),
    "llama-linear": TinyModel("llama", rope="linear"),
    "llama-dynamic": TinyModel("llama", rope="dynamic"),
    "llama-yarn": TinyModel("llama", rope="yarn"),
    "llama-llama3": TinyModel("llama", rope="llama3"),
    "llama-longrope": TinyModel("llama", rope="longrope"),
    "mistral": TinyModel("mistral", options={"sliding_window": None}),
    "mistral-window-sharded": TinyModel("mistral", sharded=True, options={"sliding_window": MAX_LEN}),
    "qwen2": TinyModel("qwen2"),
    "qwen2-tied-yarn": TinyModel("qwen2", rope="yarn", options={"tie_word_embeddings": True}),
    "qwen3": TinyModel("qwen3", options={"head_dim": 16}),
    "qwen3-tied-wide-heads": TinyModel("qwen3", options={"head_dim": 32, "tie_word_embeddings": True}),
}


def make_tiny_model(recipe: TinyModel | str, folder: Path, seed: int = 0) -> Path:
    """Write the model of a recipe (or of its name in TINY_MODELS) with float32 weights into `folder`, and return it."""
    if isinstance(recipe, str):
        recipe = TINY_MODELS[recipe]
    values: dict[str, Any] = {
        **{"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": MAX_LEN},
        **{"rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 2, "tie_word_embeddings": False},
        "rope_parameters": dict(ROPES[recipe.rope]),
        **recipe.options,
    }
    config = CONFIGS[recipe.family](**values)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    randomize(model, seed)
    model.generation_config.eos_token_id = [2, 3]
    model.save_pretrained(folder, max_shard_size="100KB" if recipe.sharded else "5GB")
    write_tokenizer(folder)
    return folder


def randomize(model: PreTrainedModel, seed: int) -> None:
    """Give every parameter random values of a size at which it changes the logits."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=rng)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.2 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(0.2 * noise)
            elif "embed_tokens" in name or "lm_head" in name:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(1.5 * noise * parameter.shape[1] ** -0.5)


def load_reference(folder: Path) -> PreTrainedModel:
    """The folder's model in transformers, float32, eager attention."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def byte_tokenizer() -> Tokenizer:
    """Byte-level BPE: four control tokens, the 256 bytes, and a few merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*SPECIAL, *alphabet]
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("Ġ", "a"), ("ð", "Ł"), ("a", "n"), ("e", "r")]
    pieces += [left + right for left, right in merges]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in SPECIAL])
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json with a chat template that begins with BOS."""
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        **{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[0], "eos_token": SPECIAL[2]},
        **{"add_bos_token": True, "chat_template": CHAT_TEMPLATE},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
