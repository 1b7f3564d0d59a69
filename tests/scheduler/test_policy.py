"""The decisions: everybody's decode step, whose prompt goes on, how long a burst is, and chunks by rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qsa.scheduler.policy import (
    MAX_DECODE_TURNS,
    MIN_DECODE_TURNS,
    SequenceView,
    decode_turns,
    longest_burst,
    plan_chunk,
    plan_decodes,
    prefill_order,
)


def view(name: str, age: int, need: int = 0, held: int = 1, **rest: object) -> SequenceView:
    values: dict = {"can_step": True, "is_busy": False, "is_leaving": False, "is_stalled": False}
    return SequenceView(name, (True, rest.pop("priority", 0), age), need=(need,), held=(held,), **(values | rest))


def test_everybody_who_can_decodes():
    views = [view("a", 1), view("b", 0), view("c", 4, can_step=False)]
    assert plan_decodes(views, (5,), (0,)).chosen == ("b", "a")


def test_one_prompt_goes_on():
    prompts = [view("old", 0, remaining=5000), view("short", 5, remaining=10), view("x", 6, can_step=False)]
    assert plan_chunk(prompts, (5,), (0,), 0).chosen == ("short",)
    assert plan_chunk(prompts, (5,), (0,), 1).chosen == ("old",)
    assert plan_chunk(prompts[2:], (5,), (0,), 0).chosen == ()


def test_turns_alternate_between_short_and_old():
    prompts = [view("old", 0, remaining=5000), view("short", 5, remaining=10), view("urgent", 9, remaining=900, priority=-1)]
    assert [v.request_id for v in prefill_order(prompts, 0)] == ["urgent", "short", "old"]
    assert [v.request_id for v in prefill_order(prompts, 1)] == ["old", "short", "urgent"]


def test_the_youngest_gives_way():
    views = [view("a", 0, need=2), view("b", 1, held=3), view("c", 2, held=3)]
    decision = plan_decodes(views, (0,), (0,))
    assert decision.chosen == ("a", "b") and decision.preempt == ("c",)


def test_only_as_many_as_needed_give_way_and_the_urgent_stay():
    views = [view("a", 9, need=4, priority=-1), view("b", 1, held=3), view("c", 2, held=3), view("d", 3, held=3)]
    decision = plan_decodes(views, (0,), (0,))
    assert decision.preempt == ("d", "c") and decision.chosen == ("a", "b")


def test_nobody_gives_way_when_it_would_not_help():
    views = [view("a", 0, held=8, can_step=False), view("b", 1, need=3, held=1), view("c", 2, held=1)]
    decision = plan_decodes(views, (0,), (0,))
    assert decision.preempt == () and decision.stalled == ("b",) and decision.chosen == ("c",)


def test_who_is_busy_gives_way_later_and_nothing_is_taken_meanwhile():
    views = [view("a", 0, need=2), view("b", 1, held=5, is_busy=True, can_step=False), view("c", 2, need=1, held=0)]
    decision = plan_decodes(views, (1,), (0,))
    assert decision.preempt == () and decision.preempt_later == ("b",)
    assert decision.stalled == ("a", "c") and decision.chosen == ()  # c may not take the chunk that a waits for


def test_what_comes_back_anyway_is_not_taken_twice():
    leaving = view("b", 1, held=5, is_busy=True, can_step=False, is_leaving=True)
    decision = plan_decodes([view("a", 0, need=2), leaving, view("c", 2, held=5)], (1,), (0,))
    assert decision.preempt == decision.preempt_later == () and decision.stalled == ("a",)
    decision = plan_decodes([view("a", 0, need=2), view("c", 2, held=5)], (1,), (1,))
    assert decision.preempt == () and decision.stalled == ("a",)


def test_a_stalled_prompt_lets_a_stronger_one_go():
    prompts = [view("old", 0, need=1, remaining=5000), view("short", 5, need=3, held=0, remaining=10)]
    decision = plan_chunk([*prompts, view("x", 1, held=5, can_step=False)], (1,), (0,), 0)
    assert decision.chosen == ("old",) and decision.stalled == ("short",)


def test_decode_turns_follow_measured_times():
    assert decode_turns(None, 10.0) == decode_turns(100.0, None) == MIN_DECODE_TURNS
    assert decode_turns(150.0, 10.0) == 10  # 100 ms of decodes beside 150 ms of a chunk
    assert decode_turns(5.0, 10.0) == MIN_DECODE_TURNS
    assert decode_turns(1e6, 1.0) == MAX_DECODE_TURNS


@given(st.floats(1.0, 1000.0), st.floats(1.0, 1000.0))
def test_prompts_get_half_of_the_time_where_the_minimum_allows_it(chunk_ms, decode_ms):
    turns = decode_turns(chunk_ms, decode_ms)
    assert turns * decode_ms <= chunk_ms or turns == MIN_DECODE_TURNS
    gaps = sorted([decode_ms] * (turns - 1) + [decode_ms + chunk_ms])
    assert gaps[len(gaps) // 2] == decode_ms, "the median gap is the quiet one"


@pytest.mark.parametrize("most", [1, 2, 7, 32])
def test_the_longest_burst_that_fits(most):
    for limit in range(1, 40):
        assert longest_burst(most, lambda steps, limit=limit: steps <= limit) == min(most, limit)


VIEWS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), *[st.booleans()] * 4, st.integers(-1, 1)), max_size=8)


@given(VIEWS, st.integers(0, 4), st.integers(0, 2))
def test_decisions_are_sound(rows, free, kind):
    """kind: a burst, or a chunk in an even or an odd turn."""
    views = [
        view(
            str(i),
            i,
            need,
            held,
            can_step=can and not leaving,
            is_busy=busy,
            is_leaving=leaving and busy,
            is_stalled=stalled,
            priority=priority,
        )
        for i, (need, held, can, busy, leaving, stalled, priority) in enumerate(rows)
    ]
    by_id = {v.request_id: v for v in views}

    def decide():
        return plan_decodes(views, (free,), (0,)) if kind == 2 else plan_chunk(views, (free,), (0,), kind)

    decision = decide()
    taken = decision.chosen
    assert len(set(taken)) == len(taken) and (kind == 2 or len(taken) <= 1)
    assert all(by_id[name].can_step for name in taken)
    assert not set(taken) & set(decision.preempt), "a sequence steps and gives way in the same plan"
    assert not any(by_id[name].is_busy for name in decision.preempt), "chunks of a step in flight are taken"
    assert not set(taken) & set(decision.stalled)
    room = free + sum(by_id[name].held[0] for name in decision.preempt)
    assert sum(by_id[name].need[0] for name in taken) <= room, "the plan would run out of chunks"
    blocked = [by_id[name] for name in decision.stalled]
    for name in taken:  # nobody grows while a stronger one waits
        assert not by_id[name].need[0] or not any(b.rank < by_id[name].rank for b in blocked if kind == 2 or b.is_stalled)
    assert decide() == decision
