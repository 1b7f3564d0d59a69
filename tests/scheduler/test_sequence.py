"""SequenceState: where chunks end, and what its steps tell the sampler of the text so far."""

from __future__ import annotations

import pytest

from qsa.scheduler.burst import Burst
from qsa.scheduler.growth import HitRate
from qsa.scheduler.plan import BurstPlan, SequenceStep
from qsa.scheduler.request import Request, SamplingParams
from qsa.scheduler.sequence import SequenceState


def make_state(prompt: tuple[int, ...] = (3, 4, 3, 9, 4), **sampling) -> SequenceState:
    state = SequenceState(Request("r", prompt, SamplingParams(**sampling)), 0, 0.0, HitRate())
    state.slot = 0
    return state


def next_chunk(state: SequenceState, chunk_tokens: int = 4) -> SequenceStep:
    """Plan the next chunk as if it ran at once."""
    step = state.chunk_step(state.chunk_end(chunk_tokens))
    state.take_chunk(step.end)
    return step


def first_samples(state: SequenceState, num_steps: int = 8) -> list[SequenceStep]:
    """The next steps, up to the first one that samples, as a burst unrolls them."""
    burst = Burst(BurstPlan(0, 0, ((state.burst_item(num_steps),),), num_steps))
    row = burst._lanes[0][0]
    steps = [row.next_step()]
    while steps[-1].sampling is None:
        row.go_on(None, frozenset())
        steps.append(row.next_step())
    return steps


@pytest.mark.parametrize(
    ("penalty", "first", "second"),
    [
        ({}, {}, {}),
        ({"frequency_penalty": 0.5}, {}, {9: 1}),
        ({"presence_penalty": 0.5}, {}, {9: 1}),
        ({"repetition_penalty": 1.2}, {3: 0, 4: 0, 9: 0}, {3: 0, 4: 0, 9: 1}),
        ({"repetition_penalty": 1.2, "presence_penalty": 0.5}, {3: 0, 4: 0, 9: 0}, {3: 0, 4: 0, 9: 1}),
    ],
    ids=str,
)
def test_counts_are_what_a_penalty_needs(penalty, first, second):
    """Only a repetition penalty looks at the prompt; it does so for the first token too."""
    state = make_state(**penalty)
    assert next_chunk(state).counts == (), "a chunk that does not sample needs none"
    assert dict(next_chunk(state).counts) == first
    state.generated.append(9)
    (step,) = first_samples(state)
    assert dict(step.counts) == second and len(step.counts) == len(second)


def test_replayed_tokens_count_once_more_only_where_a_token_is_sampled():
    state = make_state((3, 4), repetition_penalty=1.2)
    state.generated = [9, 3]
    assert next_chunk(state).counts == ()
    assert [dict(step.counts) for step in first_samples(state)] == [{}, {3: 1, 4: 0, 9: 1}]


def test_a_burst_that_ends_within_known_tokens_samples_nothing():
    state = make_state((3, 4), presence_penalty=1.0)
    state.generated = [9, 3, 7]
    next_chunk(state)
    assert (state.burst_item(2).token_ids, state.burst_item(2).counts) == ((9, 3, 7), ())
    assert state.burst_item(1).token_ids == (9, 3)
    assert state.burst_item(3).counts != () and state.burst_item(3).remaining == 13


def test_chunks_lie_on_the_grid_of_their_size_and_end_where_they_ended_before():
    state = make_state(tuple(range(1, 31)))
    sizes = [8, 8, 4, 4, 8]
    ends = [next_chunk(state, size).end for size in sizes]
    assert ends == [8, 16, 20, 24, 30]
    state.forget_cache()
    state.slot = 1
    assert [next_chunk(state, 8).end for _ in range(3)] == [8, 16, 20]
    state.forget_cache()
    state.slot = 1
    assert [next_chunk(state, 3).end for _ in sizes] == ends


def test_who_can_do_what():
    state = make_state((1, 2, 3), max_tokens=4)
    assert (state.can_chunk, state.can_decode, state.final_len) == (True, False, 6)
    next_chunk(state)
    assert (state.can_chunk, state.can_decode) == (False, False), "the first token is not known yet"
    state.generated.append(5)
    assert (state.can_chunk, state.can_decode) == (False, True)
    assert (state.burst_end(1), state.burst_end(9)) == (4, 6)
    state.in_flight = 1
    assert not state.can_decode
