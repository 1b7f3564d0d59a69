"""Burst: what every row feeds and samples, who drops out when, and when a lane is done."""

from __future__ import annotations

import pytest

from qsa.scheduler.burst import Burst
from qsa.scheduler.plan import BurstItem, BurstPlan, SequenceResult, StepPlan, StepResult
from qsa.scheduler.request import SamplingParams, TokenOutput


def item(
    name: str, start: int = 10, token_ids: tuple[int, ...] = (5,), remaining: int = 100, counts=(), **sampling
) -> BurstItem:
    return BurstItem(name, ord(name[0]), start, token_ids, SamplingParams(**sampling), counts, remaining)


def make_burst(*lanes, max_steps: int = 10, eos: tuple[int, ...] = (0,)) -> Burst:
    return Burst(BurstPlan(3, 40, tuple(map(tuple, lanes)), max_steps, eos))


def answer(step: StepPlan, token: int = 7, **changes: SequenceResult) -> StepResult:
    results = (
        changes.get(i.request_id, SequenceResult(i.request_id, TokenOutput(token) if i.sampling else None)) for i in step.items
    )
    return StepResult(step.epoch, step.step, step.lane, tuple(results))


def play(burst: Burst, lane: int = 0, token: int = 7) -> list[StepPlan]:
    """Run a lane to its end."""
    steps = []
    while (step := burst.next_step(lane)) is not None:
        steps.append(step)
        burst.apply(answer(step, token))
    return steps


def names(step: StepPlan | None) -> str:
    return "".join(i.request_id for i in step.items) if step else ""


def test_steps_are_numbered_and_feed_what_was_sampled():
    burst = make_burst([item("a")], max_steps=3)
    steps = play(burst)
    assert [(s.epoch, s.step, s.lane) for s in steps] == [(3, 40, 0), (3, 41, 0), (3, 42, 0)]
    assert [(s.items[0].start, s.items[0].token_ids) for s in steps] == [(10, (5,)), (11, (7,)), (12, (7,))]
    assert all(s.items[0].sampling is not None and not s.items[0].is_prefill and not s.open_slots for s in steps)
    assert burst.is_over and burst.end(4.5).num_steps == (3,) and burst.end(4.5).wall_ms == 4.5


def test_known_tokens_are_fed_one_a_step_and_sampling_begins_with_the_last():
    burst = make_burst([item("a", token_ids=(5, 6, 8), remaining=2)])
    steps = play(burst)
    assert [(s.items[0].token_ids[0], s.items[0].sampling is not None) for s in steps] == [
        (5, False), (6, False), (8, True), (7, True)
    ]  # fmt: skip


def test_counts_grow_with_what_is_sampled():
    burst = make_burst([item("a", token_ids=(5, 6), counts=((5, 1), (7, 0)), repetition_penalty=1.2), item("b", counts=())])
    counts = [[dict(i.counts) for i in s.items] for s in play(burst, token=7)[:4]]
    assert counts == [[{}, {}], [{5: 1, 7: 0}, {}], [{5: 1, 7: 1}, {}], [{5: 1, 7: 2}, {}]]


@pytest.mark.parametrize(
    ("token", "sampling", "expected"),
    [
        (0, {}, ["ab", "b"]),
        (0, {"ignore_eos": True}, ["ab", "ab", "ab"]),
        (9, {"stop_token_ids": (9,), "ignore_eos": True}, ["ab", "b"]),
    ],
    ids=["eos", "ignored", "stop id"],
)
def test_a_row_that_ends_drops_out_and_the_others_go_on(token, sampling, expected):
    burst = make_burst([item("a", **sampling), item("b", remaining=3)], max_steps=5)
    for number, rows in enumerate(expected):
        step = burst.next_step(0)
        assert names(step) == rows
        burst.apply(answer(step, a=SequenceResult("a", TokenOutput(token if number == 0 else 7))))


def test_rows_end_by_length_by_error_and_by_silence():
    burst = make_burst([item("a", remaining=1), item("b"), item("c"), item("d", token_ids=(5, 6))])
    step = burst.next_step(0)
    burst.apply(answer(step, b=SequenceResult("b", error="not finite"), c=SequenceResult("c")))
    assert names(burst.next_step(0)) == "d", "only a replayed token needs no answer"


def test_a_failed_step_ends_its_lane():
    burst = make_burst([item("a")], [item("b")])
    first, second = burst.next_step(0), burst.next_step(1)
    burst.apply(StepResult(3, first.step, 0, error="out of memory"))
    assert burst.next_step(0) is None
    burst.apply(answer(second))
    assert names(burst.next_step(1)) == "b", "the other lane is not hurt"
    assert not burst.is_over


def test_uneven_lanes_end():
    burst = make_burst([item("a"), item("b", remaining=1)], [item("c"), item("d")])
    first, second = burst.next_step(0), burst.next_step(1)
    burst.apply(answer(first))
    burst.apply(answer(second))
    assert (names(burst.next_step(0)), names(burst.next_step(1))) == ("a", "cd"), "one row less is even enough"
    burst = make_burst([item("a", remaining=1), item("b", remaining=1)], [item("c"), item("d")])
    first, second = burst.next_step(0), burst.next_step(1)
    burst.apply(answer(first))
    assert burst.next_step(0) is None and not burst.is_over
    burst.apply(answer(second))
    assert burst.next_step(1) is None and burst.is_over and burst.end(1.0).num_steps == (1, 1)


def test_a_cut_lets_the_step_under_way_finish():
    burst = make_burst([item("a")], [item("b")])
    step = burst.next_step(0)
    burst.cut()
    assert burst.next_step(1) is None and not burst.is_over
    burst.apply(answer(step))
    assert burst.next_step(0) is None and burst.end(1.0).num_steps == (1, 0)


def test_answers_to_other_steps_are_noticed():
    burst = make_burst([item("a")])
    step = burst.next_step(0)
    with pytest.raises(AssertionError, match="under way"):
        burst.next_step(0)
    with pytest.raises(AssertionError, match="another step"):
        burst.apply(StepResult(3, step.step + 1, 0))
    burst.apply(answer(step))
    with pytest.raises(AssertionError, match="no step under way"):
        burst.apply(answer(step))


def test_the_next_step_is_foreseen_as_far_as_it_can_be():
    burst = make_burst(
        [item("a"), item("b", token_ids=(5, 6), remaining=1), item("c", start=20, remaining=2)],
        [item("d"), item("e")],
        max_steps=3,
    )
    assert burst.expected_step(0) == ((97, 10), (98, 10), (99, 20))
    step = burst.next_step(0)
    assert burst.expected_step(0) == ((97, 11), (98, 11), (99, 21)), "b's token is known, c may have one more"
    burst.apply(answer(step))
    step = burst.next_step(0)
    assert [(i.slot, i.start) for i in step.items] == [(97, 11), (98, 11), (99, 21)]
    assert burst.expected_step(0) == ((97, 12),), "b and c end with their last token"
    burst.apply(answer(step))
    burst.next_step(0)
    assert burst.expected_step(0) == (), "the burst has no fourth step"
    burst.next_step(1)
    assert burst.expected_step(1) == ((100, 11), (101, 11))
    burst.cut()
    assert burst.expected_step(1) == ()
