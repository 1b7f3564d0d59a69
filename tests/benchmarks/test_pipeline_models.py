"""FillingModel: a long context is there at once and decodes; whatever is not of a FILLED configuration is the model's own."""

import json

import pytest
import torch

from benchmarks.pipeline_models import FILLED, build_filling, with_filled
from qsa.actors.stage_spec import StageSpec
from qsa.actors.stage_steps import build_model
from qsa.config import make_config
from qsa.kernels.registry import SparseConfig
from qsa.model.batch import Segment

SPARSE = {
    0: SparseConfig(dense=True),
    1: SparseConfig(
        window_size=64, sink_size=16, block_size_coarse=64, block_size_fine=16, top_k_fine=4, candidate_factor=2, summary="code"
    ),
}
LENGTH = 1500
MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 4096,
    "num_attention_heads": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 512,
}


@pytest.fixture
def specs(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    common = {"model_path": str(tmp_path), "load_format": "dummy", "num_chunks": 64, "max_sequences": 4, "max_model_len": 4096}
    sparse = {**SPARSE, **{number + FILLED: config for number, config in SPARSE.items()}}
    return [StageSpec(stage, 2, 2 * stage, 2 * stage + 2, sparse=sparse, **common) for stage in (0, 1)]


def run(models, segment, token_ids, rows):
    hidden = models[0].forward([segment], torch.tensor(token_ids), None, [])
    return models[1].forward([segment], None, hidden, rows)


@pytest.mark.parametrize("sparse_id", [0, 1])
def test_a_filled_context_decodes_and_holds_what_a_real_one_does(specs, sparse_id):
    models = [build_filling(spec) for spec in specs]
    for model in models:
        model.attention.open(0, sparse_id)
        model.attention.open(1, sparse_id + FILLED)
    tokens = [n % 500 for n in range(LENGTH)]
    for start in range(0, LENGTH, 512):
        end = min(start + 512, LENGTH)
        for slot, number in ((0, sparse_id), (1, sparse_id + FILLED)):
            rows = [end - start - 1] if end == LENGTH else []
            logits = run(models, Segment(slot, start, end, number, True), tokens[start:end], rows)
            assert logits.shape == (len(rows), 512) and torch.isfinite(logits).all()
    for model in models:
        assert model.cache.held(0) == model.cache.held(1) > 0
    for step in range(3):
        logits = run(models, Segment(1, LENGTH + step, LENGTH + step + 1, sparse_id + FILLED, False), [7], [0])
        assert torch.isfinite(logits).all() and logits.std() > 0
    for model in models:
        model.close()


def test_a_real_sequence_is_computed_as_without_it(specs):
    filling, real = ([build(spec) for spec in specs] for build in (build_filling, build_model))
    found = []
    for models in (filling, real):
        for model in models:
            model.attention.open(2, 1)
        run(models, Segment(2, 0, 300, 1, True), list(range(300)), [])
        found.append(run(models, Segment(2, 300, 301, 1, False), [5], [0]))
        for model in models:
            model.close()
    assert torch.equal(*found)


def test_every_configuration_has_a_filled_one():
    config = with_filled(make_config({"sparse": {3: {"top_k_fine": 8}}}))
    assert sorted(config.sparse) == [0, 1, 3, 100, 101, 103]
    assert config.sparse[103] == config.sparse[3] and config.sparse[100].dense
