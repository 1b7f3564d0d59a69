"""What a model is, as plain numbers: read from a Hugging Face config.json or from GGUF metadata.

Other people's data: the keys that are known are read, a required one that is missing is named, and what the decoder
cannot do (another activation, experts, an unknown architecture) is refused by name before weights are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from qsa.errors import CheckpointError, QSAError, UnsupportedModelError
from qsa.model.quantization import QuantScheme
from qsa.model.rope import RopeSpec

HF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")


@contextmanager
def _wrong_values_named() -> Iterator[None]:
    """Text where a number should be, a list where a mapping should be: CheckpointError instead of Python's own errors."""
    try:
        yield
    except QSAError:
        raise
    except (TypeError, ValueError, AttributeError, ZeroDivisionError, OverflowError) as error:
        raise CheckpointError(f"the model's configuration has a value of a wrong kind: {error}") from None


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer with RMSNorm, rotary positions, grouped-query attention and a gated SiLU MLP.

    Attributes:
        qk_norm:        RMSNorm over each head of q and k before the rotation (Qwen3).
        sliding_window: tokens a layer may look back, when any layer is so limited; else None.
        eos_ids:        token ids that end a text, as the model's configuration lists them.
    """

    architecture: str
    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeSpec
    tie_word_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field in (
            *("num_layers", "hidden_size", "intermediate_size", "num_q_heads", "num_kv_heads"),
            *("head_dim", "vocab_size", "max_position_embeddings"),
        ):
            if getattr(self, field) <= 0:
                raise CheckpointError(f"{field} must be positive, found {getattr(self, field)}")
        if self.sliding_window is not None and self.sliding_window <= 0:
            raise CheckpointError(f"sliding_window must be positive, found {self.sliding_window}")
        if self.num_q_heads % self.num_kv_heads:
            raise CheckpointError(f"num_q_heads ({self.num_q_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens: what the rotation reaches, capped by a sliding window, within which it is no limit."""
        reach = self.rope.max_len(self.max_position_embeddings)
        return reach if self.sliding_window is None else min(reach, self.sliding_window)

    @property
    def sm_scale(self) -> float:
        return float(self.head_dim**-0.5)

    @classmethod
    @_wrong_values_named()
    def from_hf(cls, config: Mapping[str, Any], name: str = "") -> ModelSpec:
        """Read a config.json.

        Raises:
            UnsupportedModelError: architecture, activation, quantisation or rope kind that is not supported.
            CheckpointError: a required key is missing or has a wrong value.
        """
        listed = config.get("architectures") or []
        if len(listed) != 1 or listed[0] not in HF_ARCHITECTURES:
            raise UnsupportedModelError(
                f"architecture {', '.join(map(str, listed)) or config.get('model_type', 'unknown')!s} is not supported;"
                f" supported: {', '.join(HF_ARCHITECTURES)}"
            )
        architecture = HF_ARCHITECTURES[listed[0]]
        QuantScheme.from_config(config)  # refuses what cannot run before anything is read
        if config.get("hidden_act", "silu") not in ("silu", "swish"):
            raise UnsupportedModelError(f"hidden_act {config['hidden_act']!r} is not supported, only 'silu'")

        num_q_heads = _whole(config, "num_attention_heads")
        hidden_size = _whole(config, "hidden_size")
        _whole(config, "max_position_embeddings")
        if config.get("num_key_value_heads") is None and architecture == "llama":
            num_kv_heads = num_q_heads
        else:
            num_kv_heads = _whole(config, "num_key_value_heads")
        head_dim = config.get("head_dim") or (128 if architecture == "qwen3" else hidden_size // num_q_heads)
        attention_bias = bool(config.get("attention_bias", False)) and architecture in ("llama", "qwen3")
        return cls(
            architecture=architecture,
            name=name or str(config.get("_name_or_path") or listed[0]),
            num_layers=_whole(config, "num_hidden_layers"),
            hidden_size=hidden_size,
            intermediate_size=_whole(config, "intermediate_size"),
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=int(head_dim),
            vocab_size=_whole(config, "vocab_size"),
            max_position_embeddings=_whole(config, "max_position_embeddings"),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=RopeSpec.from_hf(config, int(head_dim)),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias or architecture == "qwen2",
            o_bias=attention_bias,
            mlp_bias=bool(config.get("mlp_bias", False)) and architecture == "llama",
            qk_norm=architecture == "qwen3",
            sliding_window=_sliding_window(config, architecture),
            bos_id=_ids(config.get("bos_token_id"))[0] if _ids(config.get("bos_token_id")) else None,
            eos_ids=_ids(config.get("eos_token_id")),
        )

    @classmethod
    @_wrong_values_named()
    def from_gguf(
        cls,
        fields: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        freq_factors: Mapping[str, tuple[float, ...]] | None = None,
        name: str = "",
    ) -> ModelSpec:
        """Read GGUF metadata.

        Args:
            fields:       metadata by key.
            shapes:       shape of every tensor by its GGUF name, rows first: biases, norms and the head show there.
            freq_factors: contents of the rope_freqs / rope_factors_* tensors, by tensor name.
        """
        architecture = fields.get("general.architecture")
        if architecture not in GGUF_ARCHITECTURES:
            raise UnsupportedModelError(
                f"GGUF architecture {architecture!r} is not supported; supported: {', '.join(GGUF_ARCHITECTURES)}"
            )

        def get(key: str, default: Any = None) -> Any:
            return fields.get(f"{architecture}.{key}", default)

        def need(key: str) -> int:
            return _whole(fields, f"{architecture}.{key}")

        if get("expert_count"):
            raise UnsupportedModelError(f"a mixture of {get('expert_count')} experts is not supported")
        num_q_heads, hidden_size = need("attention.head_count"), need("embedding_length")
        num_kv_heads = need("attention.head_count_kv") if get("attention.head_count_kv") is not None else num_q_heads
        head_dim = int(get("attention.key_length") or hidden_size // num_q_heads)
        if get("attention.value_length", head_dim) != head_dim:
            raise UnsupportedModelError(f"keys of {head_dim} and values of {get('attention.value_length')} are not supported")
        if get("rope.dimension_count", head_dim) != head_dim:
            raise UnsupportedModelError(f"rotation of {get('rope.dimension_count')} of {head_dim} dimensions is not supported")
        vocab_size = get("vocab_size") or len(fields.get("tokenizer.ggml.tokens") or ())
        if "token_embd.weight" in shapes:
            vocab_size = shapes["token_embd.weight"][0]
        bos, eos = fields.get("tokenizer.ggml.bos_token_id"), fields.get("tokenizer.ggml.eos_token_id")
        ends = [eos, fields.get("tokenizer.ggml.eot_token_id"), fields.get("tokenizer.ggml.eom_token_id")]
        return cls(
            architecture=architecture,
            name=name or str(fields.get("general.name") or architecture),
            num_layers=need("block_count"),
            hidden_size=hidden_size,
            intermediate_size=need("feed_forward_length"),
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=int(vocab_size),
            max_position_embeddings=need("context_length"),
            rms_norm_eps=float(get("attention.layer_norm_rms_epsilon", 1e-6)),
            rope=_gguf_rope(get, head_dim, need("context_length"), freq_factors or {}),
            tie_word_embeddings="output.weight" not in shapes,
            qkv_bias="blk.0.attn_q.bias" in shapes,
            o_bias="blk.0.attn_output.bias" in shapes,
            mlp_bias="blk.0.ffn_gate.bias" in shapes,
            qk_norm=architecture == "qwen3",
            sliding_window=int(get("attention.sliding_window")) if get("attention.sliding_window") else None,
            bos_id=None if bos is None else int(bos),
            eos_ids=tuple(dict.fromkeys(int(i) for i in ends if i is not None)),
        )


def _whole(fields: Mapping[str, Any], key: str) -> int:
    value = fields.get(key)
    if value is None:
        raise CheckpointError(f"the model's configuration lacks the required key {key!r}")
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointError(f"the model's configuration has {key!r} = {value!r}, which is not a whole number")
    return value


def _ids(value: Any) -> tuple[int, ...]:
    """A token id, a list of them or null, as a tuple."""
    if value is None:
        return ()
    return tuple(int(i) for i in value) if isinstance(value, list | tuple) else (int(value),)


def _sliding_window(config: Mapping[str, Any], architecture: str) -> int | None:
    window = config.get("sliding_window")
    layer_types = config.get("layer_types")
    if layer_types is not None:
        unknown = set(layer_types) - {"full_attention", "sliding_attention"}
        if unknown:
            raise UnsupportedModelError(f"layers of type {', '.join(sorted(unknown))} are not supported")
    if window is None or architecture == "llama":
        return None
    if architecture in ("qwen2", "qwen3"):
        if not config.get("use_sliding_window", False):
            return None
        if layer_types is not None and "sliding_attention" not in layer_types:
            return None
        if layer_types is None and config.get("max_window_layers", 0) >= config["num_hidden_layers"]:
            return None
    return int(window)


def _gguf_rope(get: Any, head_dim: int, context: int, freq_factors: Mapping[str, tuple[float, ...]]) -> RopeSpec:
    theta = float(get("rope.freq_base") or 10000.0)
    kind = get("rope.scaling.type") or ("linear" if get("rope.scale_linear") else "none")
    factor = float(get("rope.scaling.factor") or get("rope.scale_linear") or 1.0)
    original = int(get("rope.scaling.original_context_length") or context)
    freqs = freq_factors.get("rope_freqs.weight", ())
    attn_factor = get("rope.scaling.attn_factor")
    if "rope_factors_long.weight" in freq_factors or kind == "longrope":
        return RopeSpec(
            head_dim,
            theta,
            "longrope",
            factor=context / original,
            original_max_len=original,
            attention_factor=None if attn_factor is None else float(attn_factor),
            short_factor=freq_factors.get("rope_factors_short.weight", ()),
            long_factor=freq_factors.get("rope_factors_long.weight", ()),
        )
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return RopeSpec(head_dim, theta, freq_factors=freqs)
    if kind == "linear":
        return RopeSpec(head_dim, theta, "linear", factor=factor, original_max_len=original, freq_factors=freqs)
    if kind == "yarn":
        return RopeSpec(
            head_dim,
            theta,
            "yarn",
            factor=factor,
            original_max_len=original,
            attention_factor=float(attn_factor or 1.0) * (1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0),
            beta_fast=float(get("rope.scaling.yarn_beta_fast") or 32.0),
            beta_slow=float(get("rope.scaling.yarn_beta_slow") or 1.0),
            freq_factors=freqs,
        )
    raise UnsupportedModelError(f"rope scaling type {kind!r} in GGUF is not supported; supported: none, linear, yarn, longrope")
