"""Opening a model with random weights: config.json is enough, a tokenizer is used where there is one, else bytes."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise

import pytest
import torch

from qsa.actors.stage_spec import StageSpec
from qsa.actors.stage_steps import build_model
from qsa.config import make_config
from qsa.errors import CheckpointError, UnsupportedModelError
from qsa.model.batch import Segment
from qsa.model.byte_tokenizer import byte_tokenizer
from qsa.model.checkpoint.load import open_checkpoint
from qsa.model.checkpoint.open import open_model
from qsa.plan import find_calibration, sparse_configs

TINY = {
    **dict(
        architectures=["Qwen2ForCausalLM"], hidden_size=64, intermediate_size=96, num_attention_heads=4, num_hidden_layers=2
    ),
    **dict(num_key_value_heads=2, max_position_embeddings=512, rms_norm_eps=1e-6, rope_theta=1e6, vocab_size=400),
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


def test_config_json_is_enough(folder):
    with pytest.raises(CheckpointError):
        open_model(str(folder))
    checkpoint = open_model(str(folder), "dummy")
    assert checkpoint.spec.vocab_size == checkpoint.tokenizer().vocab_size == 400
    assert checkpoint.tokenizer().encode("hé") == [104, 195, 169] and checkpoint.eos_token_ids == ()
    assert checkpoint.stage_weight_bytes(0, 2) == sum(
        checkpoint.read(name).nbytes for name in checkpoint.read_stage(0, 2, embedding=True, head=True)
    )
    checkpoint.close()


def test_a_configuration_that_is_wrong_is_refused_all_the_same(folder):
    (folder / "config.json").write_text(json.dumps(TINY | {"architectures": ["Other"]}))
    with pytest.raises(UnsupportedModelError):
        open_model(str(folder), "dummy")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers is 1000000000, random weights have at most"),
        ({"vocab_size": 100}, r"256 bytes"),
        ({"hidden_size": 0}, r"must be even and positive"),
    ],
)
def test_what_cannot_be_made_is_refused_and_its_folder_named(folder, values, words):
    (folder / "config.json").write_text(json.dumps(TINY | values))
    with pytest.raises(CheckpointError, match=words) as raised:
        open_model(str(folder), "dummy")
    assert str(folder) in str(raised.value)


def test_a_gguf_files_header_is_enough():
    real, dummy = open_checkpoint("default"), open_model("default", "dummy")
    assert dummy.spec.num_layers == real.spec.num_layers and dummy.eos_token_ids == real.eos_token_ids
    assert dummy.tokenizer().encode("Hello there") == real.tokenizer().encode("Hello there")
    assert not dummy.is_quantized
    real.close()


def test_two_stages_of_a_dummy_are_one_model_and_select_by_codes(folder):
    config = make_config({"model": {"path": str(folder), "load_format": "dummy"}})
    spec = open_model(str(folder), "dummy").spec
    sparse, code_dim = sparse_configs(config, find_calibration(config), spec)
    assert sparse[1].summary == "code" and code_dim == 8

    def logits(cuts: list[int]) -> torch.Tensor:
        hidden = None
        for stage, (first, last) in enumerate(pairwise(cuts)):
            whole = StageSpec(
                stage, len(cuts) - 1, first, last, str(folder), 64, 2, 512, sparse, load_format="dummy", dtype="float32"
            )
            model = build_model(whole)
            model.attention.open(0, 1)
            hidden = model.forward([Segment(0, 0, 90, 1, True)], torch.arange(90) if first == 0 else None, hidden, [89])
            model.close()
        return hidden

    assert torch.equal(logits([0, 2]), logits([0, 1, 2]))
    shutil.rmtree(folder)


def test_every_id_of_a_byte_vocabulary_is_another_text():
    tokenizer = byte_tokenizer(2000)
    texts = {tokenizer.token_bytes(token) for token in range(2000)}
    assert len(texts) == 2000 and tokenizer.decode([104, 105, 256, 1999]).startswith("hi aa ")
    assert tokenizer.encode("the cat") == list(b"the cat")
    with pytest.raises(CheckpointError, match="256 bytes"):
        byte_tokenizer(100)
