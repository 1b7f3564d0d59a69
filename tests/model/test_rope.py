"""Every rope kind against its formula in float64, against transformers, and under old and new key names."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny_models import MAX_LEN, ORIGINAL_LEN, ROPES
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from qsa.errors import CheckpointError, UnsupportedModelError
from qsa.model.rope import KINDS, RopeSpec, rope_frequencies, rope_table

HEAD_DIM = 16
LENGTHS = [ORIGINAL_LEN, ORIGINAL_LEN + 1, MAX_LEN, 2 * MAX_LEN]  # at and beyond the lengths where kinds change


def formula(kind: str, p: dict, length: int) -> tuple[np.ndarray, float]:
    """Frequencies and attention factor as the papers write them, a dimension at a time."""
    theta, factor = p["rope_theta"], p.get("factor", 1.0)
    original = p.get("original_max_position_embeddings", MAX_LEN)
    plain = [theta ** (-2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)]
    if kind == "default":
        return np.array(plain), 1.0
    if kind == "linear":
        return np.array([f / factor for f in plain]), 1.0
    if kind == "dynamic":
        stretched = theta
        if length > MAX_LEN:
            stretched = theta * (factor * length / MAX_LEN - (factor - 1)) ** (HEAD_DIM / (HEAD_DIM - 2))
        return np.array([stretched ** (-2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)]), 1.0
    if kind == "llama3":
        out = []
        for f in plain:
            wavelength = 2 * math.pi / f
            if wavelength < original / p["high_freq_factor"]:
                out.append(f)
            elif wavelength > original / p["low_freq_factor"]:
                out.append(f / factor)
            else:
                smooth = (original / wavelength - p["low_freq_factor"]) / (p["high_freq_factor"] - p["low_freq_factor"])
                out.append((1 - smooth) * f / factor + smooth * f)
        return np.array(out), 1.0
    if kind == "yarn":

        def border(turns):
            return HEAD_DIM * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(border(p["beta_fast"])), 0)
        high = min(math.ceil(border(p["beta_slow"])), HEAD_DIM - 1)
        ramp = [min(max((i - low) / (high - low), 0), 1) for i in range(HEAD_DIM // 2)]
        return np.array([f / factor * r + f * (1 - r) for f, r in zip(plain, ramp)]), 0.1 * math.log(factor) + 1
    divisors = p["long_factor"] if length > original else p["short_factor"]
    return np.array([f / d for f, d in zip(plain, divisors)]), math.sqrt(1 + math.log(factor) / math.log(original))


def config_dict(kind: str, style: str) -> dict:
    """The same rotation under transformers 5's names, 4's, and the oldest ones."""
    parameters = dict(ROPES[kind])
    base = {"max_position_embeddings": MAX_LEN}
    if style == "new":
        return base | {"rope_parameters": parameters}
    theta, rope_type = parameters.pop("rope_theta"), parameters.pop("rope_type")
    if kind == "default":
        return base | {"rope_theta": theta, "rope_scaling": None}
    if style == "oldest":
        rope_type = "su" if rope_type == "longrope" else rope_type
        return base | {"rope_theta": theta, "rope_scaling": {"type": rope_type, **parameters}}
    return base | {"rope_theta": theta, "rope_scaling": {"rope_type": rope_type, **parameters}}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_table_is_the_formulas(kind, length):
    spec = RopeSpec.from_hf(config_dict(kind, "new"), HEAD_DIM)
    cos, sin = rope_table(spec, length, dtype=torch.float64)
    frequencies, attention = formula(kind, ROPES[kind], length)
    angles = np.arange(length)[:, None] * np.concatenate((frequencies, frequencies))
    assert cos.shape == (length, HEAD_DIM)
    np.testing.assert_allclose(cos.numpy(), np.cos(angles) * attention, rtol=0, atol=1e-11)
    np.testing.assert_allclose(sin.numpy(), np.sin(angles) * attention, rtol=0, atol=1e-11)
    rounded = rope_table(spec, length)
    assert rounded[0].dtype == torch.float32 and torch.equal(rounded[0], cos.float()) and torch.equal(rounded[1], sin.float())


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_are_those_of_transformers(kind, length):
    config = LlamaConfig(head_dim=HEAD_DIM, max_position_embeddings=MAX_LEN, rope_parameters=dict(ROPES[kind]))
    if kind == "default":
        module = LlamaRotaryEmbedding(config)
        expected, attention = module.inv_freq, module.attention_scaling
    else:
        expected, attention = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
    got, got_attention = rope_frequencies(RopeSpec.from_hf(config_dict(kind, "new"), HEAD_DIM), length)
    torch.testing.assert_close(got.float(), expected.float(), rtol=2e-6, atol=0)
    assert got_attention == pytest.approx(attention)


@pytest.mark.parametrize(
    "extra",
    [
        {"attention_factor": 0.7},
        {"mscale": 0.8, "mscale_all_dim": 1.3},
        {"truncate": False},
        {"beta_fast": 32.0, "beta_slow": 2.0},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_yarn_options(extra):
    parameters = ROPES["yarn"] | extra
    config = LlamaConfig(head_dim=HEAD_DIM, max_position_embeddings=MAX_LEN, rope_parameters=dict(parameters))
    expected, attention = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    spec = RopeSpec.from_hf({"max_position_embeddings": MAX_LEN, "rope_parameters": parameters}, HEAD_DIM)
    got, got_attention = rope_frequencies(spec, MAX_LEN)
    torch.testing.assert_close(got.float(), expected, rtol=2e-6, atol=0)
    assert got_attention == pytest.approx(attention)


@pytest.mark.parametrize("style", ["old", "oldest"])
@pytest.mark.parametrize("kind", KINDS)
def test_key_names_do_not_matter(kind, style):
    assert RopeSpec.from_hf(config_dict(kind, style), HEAD_DIM) == RopeSpec.from_hf(config_dict(kind, "new"), HEAD_DIM)


def test_kinds_differ():
    """Control: every kind changes the frequencies, so a kind that is ignored would be seen."""
    tables = [rope_frequencies(RopeSpec.from_hf(config_dict(kind, "new"), HEAD_DIM), 2 * MAX_LEN)[0] for kind in KINDS]
    for i, one in enumerate(tables):
        assert all((one - other).abs().max() > 1e-4 for other in tables[:i])


def test_original_length_beside_the_rope_keys():
    """Phi-3's style: original_max_position_embeddings stands in the configuration itself, and the factor is their ratio."""
    parameters = {k: v for k, v in ROPES["longrope"].items() if k not in ("factor", "original_max_position_embeddings")}
    config = {"max_position_embeddings": MAX_LEN, "original_max_position_embeddings": ORIGINAL_LEN, "rope_scaling": parameters}
    spec = RopeSpec.from_hf(config, HEAD_DIM)
    assert (spec.original_max_len, spec.factor) == (ORIGINAL_LEN, MAX_LEN / ORIGINAL_LEN)


def test_length_the_scaling_is_meant_for():
    reach = {kind: RopeSpec.from_hf(config_dict(kind, "new"), HEAD_DIM).max_len(MAX_LEN) for kind in KINDS}
    assert reach == {"default": 256, "linear": 1024, "dynamic": 512, "yarn": 256, "llama3": 256, "longrope": 256}


def test_long_tables_are_exact():
    """Float32 angles would be wrong in the third digit here; rows at the seams of the blocks the table is built in."""
    spec = RopeSpec(HEAD_DIM, 10000.0)
    length = (1 << 17) + 3
    cos, _ = rope_table(spec, length)
    frequencies, _ = formula("default", ROPES["default"], length)
    for position in (16383, 16384, 16385, length - 1):
        expected = np.cos(position * np.concatenate((frequencies, frequencies)))
        np.testing.assert_allclose(cos[position].double().numpy(), expected, atol=1e-7)


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({"rope_scaling": {"type": "ntk-by-hand", "factor": 2}}, UnsupportedModelError, "'ntk-by-hand'"),
        ({"rope_scaling": {"rope_type": "mrope"}}, UnsupportedModelError, "'mrope'"),
        ({"rope_parameters": {"rope_type": "proportional"}}, UnsupportedModelError, "'proportional'"),
        ({"rope_scaling": {"type": "linear"}}, CheckpointError, "'factor'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, CheckpointError, "'low_freq_factor'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, UnsupportedModelError, "partial"),
        ({"partial_rotary_factor": 0.5}, UnsupportedModelError, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, UnsupportedModelError, "full_attention"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, CheckpointError, "short_factor"),
        ({"rope_theta": -1.0}, CheckpointError, "positive"),
    ],
)
def test_what_is_refused(config, error, words):
    with pytest.raises(error, match=words):
        RopeSpec.from_hf({"max_position_embeddings": MAX_LEN, **config}, HEAD_DIM)


def test_odd_head_dim_is_refused():
    with pytest.raises(UnsupportedModelError, match="even"):
        RopeSpec(15)
