"""Figures from spans of a pipeline whose times are known."""

import pytest

from benchmarks.timeline import percentile, rounds_in, wait_share_of_prefill
from qsa.actors.stage_clock import Span


def pipeline(num_steps, first_s, second_s, way_s, answer_s=0.0):
    """Two stages and two lanes; a step goes from stage to stage in `way_s`, its answer back in `answer_s`."""
    stages, free, ready = ([], []), [0.0, 0.0], [0.0, 0.0]
    for step in range(num_steps):
        for lane in (0, 1):
            begin = max(free[0], ready[lane])
            free[0] = begin + first_s
            stages[0].append(Span("compute", lane, step, begin, free[0]))
            there = max(free[1], free[0] + way_s)
            free[1] = there + second_s
            stages[1].append(Span("compute", lane, step, there, free[1]))
            ready[lane] = free[1] + answer_s
    return stages


def test_two_equal_stages_lose_what_the_way_takes():
    rounds = rounds_in(pipeline(50, 0.010, 0.010, 0.001), (0.0, 10.0))
    assert rounds.lanes == 2 and rounds.num_rounds == 49
    assert rounds.compute_ms == pytest.approx((20.0, 20.0))
    assert rounds.round_ms == pytest.approx(21.0, rel=0.01)
    assert rounds.over_compute == pytest.approx(1.05, rel=0.01)
    assert rounds.transfer_ms == pytest.approx(1.0, rel=0.05), "one of the two ways is hidden behind the other lane"


def test_a_slower_stage_hides_the_way():
    rounds = rounds_in(pipeline(50, 0.008, 0.010, 0.001), (0.0, 10.0))
    assert rounds.over_compute == pytest.approx(1.0, rel=0.01)
    assert rounds.transfer_share < 0.01


def test_slow_answers_are_told_apart():
    rounds = rounds_in(pipeline(50, 0.010, 0.010, 0.0, answer_s=0.004), (0.0, 10.0))
    assert rounds.transfer_ms < 0.1
    assert rounds.answer_ms == pytest.approx(4.0, rel=0.1)


def test_a_window_without_rounds_says_so():
    with pytest.raises(ValueError, match="no rounds"):
        rounds_in(pipeline(3, 0.01, 0.01, 0.0), (5.0, 6.0))


def test_waiting_of_a_prefill_counts_after_the_first_chunk():
    first = [Span("chunk", 0, n, n * 1.0, n + 1.0) for n in range(4)]
    second = [Span("chunk", 0, n, n + 1.0, n + 1.8) for n in range(4)]
    assert wait_share_of_prefill([first, second], (0.0, 4.8)) == pytest.approx(3 * 0.2 / 4.8)


def test_percentiles_are_values_that_occurred():
    values = [float(n) for n in range(1, 101)]
    assert (percentile(values, 50), percentile(values, 99), percentile(values, 100)) == (50.0, 99.0, 100.0)
    assert percentile([7.0], 99) == 7.0
    with pytest.raises(ValueError, match="needs values"):
        percentile([], 50)
