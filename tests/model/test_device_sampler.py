"""Sampling on a device against sampling row by row on the host: the same tokens, log-probabilities and errors."""

from __future__ import annotations

import math

import pytest
import torch

from qsa.model import device_sampler
from qsa.model.device_sampler import sample_on_device
from qsa.model.sampler import SampleRow, sample

VOCAB = 3000
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CASES = {
    "greedy": dict(temperature=0.0),
    "plain": dict(),
    "min_p": dict(min_p=0.02),
    "top_k": dict(top_k=20, temperature=1.3),
    "top_k beyond what is sorted": dict(top_k=2000),
    "top_k of the whole vocabulary": dict(top_k=VOCAB),
    "top_p": dict(top_p=0.8),
    "top_p of flat rows": dict(top_p=0.95, temperature=50.0),
    "top_k and top_p": dict(top_k=50, top_p=0.7, min_p=0.001),
    "nearly nothing": dict(top_p=1e-9),
    "penalties": dict(counts=((3, 2), (5, 1), (7, 0)), frequency_penalty=0.7, presence_penalty=0.2, repetition_penalty=1.3),
    "bias": dict(logit_bias=((17, 8.0), (20, -math.inf)), temperature=0.7),
    "greedy bias": dict(logit_bias=((17, 80.0),), temperature=0.0),
}


def compare(logits: torch.Tensor, rows: list[SampleRow], device: str) -> None:
    want, got = sample(logits, rows), sample_on_device(logits.to(device), rows)
    assert [s.error for s in got] == [s.error for s in want]
    assert [s.token_id for s in got] == [s.token_id for s in want]
    for one, other in zip(got, want):
        assert [t for t, _ in one.top_logprobs] == [t for t, _ in other.top_logprobs]
        assert [v for _, v in one.top_logprobs] == pytest.approx([v for _, v in other.top_logprobs], abs=1e-9)
        assert one.logprob == (other.logprob if other.logprob is None else pytest.approx(other.logprob, abs=1e-9))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("rounding", [torch.float32, torch.bfloat16], ids=str)
def test_choices_are_those_of_the_host(options, rounding, device, rng):
    """Logits as a head in bfloat16 makes them are full of equal ones."""
    logits = (3 * torch.randn(40, VOCAB, generator=rng)).to(rounding).float()
    compare(logits, [SampleRow(position=i, seed=7 * i, **options) for i in range(40)], device)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_all_kinds_together(device, rng, monkeypatch):
    monkeypatch.setattr(device_sampler, "ROWS_AT_ONCE", 3)
    logits = 3 * torch.randn(4 * len(CASES), VOCAB, generator=rng)
    rows = [SampleRow(position=i, seed=i, logprobs=i % 4 - 1, **options) for i, options in enumerate([*CASES.values()] * 4)]
    compare(logits, rows, device)
    alone = [sample_on_device(logits[i : i + 1].to(device), [row])[0] for i, row in enumerate(rows)]
    assert alone == sample_on_device(logits.to(device), rows)


@pytest.mark.parametrize("device", DEVICES)
def test_a_broken_row_fails_alone(device, rng):
    logits = torch.randn(6, VOCAB, generator=rng)
    logits[1, 5], logits[2, 9], logits[3, 0] = math.nan, math.inf, -math.inf
    rows = [
        SampleRow(logprobs=2),
        SampleRow(temperature=0),
        SampleRow(top_p=0.9),
        SampleRow(min_p=0.5),
        SampleRow(logit_bias=((VOCAB, 1.0),)),
        SampleRow(logit_bias=tuple((i, -math.inf) for i in range(VOCAB)), temperature=0.5),
    ]
    compare(logits, rows, device)
    assert sum(s.error is not None for s in sample_on_device(logits.to(device), rows)) == 5


@pytest.mark.gpu
def test_logits_on_a_card_are_sampled_there():
    logits = torch.randn(3, VOCAB, device="cuda")
    logits[1, 7] = math.inf
    first, broken, last = sample(logits, [SampleRow(temperature=0)] * 3)
    assert [first.token_id, last.token_id] == logits[[0, 2]].argmax(-1).tolist() and broken.error is not None
