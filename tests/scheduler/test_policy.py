"""plan_step: decodes of the lane, one prompt chunk in its turn, and chunks by rank."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qsa.scheduler.policy import MAX_DECODE_TURNS, SequenceView, decode_turns, plan_step, prefill_order


def view(name: str, age: int, need: int = 0, held: int = 1, **rest: object) -> SequenceView:
    values: dict = {
        "lane": 0, "is_prefill": False, "can_step": True, "is_busy": False, "is_leaving": False, "is_stalled": False,
    }  # fmt: skip
    return SequenceView(name, (True, rest.pop("priority", 0), age), need=(need,), held=(held,), **(values | rest))


def prompt(name: str, age: int, remaining: int = 100, **rest: object) -> SequenceView:
    return view(name, age, lane=None, is_prefill=True, remaining=remaining, **rest)


def test_all_decodes_of_the_lane_and_one_prompt():
    views = [view("a", 0), view("b", 1, lane=1), prompt("p", 2), prompt("q", 3), view("c", 4, can_step=False)]
    decision = plan_step(views, 0, (5,))
    assert decision.decodes == ("a",) and decision.prefill == "p"


def test_prompts_wait_for_their_turn_only_while_something_decodes():
    assert plan_step([view("a", 0), prompt("p", 1)], 0, (5,), prefill_due=False).prefill is None
    assert plan_step([prompt("p", 1)], 0, (5,), prefill_due=False).prefill == "p"
    assert plan_step([prompt("p", 1)], 0, (5,), prefill_due=False, decodes_elsewhere=True).prefill is None


def test_turns_alternate_between_short_and_old():
    prompts = [prompt("old", 0, 5000), prompt("short", 5, 10), prompt("urgent", 9, 900, priority=-1)]
    assert [v.request_id for v in prefill_order(prompts, 0)] == ["urgent", "short", "old"]
    assert [v.request_id for v in prefill_order(prompts, 1)] == ["old", "short", "urgent"]


def test_the_youngest_gives_way():
    views = [view("a", 0, need=2), view("b", 1, held=3), view("c", 2, held=3)]
    decision = plan_step(views, 0, (0,))
    assert decision.decodes == ("a", "b") and decision.preempt == ("c",)


def test_only_as_many_as_needed_give_way_and_the_urgent_stay():
    views = [view("a", 9, need=4, priority=-1), view("b", 1, held=3), view("c", 2, held=3), view("d", 3, held=3)]
    decision = plan_step(views, 0, (0,))
    assert decision.preempt == ("d", "c") and decision.decodes == ("a", "b")


def test_nobody_gives_way_when_it_would_not_help():
    views = [view("a", 0, held=8, can_step=False), view("b", 1, need=3, held=1), view("c", 2, held=1)]
    decision = plan_step(views, 0, (0,))
    assert decision.preempt == () and decision.stalled == ("b",) and decision.decodes == ("c",)


def test_who_is_busy_gives_way_later_and_nothing_is_taken_meanwhile():
    views = [view("a", 0, need=2), view("b", 1, held=5, lane=1, is_busy=True, can_step=False), view("c", 2, need=1, held=0)]
    decision = plan_step(views, 0, (1,))
    assert decision.preempt == () and decision.preempt_later == ("b",)
    assert decision.stalled == ("a", "c") and decision.decodes == ()  # c may not take the chunk that a waits for


def test_what_comes_back_anyway_is_not_taken_twice():
    leaving = view("b", 1, held=5, lane=1, is_busy=True, can_step=False, is_leaving=True)
    decision = plan_step([view("a", 0, need=2), leaving, view("c", 2, held=5)], 0, (1,))
    assert decision.preempt == decision.preempt_later == () and decision.stalled == ("a",)
    decision = plan_step([view("a", 0, need=2), view("c", 2, held=5)], 0, (1,), returning=(1,))
    assert decision.preempt == () and decision.stalled == ("a",)


def test_a_stalled_prompt_lets_a_stronger_one_go():
    views = [prompt("old", 0, 5000, need=1), prompt("short", 5, 10, need=3, held=0), view("x", 1, held=5, can_step=False)]
    decision = plan_step(views, 0, (1,), prefill_turn=0)
    assert decision.prefill == "old" and decision.stalled == ("short",)


def test_decode_turns_follow_measured_times():
    assert decode_turns(None, 10.0) == decode_turns(100.0, None) == 1
    assert decode_turns(400.0, 10.0) == 10  # 100 ms of decodes beside 400 ms of prompts
    assert decode_turns(5.0, 10.0) == 1
    assert decode_turns(1e6, 1.0) == MAX_DECODE_TURNS


VIEWS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 1), *[st.booleans()] * 5, st.integers(-1, 1)), max_size=8
)


@given(VIEWS, st.integers(0, 4), st.integers(0, 1), st.integers(0, 1), st.booleans())
def test_decisions_are_sound(rows, free, lane, turn, due):
    views = [
        view(
            str(i),
            i,
            need,
            held,
            lane=None if prefill else lane_,
            is_prefill=prefill,
            can_step=can and not leaving,
            is_busy=busy,
            is_leaving=leaving and busy,
            is_stalled=stalled,
            priority=priority,
        )
        for i, (need, held, lane_, prefill, can, busy, leaving, stalled, priority) in enumerate(rows)
    ]
    by_id = {v.request_id: v for v in views}
    decision = plan_step(views, lane, (free,), prefill_turn=turn, prefill_due=due)
    taken = [*decision.decodes, *([decision.prefill] if decision.prefill else [])]
    assert len(set(taken)) == len(taken)
    assert all(by_id[name].can_step for name in taken)
    assert all(by_id[name].lane == lane and not by_id[name].is_prefill for name in decision.decodes)
    assert not set(taken) & set(decision.preempt), "a sequence steps and gives way in the same plan"
    assert not any(by_id[name].is_busy for name in decision.preempt), "chunks of a step in flight are taken"
    assert not set(taken) & set(decision.stalled)
    room = free + sum(by_id[name].held[0] for name in decision.preempt)
    assert sum(by_id[name].need[0] for name in taken) <= room, "the plan would run out of chunks"
    blocked = [by_id[name] for name in decision.stalled]
    for name in decision.decodes:  # nobody grows while a stronger one of the lane waits
        assert not by_id[name].need[0] or not any(b.rank < by_id[name].rank for b in blocked if b.can_step and not b.is_prefill)
    assert plan_step(views, lane, (free,), prefill_turn=turn, prefill_due=due) == decision
