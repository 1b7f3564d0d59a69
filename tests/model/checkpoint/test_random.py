"""Random weights: the same for every reader, of the right size, and codes that rank keys as the keys do."""

from __future__ import annotations

import pytest
import torch

from qsa.errors import CheckpointError
from qsa.model.checkpoint.random import RandomCheckpoint, random_calibration
from qsa.model.rope import RopeSpec
from qsa.model.spec import ModelSpec

SPEC = ModelSpec(
    **dict(architecture="qwen2", name="tiny", num_layers=2, hidden_size=64, intermediate_size=96, num_q_heads=4),
    **dict(num_kv_heads=2, head_dim=16, vocab_size=320, max_position_embeddings=256, rms_norm_eps=1e-6, qkv_bias=True),
    **dict(rope=RopeSpec(16), tie_word_embeddings=False),
)


def test_weights_follow_from_their_names():
    one, two = RandomCheckpoint(SPEC), RandomCheckpoint(SPEC)
    name = "layers.1.mlp.down_proj.weight"
    assert torch.equal(one.read(name), two.read(name))
    assert not torch.equal(one.read(name), one.read("layers.0.mlp.down_proj.weight"))
    assert one.read(name).shape == (64, 96) and one.read(name).dtype == torch.bfloat16
    assert abs(float(one.read(name).float().std()) - 96**-0.5) < 0.003
    assert float(one.read("norm.weight").sum()) == 64 and not one.read("layers.0.self_attn.q_proj.bias").any()
    with pytest.raises(CheckpointError, match=r"layers\.2"):
        one.read("layers.2.mlp.down_proj.weight")


def test_bytes_are_those_of_the_tensors():
    checkpoint = RandomCheckpoint(SPEC, dtype=torch.float32)
    names = [name for name in checkpoint._shapes if name.startswith(("layers.1", "norm", "lm_head"))]
    assert checkpoint.stage_weight_bytes(1, 2) == sum(checkpoint.read(name).nbytes for name in names)
    assert checkpoint.stage_weight_bytes(1, 2, bytes_per_weight=0.5) * 8 == checkpoint.stage_weight_bytes(1, 2)


def test_codes_of_all_directions_keep_the_products(rng):
    calibration = random_calibration(SPEC, 32, first_layer=1)
    assert calibration.project.shape == (1, 32, 32)
    assert torch.equal(calibration.project[0], random_calibration(SPEC, 32).project[1])
    keys, q = torch.randn(500, 32, generator=rng), torch.randn(32, generator=rng)
    codes = (keys @ calibration.project[0]).clamp(-127, 127).round()
    scores = codes @ (q @ calibration.query[0])
    assert torch.corrcoef(torch.stack((scores, keys @ q)))[0, 1] > 0.999
