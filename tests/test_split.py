"""Layers are divided so that no other split has a faster slowest stage, and stay where they are while that hardly matters."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qsa.config import EngineConfig, make_config
from qsa.errors import ConfigError
from qsa.model.checkpoint.load import open_checkpoint
from qsa.model.layer_times import LayerTimes
from qsa.split import CARD_SLACK, SLACK, even_split, has_choice, lane_batch, plan_split, split_by_time, stage_times

TIMES = st.floats(0.01, 100)


@pytest.fixture(scope="module")
def spec():
    checkpoint = open_checkpoint("default")
    yield checkpoint.spec
    checkpoint.close()


def measured(layer_ms: float | tuple[float, ...] = 1.0, head_ms: float = 2.5, **other: float) -> LayerTimes:
    each = (layer_ms,) * 30 if isinstance(layer_ms, float) else layer_ms
    return LayerTimes(each, head_ms, first_ms=0.0, batch=4, context=4096, device="cpu", **other)


def config(**pipeline: object) -> EngineConfig:
    return make_config({"pipeline": {"device": "cpu", **pipeline}})


def all_splits(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    cuts = combinations(range(1, num_layers), num_stages - 1)
    bounds = [(0, *ends, num_layers) for ends in cuts]
    return [tuple(end - begin for begin, end in pairwise(bound)) for bound in bounds]


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "head", "expected"),
    [
        (30, 1, 8.0, (30,)),
        (30, 2, 0.0, (15, 15)),
        (30, 2, 8.0, (19, 11)),
        (30, 2, 4.0, (17, 13)),
        (4, 4, 50.0, (1, 1, 1, 1)),
        (5, 2, 100.0, (4, 1)),
    ],
)
def test_layers_are_split_evenly_in_time(num_layers, num_stages, head, expected):
    assert split_by_time(num_layers, num_stages, 1.0, 0.0, head) == expected


@pytest.mark.parametrize("head", [0.0, 0.7, 3.0])
def test_equally_slow_splits_give_way_to_the_most_even_one(head):
    counts = split_by_time(10, 4, 1.0, 0.0, head)
    slowest = max(stage_times(counts, 1.0, 0.0, head))
    equal = [other for other in all_splits(10, 4) if max(stage_times(other, 1.0, 0.0, head)) <= slowest + 1e-9]
    assert math.isclose(uneven(counts, head), min(uneven(other, head) for other in equal))


def uneven(counts: tuple[int, ...], head: float) -> float:
    return sum(time**2 for time in stage_times(counts, 1.0, 0.0, head))


@given(st.lists(TIMES, min_size=1, max_size=9), st.integers(1, 5), TIMES, TIMES)
def test_no_split_has_a_faster_slowest_stage(layer_ms, num_stages, first_ms, head_ms):
    num_stages = min(num_stages, len(layer_ms))
    times = layer_ms, first_ms, head_ms
    counts = split_by_time(len(layer_ms), num_stages, *times)
    assert len(counts) == num_stages and sum(counts) == len(layer_ms) and min(counts) >= 1
    best = min(max(stage_times(other, *times)) for other in all_splits(len(layer_ms), num_stages))
    assert max(stage_times(counts, *times)) <= best * (1 + 1e-6)


@given(st.lists(TIMES, min_size=2, max_size=9), st.integers(2, 4), TIMES, TIMES, st.data())
def test_a_split_stays_near_another_one_where_that_costs_little(layer_ms, num_stages, first_ms, head_ms, data):
    num_stages = min(num_stages, len(layer_ms))
    splits = all_splits(len(layer_ms), num_stages)
    near = data.draw(st.sampled_from(splits))
    counts = split_by_time(len(layer_ms), num_stages, layer_ms, first_ms, head_ms, near=near)
    slowest = {split: max(stage_times(split, layer_ms, first_ms, head_ms)) for split in splits}
    limit = min(slowest.values()) * (1 + SLACK)
    assert slowest[counts] <= limit * (1 + 1e-6)
    nearest = min(moved(near, split) for split, time in slowest.items() if time <= limit * (1 - 1e-6) or split == counts)
    assert moved(near, counts) == nearest


def moved(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Layers that are on another stage's side of a cut, over all cuts."""
    return sum(abs(sum(one[:cut]) - sum(other[:cut])) for cut in range(len(one)))


def test_stage_times_count_what_ends_have_besides():
    assert stage_times((2, 1), [1.0, 2.0, 4.0], 0.5, 8.0) == (3.5, 12.0)
    assert stage_times((3,), 2.0, 0.5, 8.0) == (14.5,)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ConfigError, match=r"pipeline\.num_stages is 5, but the model has 4 layers"):
        split_by_time(4, 5, 1.0, 0.0, 0.0)


# what a start makes of it


def test_without_times_the_sizes_of_weights_decide(spec):
    split = plan_split(spec, config())
    assert split.counts == split.estimate == (17, 13) and split.source == "estimated" and split.times is None
    assert split.layers == [(0, 17), (17, 30)]
    assert split.cells == ["17.0 layers", "17.0 layers"] and "by the sizes of weights" in split.line


def test_measured_times_decide_and_are_said(spec):
    split = plan_split(spec, config(), measured(head_ms=8.0, step_ms=0.5))
    assert split.counts == (19, 11) and split.source == "measured"
    assert split.stage_times == pytest.approx((19.5, 19.5))
    for words in (
        "19 + 11, by measured times",
        "19.50 ms and 19.50 ms",
        "17 + 13, as by sizes, would take 17.50 ms and 21.50 ms",
    ):
        assert words in split.line
    for words in ("a layer 1.000 ms", "head and sampler 8.000", "batch 4", "cpu"):
        assert words in split.line


@pytest.mark.parametrize(
    ("head_ms", "counts"), [(2.6, (17, 13)), (4.0, (17, 13)), (5.4, (17, 13)), (0.0, (15, 15)), (7.0, (18, 12))]
)
def test_a_split_is_kept_while_another_is_hardly_better(spec, head_ms, counts):
    assert plan_split(spec, config(), measured(head_ms=head_ms)).counts == counts


@given(st.floats(-0.01, 0.01), st.floats(-0.01, 0.01))
def test_noise_moves_no_layers_where_estimate_and_measurement_agree(spec, one, other):
    times = measured(layer_ms=1.0 + one, head_ms=4.0 * (1 + other))
    assert plan_split(spec, config(), times).counts == (17, 13)


def test_a_split_that_is_given_stays(spec):
    split = plan_split(spec, config(split=[15, 15]), measured(head_ms=8.0))
    assert split.counts == (15, 15) and split.source == "given"
    assert "as pipeline.split says; a decode step takes 15.00 ms and 23.00 ms" in split.line
    with pytest.raises(ConfigError, match=r"pipeline\.split is \[20, 20\], 40 layers, but .* has 30"):
        plan_split(spec, config(split=[20, 20]))


@pytest.mark.parametrize(
    ("times", "words"),
    [
        (measured(head_ms=math.nan), "absurd"),
        (measured(head_ms=math.inf), "absurd"),
        (measured(layer_ms=0.0), "absurd"),
        (measured(layer_ms=-1.0), "absurd"),
        (measured(head_ms=-1.0), "absurd"),
        (measured(head_ms=9.0), "as long as 9.0 layers, where its size says 4.0"),
        (measured(layer_ms=(1.0,) * 29), "of 29 layers, not 30"),
        (measured(spread=0.4), "differ by 40%"),
    ],
)
def test_absurd_times_are_not_used(spec, times, words):
    split = plan_split(spec, config(), times)
    assert split == replace(plan_split(spec, config()), remark=split.remark)
    assert "measured times were not used" in split.line and words in split.line


def test_when_there_is_something_to_measure_and_for_how_many_sequences(spec):
    assert has_choice(spec, config()) and has_choice(spec, config(num_stages=29))
    for nothing in (dict(num_stages=1), dict(num_stages=30), dict(split=[15, 15])):
        assert not has_choice(spec, config(**nothing))
    assert lane_batch(config()) == 4 and lane_batch(config(num_stages=1)) == 8 and lane_batch(config(lanes=1)) == 8
    assert lane_batch(make_config({"limits": {"max_sequences": 5}})) == 3


def test_on_cards_the_most_even_split_that_costs_decodes_nothing_is_taken(spec):
    """30 layers; the head of the default model counts as 4 layers by its size, and measured as what the times say."""
    cards = make_config({"pipeline": {"device": "cuda", "gpus_per_stage": 1.0}})
    on_card = {"device": "NVIDIA", "first_ms": 0.0, "batch": 4, "context": 4096}
    assert plan_split(spec, cards).counts == (16, 14) and plan_split(spec, config()).counts == (17, 13)
    for head_ms, counts in ((1.0, (15, 15)), (3.0, (15, 15)), (5.0, (16, 14)), (8.0, (18, 12)), (15.0, (20, 10))):
        split = plan_split(spec, cards, LayerTimes((1.0,) * 30, head_ms, **on_card))
        assert (split.source, split.counts) == ("measured", counts)
        assert max(split.stage_times) <= (1 + CARD_SLACK) * max(
            stage_times(split_by_time(30, 2, 1.0, 0.0, head_ms), 1.0, 0.0, head_ms)
        )
    assert plan_split(spec, cards, LayerTimes((1.0,) * 30, 17.0, **on_card)).remark


@pytest.mark.parametrize(("num_stages", "counts"), [(1, (30,)), (2, (15, 15)), (4, (8, 7, 8, 7)), (7, (5, 4, 4, 5, 4, 4, 4))])
def test_even_splits(num_stages, counts):
    assert even_split(30, num_stages) == counts
