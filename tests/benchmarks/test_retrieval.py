"""The model with weights set by hand: dense and sparse attention find every fact, the mean key of a slice does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.bench_retrieval import LONG, calibrate_model, lines, measure
from benchmarks.retrieval_model import (
    FARTHEST,
    FIRST_FILLER,
    FIRST_KEY,
    HALF,
    NEAR_LOGIT,
    NUM_FAST,
    THETA,
    VALUE_TOKENS,
    RetrievalCheckpoint,
    codes,
    plant,
    weights,
    words,
)
from qsa.model.checkpoint.load import open_checkpoint

DEPTHS = (0.0, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 1.0)
SMALL = replace(LONG, window_size=128, top_k_fine=2, prefill_tile=64)  # 320 of 3072 tokens attended


@pytest.fixture(scope="module")
def calibration(tmp_path_factory):
    torch.use_deterministic_algorithms(False)  # memory filled with NaN is for operators' tests; this one takes its time
    return calibrate_model(tmp_path_factory.mktemp("retrieval"), 2048)


@pytest.mark.timeout(300)
def test_every_depth_is_answered_and_the_control_fails(calibration):
    results = measure(SMALL, 3072, "cpu", calibration, 512, depths=DEPTHS)
    found = {name: [one.is_right for one in result] for name, (result, _) in results.items()}
    assert all(found["dense"]) and all(found["code"]) and all(found["sketch"])
    assert sum(found["mean, no rerank (control)"]) <= 4  # what lies in the sink or the window is found by chance alone
    assert found["mean, no rerank (control)"][-1]  # the window holds the last fact
    names = [line.name for line in lines(results, "3k")]
    assert names[:2] == ["operators.retrieval_3k_dense", "operators.retrieval_3k_sparse"]


def test_positions_cannot_be_confused_within_half_a_million_tokens():
    """The token before must win over every other one by far more than a sum over 2^19 of them can make up for."""
    distances = torch.arange(1, 1 << 19, dtype=torch.float64)
    turns = THETA ** (-torch.arange(NUM_FAST, dtype=torch.float64) / HALF)
    gap = sum((1 - (turn * distances).cos()) for turn in turns.tolist())
    assert float(gap.min()) * NEAR_LOGIT > torch.tensor(2.0**19).log() + 10


def test_codes_of_keys_and_values_are_unlike_all_others():
    special = slice(FIRST_KEY, FIRST_FILLER)
    likeness = codes()[special] @ codes().T
    likeness[:, special].fill_diagonal_(0)
    assert float(likeness.abs().max()) <= FARTHEST


def test_the_folder_is_the_same_model(calibration):
    opened, made = open_checkpoint(str(calibration.parent)), RetrievalCheckpoint()
    assert replace(opened.spec, name="") == replace(made.spec, name="")
    assert all(torch.equal(opened.read(name), made.read(name)) for name in weights())
    facts = plant(400, (0.2, 0.7))
    text = "".join(words()[token - FIRST_KEY] for token in facts.context)
    for tokenizer in (opened.tokenizer(), made.tokenizer()):
        assert tokenizer.encode(text) == list(facts.context)
        assert tokenizer.decode(list(facts.context)) == text
    assert opened.eos_token_ids == made.eos_token_ids
    opened.close()


def test_facts_lie_where_they_should():
    facts = plant(1000, (0.0, 0.5, 1.0))
    for depth, key, value in facts.facts:
        place = facts.context.index(key)
        assert facts.context[place + 1 : place + 1 + VALUE_TOKENS] == value
        assert facts.context.count(key) == 1
        assert abs(place / 1000 - depth) < 0.02
    with pytest.raises(ValueError, match="do not hold"):
        plant(8, (0.0, 0.5, 1.0))
