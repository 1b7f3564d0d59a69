"""The decoder on the default model and on tiny ones of every family, against transformers, recorded logits and itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from stages import SMALL_ID, SPARSE, Stages, mean_kl
from tiny_models import TINY_MODELS, load_reference, make_tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

from qsa.errors import ConfigError
from qsa.kernels.registry import DENSE_ID
from qsa.model.batch import Segment
from qsa.model.build import build_stage
from qsa.model.checkpoint.load import Checkpoint, open_checkpoint
from qsa.model.checkpoint.quantized import QuantizedTensor

DATA = Path(__file__).parent.parent / "data"


@pytest.fixture(scope="module")
def default_model() -> Iterator[Checkpoint]:
    checkpoint = open_checkpoint("default")
    yield checkpoint
    checkpoint.close()


@pytest.fixture(scope="module")
def recorded() -> dict[str, torch.Tensor]:
    """256 positions of real text and what an independent float32 implementation made of them."""
    with np.load(DATA / "logits_f32.npz") as file:
        return {name: torch.tensor(file[name]) for name in file.files}


@pytest.fixture(scope="module")
def float_stages(default_model) -> Iterator[Stages]:
    stages = Stages(default_model, [], dtype="float32", max_model_len=512)
    yield stages
    stages.close()


@pytest.fixture(scope="module")
def float_logits(float_stages, recorded) -> torch.Tensor:
    return float_stages.prefill(0, recorded["input_ids"].tolist(), chunk=96, all_rows=True)


@pytest.fixture(scope="module")
def packed_stages(default_model) -> Iterator[Stages]:
    stages = Stages(default_model, [], max_model_len=1024)
    yield stages
    stages.close()


def dequantized_llama(checkpoint: Checkpoint) -> LlamaForCausalLM:
    """The checkpoint's weights, dequantised to float32, in transformers' own model."""
    spec = checkpoint.spec
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_q_heads,
        num_key_value_heads=spec.num_kv_heads,
        max_position_embeddings=spec.max_position_embeddings,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    weights = {}
    for name in checkpoint.tensors:
        tensor = checkpoint.read(name)
        weights[f"model.{name}"] = tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor.float()
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are not part of the weights
    return model.eval()


def test_float32_logits_equal_transformers(default_model, recorded, float_logits):
    with torch.inference_mode():
        expected = dequantized_llama(default_model)(recorded["input_ids"].long()[None]).logits[0]
    assert (float_logits - expected).abs().max() <= 1e-3
    assert torch.equal(float_logits.argmax(-1), expected.argmax(-1))


def test_float32_logits_equal_the_recorded_ones(recorded, float_logits):
    assert (float_logits.gather(1, recorded["top_ids"].long()) - recorded["top_logits"]).abs().max() <= 1e-3
    assert (float_logits.logsumexp(-1) - recorded["lse"]).abs().max() <= 1e-3
    assert torch.equal(float_logits.argmax(-1), recorded["top_ids"][:, 0].long())


def test_float32_greedy_text_equals_the_recorded_one(float_stages):
    cases = json.loads((DATA / "greedy_f32.json").read_text())
    logits = torch.cat([float_stages.prefill(i, case["prompt_ids"]) for i, case in enumerate(cases)])
    lengths = [len(case["prompt_ids"]) for case in cases]
    texts: list[list[int]] = [[] for _ in cases]
    for step in range(64):
        tokens = logits.argmax(-1).tolist()
        for text, token in zip(texts, tokens):
            text.append(token)
        logits = float_stages.decode(range(len(cases)), [n + step for n in lengths], tokens)
    assert texts == [case["greedy_ids"] for case in cases]


def test_packed_logits_are_near_the_dequantised_ones(packed_stages, recorded, float_logits):
    """Prefill (bfloat16 copies of the weights) and decode (packed weights), against the same weights in float32."""
    ids = recorded["input_ids"].tolist()
    prefill = packed_stages.prefill(0, ids, all_rows=True)
    packed_stages.prefill(0, ids[:192])
    decoded = torch.cat([packed_stages.decode([0], [192 + i], [ids[192 + i]]) for i in range(64)])
    assert mean_kl(float_logits, prefill) < 0.003
    assert mean_kl(float_logits[192:], decoded) < 0.003
    assert (prefill.argmax(-1) == float_logits.argmax(-1)).float().mean() > 0.96
    assert mean_kl(float_logits[1:], prefill[:-1]) > 1, "rows that belong to other tokens must not pass"


@pytest.mark.parametrize(("dtype", "sparse_id"), [("float32", DENSE_ID), ("bfloat16", DENSE_ID), ("bfloat16", SMALL_ID)])
def test_two_stages_of_the_default_model_equal_one(dtype, sparse_id, default_model, float_stages, packed_stages, recorded):
    one = float_stages if dtype == "float32" else packed_stages
    two = Stages(default_model, [13], dtype=dtype, max_model_len=512)
    ids = recorded["input_ids"].tolist()
    first = [stages.prefill(0, ids[:200], chunk=128, sparse_id=sparse_id) for stages in (one, two)]
    assert torch.equal(*first)
    for stages in (one, two):
        stages.prefill(1, ids[:150], chunk=64, sparse_id=sparse_id)
    for step in range(3):
        tokens, lengths = (ids[200 + step], ids[150 + step]), (200 + step, 150 + step)
        assert torch.equal(*(stages.decode([0, 1], lengths, tokens, sparse_id) for stages in (one, two)))
    two.close()


@pytest.mark.parametrize("sparse_id", [DENSE_ID, SMALL_ID])
def test_a_sequence_does_not_change_with_its_company(sparse_id, packed_stages, recorded):
    """Eight sequences of different lengths decoded together and alone, with a prefill beside them, bit for bit."""
    ids = recorded["input_ids"].tolist()
    prompts = [ids[i : i + 20 + 30 * i] for i in range(8)]

    def step_logits(members: list[int], company: bool) -> dict[int, list[torch.Tensor]]:
        for i in members:
            packed_stages.prefill(i, prompts[i], chunk=64, sparse_id=sparse_id)
        logits: dict[int, list[torch.Tensor]] = {i: [] for i in members}
        for step in range(4):
            segments = [Segment(i, len(prompts[i]) + step, len(prompts[i]) + step + 1, sparse_id, False) for i in members]
            tokens = [ids[40 + 3 * i + step] for i in members]
            if company:  # the prompt of another sequence, chunk by chunk
                segments.append(Segment(7, 60 * step, 60 * step + 60, sparse_id, True))
                tokens += ids[60 * step : 60 * step + 60]
            rows = packed_stages.forward(segments, tokens, list(range(len(members))))
            for i, row in zip(members, rows):
                logits[i].append(row)
        return logits

    seven = step_logits(list(range(7)), company=True)
    eight = step_logits(list(range(8)), company=False)
    for i in range(8):
        alone = step_logits([i], company=False)[i]
        for step in range(4):
            assert torch.equal(eight[i][step], alone[step]), f"sequence {i} of eight, step {step}"
            assert i == 7 or torch.equal(seven[i][step], alone[step]), f"sequence {i} beside a prefill, step {step}"


def test_a_prompt_in_chunks_equals_the_whole(float_stages, packed_stages, recorded, float_logits):
    ids = recorded["input_ids"].tolist()
    whole = float_stages.prefill(0, ids, all_rows=True)
    assert (whole - float_logits).abs().max() < 1e-3  # float_logits came in chunks of 96
    packed = packed_stages.prefill(0, ids, all_rows=True)
    assert mean_kl(packed, packed_stages.prefill(0, ids, chunk=64, all_rows=True)) < 0.002


def test_rows_of_a_prompt_are_those_asked_for(float_stages, recorded, float_logits):
    ids = recorded["input_ids"].tolist()[:96]
    got = float_stages.forward([Segment(0, 0, 96, 0, True)], ids, [3, 95])
    assert (got - float_logits[[3, 95]]).abs().max() < 1e-3
    assert float_stages.forward([Segment(0, 0, 96, 0, True)], ids, []).shape == (0, 49152)


@pytest.fixture(scope="module", params=TINY_MODELS)
def tiny_folder(request, tmp_path_factory) -> Path:
    return make_tiny_model(request.param, tmp_path_factory.mktemp("tiny"))


def test_every_family_equals_transformers(tiny_folder, rng):
    checkpoint = open_checkpoint(str(tiny_folder))
    length = min(checkpoint.spec.max_model_len, 200)
    ids = torch.randint(4, checkpoint.spec.vocab_size, (length,), generator=rng)
    with torch.inference_mode():
        expected = load_reference(tiny_folder)(ids[None]).logits[0]
    one, two = (Stages(checkpoint, cuts, dtype="float32", max_model_len=length) for cuts in ([], [1]))
    whole = one.prefill(0, ids.tolist(), all_rows=True)
    assert (whole - expected).abs().max() <= 1e-3
    assert torch.equal(whole.argmax(-1), expected.argmax(-1))
    assert torch.equal(whole, two.prefill(0, ids.tolist(), all_rows=True))
    for stages in (one, two):
        stages.prefill(1, ids[: length - 8].tolist(), chunk=64)
    for position in range(length - 8, length):
        got = one.decode([1], [position], [int(ids[position])])
        assert (got[0] - expected[position]).abs().max() <= 1e-3
        assert torch.equal(got, two.decode([1], [position], [int(ids[position])]))
    for stages in (one, two):
        stages.close()
    checkpoint.close()


def test_bfloat16_of_unquantised_weights_does_not_depend_on_the_batch(tmp_path, rng):
    checkpoint = open_checkpoint(str(make_tiny_model("qwen3", tmp_path)))
    stages = Stages(checkpoint, [], dtype="bfloat16")
    prompts = [torch.randint(4, 300, (10 + 5 * i,), generator=rng).tolist() for i in range(8)]

    def decode(members: list[int]) -> torch.Tensor:
        for i in members:
            stages.prefill(i, prompts[i])
        return stages.decode(members, [len(prompts[i]) for i in members], [5 + i for i in members])

    together = decode(list(range(8)))
    for i in range(8):
        assert torch.equal(together[i], decode([i])[0])


def test_wrong_inputs_are_named(packed_stages, default_model):
    with pytest.raises(ValueError, match="2 tokens, so token_ids"):
        packed_stages.forward([Segment(0, 0, 2, 0, True)], [1, 2, 3], [])
    with pytest.raises(ValueError, match="decode segments must come before"):
        packed_stages.forward([Segment(0, 0, 2, 0, True), Segment(1, 5, 6, 0, False)], [1, 2, 3], [])
    with pytest.raises(ConfigError, match="8192"):
        Stages(default_model, [], max_model_len=8193)
    with pytest.raises(ValueError, match="first_layer < last_layer"):
        Stages(default_model, [0])
    with pytest.raises(ConfigError, match="float8"):
        Stages(default_model, [], dtype="float8")


def test_a_closed_stage_holds_nothing(default_model):
    stage = build_stage(
        default_model, first_layer=28, last_layer=30, num_chunks=8, max_sequences=1, max_model_len=256, sparse=SPARSE
    )
    assert stage.weight_bytes > 60e6  # two layers with their copies, and the head in both orders
    stage.close()
    stage.close()
    assert stage.weight_bytes == 0
