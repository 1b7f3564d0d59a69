"""Sampling: every rule against its definition, and choices that depend on seed and position alone."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from qsa.model.sampler import Sampled, SampleRow, sample, uniform

VOCAB = 1000


@pytest.fixture
def logits(rng) -> torch.Tensor:
    return torch.randn(6, VOCAB, generator=rng) * 3


def draws(row_logits: torch.Tensor, count: int, **params: object) -> list[int]:
    """Tokens at positions 0 .. count - 1."""
    rows = [SampleRow(position=position, seed=7, **params) for position in range(count)]
    return [sampled.token_id for sampled in sample(row_logits.expand(count, -1), rows)]


def chi_square(found: list[int], expected: torch.Tensor) -> float:
    """Pearson's statistic over its degrees of freedom."""
    counts = Counter(found)
    kept = [i for i, p in enumerate(expected.tolist()) if p > 0]
    assert set(counts) <= set(kept), "a token of probability zero was drawn"
    wanted = [float(expected[i]) * len(found) for i in kept]
    return sum((counts[i] - w) ** 2 / w for i, w in zip(kept, wanted)) / max(1, len(kept) - 1)


def test_greedy_takes_the_largest(logits):
    for temperature in (0.0, 1e-6, 9e-6):
        got = sample(logits, [SampleRow(temperature=temperature, seed=i) for i in range(6)])
        assert [s.token_id for s in got] == logits.argmax(-1).tolist()
        assert all(s == Sampled(s.token_id) for s in got)


def test_a_small_temperature_is_nearly_greedy(logits):
    assert set(draws(logits[0], 50, temperature=1e-3)) == {int(logits[0].argmax())}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature, rng):
    row = torch.randn(8, generator=rng)
    found = draws(row, 8000, temperature=temperature)
    assert chi_square(found, (row / temperature).softmax(0)) < 3.0  # 7 degrees of freedom: p = 0.004
    assert chi_square(found, (row / temperature * 1.3).softmax(0)) > 3.0, "the test must tell another distribution apart"


def test_top_k_keeps_the_k_likeliest(rng):
    row = torch.randn(12, generator=rng)
    expected = torch.where(row >= row.topk(4).values[-1], row, -math.inf).softmax(0)
    assert chi_square(draws(row, 6000, top_k=4), expected) < 3.5
    assert set(draws(row, 100, top_k=1)) == {int(row.argmax())}


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    row = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15]).log()
    assert chi_square(draws(row, 6000, top_p=0.75), torch.tensor([0, 0.4, 0, 0.3, 0.15]) / 0.85) < 3.5
    assert set(draws(row, 200, top_p=0.69)) == {1, 3}
    assert set(draws(row, 200, top_p=1e-6)) == {1}


def test_top_p_after_top_k_counts_the_kept_mass_only():
    row = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15]).log()
    # of 0.4 and 0.3 alone the first has 0.57: enough for 0.5, though it is 0.4 of the whole
    assert set(draws(row, 200, top_k=2, top_p=0.5)) == {1}


@pytest.mark.parametrize("scale", [0.0, 0.01, 3.0])
def test_top_p_over_a_wide_vocabulary_equals_a_full_sort(scale, rng):
    """Flat rows need far more candidates than are sorted at first."""
    row = torch.randn(3000, generator=rng) * scale + torch.arange(3000) * 1e-5
    probs, order = row.double().softmax(0).sort(descending=True)
    kept = set(order[: int((probs.cumsum(0) - probs < 0.9).sum())].tolist())
    found = set(draws(row, 400, top_p=0.9))
    assert len(found - kept) <= 1 and len(kept) < 3000  # one at the very edge may fall either way by rounding


def test_min_p_is_relative_to_the_likeliest():
    row = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert chi_square(draws(row, 6000, min_p=0.25), torch.tensor([0.5, 0.3, 0.15, 0]) / 0.95) < 3.5
    assert set(draws(row, 100, min_p=1.0)) == {0}


def test_penalties_change_logits_by_their_definitions():
    row = torch.tensor([[2.0, 1.9, -1.0, -1.2]])
    counts = ((0, 3), (2, 1))

    def greedy(**params: object) -> int:
        return sample(row, [SampleRow(temperature=0, counts=counts, **params)])[0].token_id

    assert greedy() == 0
    assert greedy(presence_penalty=0.05) == 0 and greedy(presence_penalty=0.2) == 1
    assert greedy(frequency_penalty=0.02) == 0 and greedy(frequency_penalty=0.04) == 1  # three times 0.04 is 0.12
    assert greedy(repetition_penalty=1.04) == 0 and greedy(repetition_penalty=1.1) == 1
    assert greedy(frequency_penalty=-1.0) == 0
    negative = sample(-row[:, 2:] * -1, [SampleRow(temperature=0, counts=((0, 1),), repetition_penalty=1.5)])
    assert negative[0].token_id == 1  # -1.0 becomes -1.5, below -1.2
    assert sample(row, [SampleRow(temperature=0, presence_penalty=2.0)])[0].token_id == 0  # nothing generated yet


def test_a_repetition_penalty_reaches_tokens_of_the_prompt_alone():
    row = torch.tensor([[2.0, 1.9, -1.0, -1.2]])

    def greedy(**params: object) -> int:
        return sample(row, [SampleRow(temperature=0, counts=((0, 0),), **params)])[0].token_id

    assert greedy(repetition_penalty=1.1) == 1
    assert greedy(presence_penalty=2.0) == 0 and greedy(frequency_penalty=2.0) == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "bad",
    [
        dict(logit_bias=tuple((i, -math.inf) for i in range(VOCAB))),
        dict(logit_bias=((3, math.inf),)),
        dict(logit_bias=((3, math.nan),)),
        dict(logit_bias=((3, 1e300),)),
        dict(counts=((3, 1),), presence_penalty=math.nan),
    ],
    ids=["none left", "infinite", "nan", "overflow", "penalty"],
)
def test_biases_that_leave_nothing_to_choose_fail_alone(logits, bad, temperature):
    got = sample(logits[:2], [SampleRow(temperature=temperature, **bad), SampleRow(temperature=temperature)])
    assert "no token with a finite logit" in got[0].error
    assert got[1].error is None and got[1].token_id >= 0


def test_a_bias_of_minus_infinity_forbids(logits):
    bias = tuple((i, -math.inf) for i in range(VOCAB) if i != 17)
    for params in (dict(temperature=0), dict(temperature=1e30), dict(top_k=5), dict(top_p=1e-12), dict(min_p=1.0)):
        got = sample(logits[:1], [SampleRow(logit_bias=bias, **params)])
        assert got[0].token_id == 17


def test_logit_bias_forces_and_forbids(logits):
    got = sample(logits[:2], [SampleRow(logit_bias=((5, 100.0),)), SampleRow(temperature=0, logit_bias=((5, 100.0),))])
    assert [s.token_id for s in got] == [5, 5]
    best = int(logits[0].argmax())
    assert best not in draws(logits[0], 100, logit_bias=((best, -100.0),))
    bad = sample(logits[:2], [SampleRow(logit_bias=((VOCAB, 1.0),)), SampleRow(temperature=0)])
    assert str(VOCAB) in bad[0].error and bad[1].error is None


def test_logprobs_are_the_models_own(logits):
    rows = [SampleRow(temperature=t, seed=1, logprobs=n, top_k=3) for t, n in ((0, 0), (0.5, 2), (2.0, 5), (1.0, VOCAB + 5))]
    expected = logits.double().log_softmax(-1)
    for i, (row, got) in enumerate(zip(rows, sample(logits[:4], rows))):
        assert got.logprob == pytest.approx(float(expected[i, got.token_id]), abs=1e-9)
        assert len(got.top_logprobs) == min(row.logprobs, VOCAB)
        values, ids = expected[i].topk(len(got.top_logprobs))
        assert [t for t, _ in got.top_logprobs] == ids.tolist()
        assert [v for _, v in got.top_logprobs] == pytest.approx(values.tolist(), abs=1e-9)


def test_logprobs_are_finite_for_extreme_logits():
    row = torch.full((1, 50), -3e37)
    row[0, 3] = 3e37
    got = sample(row, [SampleRow(temperature=0, logprobs=50)])[0]
    assert got.token_id == 3 and got.logprob == 0.0
    assert all(math.isfinite(value) for _, value in got.top_logprobs)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_fails_alone(logits, bad):
    rows = [SampleRow(temperature=t, seed=i, logprobs=1) for i, t in enumerate((0, 1, 0, 1, 0.7, 0))]
    alone = sample(logits, rows)
    broken = logits.clone()
    broken[1, 17] = broken[2, 40] = bad
    got = sample(broken, rows)
    assert [i for i, s in enumerate(got) if s.error] == [1, 2]
    assert [got[i] for i in (0, 3, 4, 5)] == [alone[i] for i in (0, 3, 4, 5)]


def test_a_finite_row_whose_sum_overflows_is_no_error():
    assert sample(torch.full((1, 100), 3e38), [SampleRow(temperature=0)])[0].error is None


def test_choices_do_not_depend_on_the_batch(logits):
    rows = [
        SampleRow(position=3, seed=11),
        SampleRow(position=4, seed=11, top_p=0.9),
        SampleRow(position=9, seed=2, top_k=20, min_p=0.05),
        SampleRow(temperature=0),
        SampleRow(position=1, seed=5, counts=((3, 2),), frequency_penalty=0.3, logprobs=3),
        SampleRow(position=3, seed=11),
    ]
    together = sample(logits, rows)
    assert together == [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert together[::-1] == sample(logits.flip(0), rows[::-1])


def test_seed_and_position_both_matter(logits):
    by_position = {sample(logits[:1], [SampleRow(position=p, seed=1)])[0].token_id for p in range(20)}
    by_seed = {sample(logits[:1], [SampleRow(position=1, seed=s)])[0].token_id for s in range(20)}
    assert len(by_position) > 3 and len(by_seed) > 3


def test_uniform_numbers_are_uniform_and_fixed():
    numbers = [uniform(seed, position) for seed in range(40) for position in range(50)]
    assert len(set(numbers)) == 2000 and min(numbers) >= 0 and max(numbers) < 1
    tenths = torch.histc(torch.tensor(numbers), 10, 0, 1)
    assert ((tenths - 200) ** 2 / 200).sum() < 24  # 9 degrees of freedom: p = 0.004
    assert uniform(0, 0) == uniform(1 << 64, 0)
    assert uniform(2**64 - 1, 2**40) == uniform(-1, 2**40)


def test_no_rows_and_wrong_rows(logits):
    assert sample(logits[:0], []) == []
    with pytest.raises(ValueError, match="6 rows, but 1"):
        sample(logits, [SampleRow()])
