"""ModelSpec from Hugging Face configurations and GGUF metadata; what the decoder cannot do is refused by name."""

from __future__ import annotations

from contextlib import suppress

import pytest
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from qsa.errors import CheckpointError, UnsupportedModelError
from qsa.model.rope import RopeSpec, rope_frequencies
from qsa.model.spec import ModelSpec

LLAMA = {
    **{"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 256},
}
GGUF = {
    "general.architecture": "llama",
    **{
        f"llama.{key}": value
        for key, value in {
            **{"block_count": 4, "context_length": 256, "embedding_length": 64, "feed_forward_length": 96},
            **{"attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5},
            **{"vocab_size": 320},
        }.items()
    },
}


def gguf_spec(shapes=None, factors=None, **changes):
    fields = GGUF | {f"llama.{key.replace('__', '.')}": value for key, value in changes.items()}
    return ModelSpec.from_gguf(fields, shapes or {}, factors)


def test_llama_as_old_files_have_it():
    spec = ModelSpec.from_hf({key: value for key, value in LLAMA.items() if key != "num_key_value_heads"})
    assert (spec.num_q_heads, spec.num_kv_heads, spec.head_dim) == (4, 4, 16)
    assert spec.rope == RopeSpec(16, 10000.0)
    assert (spec.tie_word_embeddings, spec.qkv_bias, spec.qk_norm, spec.sliding_window) == (False, False, False, None)
    assert (spec.bos_id, spec.eos_ids, spec.max_model_len, spec.sm_scale) == (None, (), 256, 0.25)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LlamaConfig(attention_bias=True), {"qkv_bias": True, "o_bias": True, "mlp_bias": False}),
        (LlamaConfig(mlp_bias=True, head_dim=96), {"mlp_bias": True, "head_dim": 96, "num_kv_heads": 32}),
        (LlamaConfig(eos_token_id=[7, 9], bos_token_id=5), {"eos_ids": (7, 9), "bos_id": 5}),
        (MistralConfig(), {"architecture": "mistral", "sliding_window": 4096, "max_model_len": 4096, "num_kv_heads": 8}),
        (MistralConfig(sliding_window=None), {"sliding_window": None, "max_model_len": 131072}),
        (Qwen2Config(), {"qkv_bias": True, "o_bias": False, "sliding_window": None, "qk_norm": False}),
        (Qwen2Config(use_sliding_window=True, max_window_layers=8), {"sliding_window": 4096, "max_model_len": 4096}),
        (Qwen2Config(use_sliding_window=True, max_window_layers=99), {"sliding_window": None}),
        (Qwen3Config(), {"qk_norm": True, "qkv_bias": False, "head_dim": 128}),
        (Qwen3Config(attention_bias=True, tie_word_embeddings=True), {"qkv_bias": True, "tie_word_embeddings": True}),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, dict) else "-".join(value),
)
def test_families_as_transformers_writes_them(config, expected):
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    written = config.to_dict() | {"architectures": [f"{names[config.model_type]}ForCausalLM"]}
    spec = ModelSpec.from_hf(written)
    assert {name: getattr(spec, name) for name in expected} == expected


def test_qwen3_without_head_dim():
    spec = ModelSpec.from_hf(LLAMA | {"architectures": ["Qwen3ForCausalLM"]})
    assert spec.head_dim == 128  # the family's default, not hidden_size / heads


def test_context_lengths_of_scaled_models():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    qwen = ModelSpec.from_hf(LLAMA | {"max_position_embeddings": 32768, "rope_scaling": yarn})
    assert qwen.max_model_len == 131072
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3["original_max_position_embeddings"] = 8192
    assert ModelSpec.from_hf(LLAMA | {"max_position_embeddings": 131072, "rope_scaling": llama3}).max_model_len == 131072


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": None, "model_type": "bert"}, "bert"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
        ({"quantization_config": {"bits": 4}}, "'unknown'"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"rope_scaling": {"type": "exotic"}}, "'exotic'"),
        ({"layer_types": ["linear_attention"] * 4}, "linear_attention"),
    ],
)
def test_hf_models_that_are_refused(changes, words):
    with pytest.raises(UnsupportedModelError, match=words):
        ModelSpec.from_hf(LLAMA | changes)


@pytest.mark.parametrize("key", [*(key for key in LLAMA if key not in ("architectures", "num_key_value_heads"))])
def test_required_keys_are_named(key):
    with pytest.raises(CheckpointError, match=f"'{key}'"):
        ModelSpec.from_hf({name: value for name, value in LLAMA.items() if name != key})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": "64"}, "'hidden_size' = '64'"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"num_hidden_layers": 0}, "num_layers must be positive"),
    ],
)
def test_wrong_values(changes, words):
    with pytest.raises(CheckpointError, match=words):
        ModelSpec.from_hf(LLAMA | changes)


def test_gguf_llama():
    spec = gguf_spec({"token_embd.weight": (320, 64)}, rope__freq_base=5e5)
    assert (spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (4, 2, 16, 320)
    assert spec.tie_word_embeddings and spec.rope.theta == 5e5
    shapes = {
        "output.weight": (320, 64),
        "blk.0.attn_q.bias": (64,),
        "blk.0.ffn_gate.bias": (96,),
        "blk.0.attn_output.bias": (64,),
    }
    spec = gguf_spec(shapes, attention__key_length=32)
    assert not spec.tie_word_embeddings
    assert (spec.head_dim, spec.qkv_bias, spec.mlp_bias, spec.o_bias) == (32, True, True, True)


def test_gguf_end_set():
    fields = GGUF | {f"tokenizer.ggml.{name}_token_id": i for name, i in (("bos", 1), ("eos", 2), ("eot", 5), ("eom", 2))}
    spec = ModelSpec.from_gguf(fields, {})
    assert (spec.bos_id, spec.eos_ids) == (1, (2, 5))


def test_gguf_rope_kinds():
    assert gguf_spec(rope__scaling__type="linear", rope__scaling__factor=4.0).rope.kind == "linear"
    assert gguf_spec(rope__scale_linear=4.0).rope.factor == 4.0
    assert gguf_spec(rope__scaling__type="none").rope.kind == "default"
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    expected = RopeSpec.from_hf({"max_position_embeddings": 256, "rope_scaling": yarn}, 16)
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
    got = gguf_spec(**{f"rope__scaling__{key}": value for key, value in scaling.items()}).rope
    for one, other in zip(rope_frequencies(got, 256), rope_frequencies(expected, 256)):
        assert (one == other) if isinstance(one, float) else (one - other).abs().max() < 1e-12
    long, short = tuple(2.0 + i for i in range(8)), tuple(1.0 + i for i in range(8))
    spec = gguf_spec(
        factors={"rope_factors_long.weight": long, "rope_factors_short.weight": short},
        rope__scaling__original_context_length=64,
    )
    assert (spec.rope.kind, spec.rope.long_factor, spec.rope.short_factor, spec.rope.factor) == ("longrope", long, short, 4.0)


def test_gguf_rope_freqs_are_llama3():
    """A GGUF file carries llama3's scaling as divisors of the frequencies: the table must be llama3's."""
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    expected = RopeSpec.from_hf(
        {"max_position_embeddings": 256, "rope_theta": 5e5, "rope_scaling": llama3 | {"original_max_position_embeddings": 64}},
        16,
    )
    plain, scaled = rope_frequencies(RopeSpec(16, 5e5), 256)[0], rope_frequencies(expected, 256)[0]
    spec = gguf_spec(factors={"rope_freqs.weight": tuple((plain / scaled).tolist())}, rope__freq_base=5e5)
    assert (rope_frequencies(spec.rope, 256)[0] - scaled).abs().max() < 1e-12
    assert (plain - scaled).abs().max() > 1e-6


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"general.architecture": "gemma3"}, "'gemma3'"),
        ({"llama.expert_count": 8}, "8 experts"),
        ({"llama.rope.dimension_count": 8}, "8 of 16"),
        ({"llama.attention.value_length": 8}, "values of 8"),
        ({"llama.rope.scaling.type": "exotic"}, "'exotic'"),
    ],
)
def test_gguf_models_that_are_refused(fields, words):
    with pytest.raises(UnsupportedModelError, match=words):
        ModelSpec.from_gguf(GGUF | fields, {})


def test_gguf_required_keys_are_named():
    with pytest.raises(CheckpointError, match=r"'llama\.block_count'"):
        ModelSpec.from_gguf({key: value for key, value in GGUF.items() if key != "llama.block_count"}, {})


WRONG = [None, 0, -1, "x", [], {}, 1.5, True, [1, 2]]


@pytest.mark.parametrize(
    "key", [*LLAMA, "head_dim", "rms_norm_eps", "rope_theta", "rope_scaling", "eos_token_id", "layer_types"]
)
@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_a_wrong_value_in_a_config_is_no_python_error(key, value):
    with suppress(CheckpointError, UnsupportedModelError):
        ModelSpec.from_hf(LLAMA | {key: value})


@pytest.mark.parametrize(
    "key", [*GGUF, "llama.attention.key_length", "llama.rope.freq_base", "llama.attention.sliding_window", "llama.vocab_size"]
)
@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_a_wrong_value_in_gguf_metadata_is_no_python_error(key, value):
    with suppress(CheckpointError, UnsupportedModelError):
        ModelSpec.from_gguf(GGUF | {key: value}, {})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": 0}, "wrong kind"),
        ({"rms_norm_eps": "x"}, "wrong kind.*'x'"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": -1}, "sliding_window must be positive"),
        ({"rope_theta": 1.0}, "theta must be above 1"),
    ],
)
def test_wrong_values_are_named(changes, words):
    with pytest.raises(CheckpointError, match=words):
        ModelSpec.from_hf(LLAMA | changes)
