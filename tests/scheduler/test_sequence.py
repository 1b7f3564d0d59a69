"""SequenceState: what its steps tell the sampler of the text so far."""

from __future__ import annotations

import pytest

from qsa.scheduler.growth import HitRate
from qsa.scheduler.plan import SequenceStep
from qsa.scheduler.request import Request, SamplingParams
from qsa.scheduler.sequence import SequenceState


def next_step(state: SequenceState) -> SequenceStep:
    """Plan the next step as if it ran at once."""
    step = state.next_step(prefill_chunk=4)
    state.planned_len = state.computed_len = step.end
    return step


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
    state = SequenceState(Request("r", (3, 4, 3, 9, 4), SamplingParams(**penalty)), 0, 0.0, HitRate())
    state.slot = 0
    assert next_step(state).counts == (), "a chunk that does not sample needs none"
    assert dict(next_step(state).counts) == first
    state.generated.append(9)
    step = next_step(state)
    assert dict(step.counts) == second and len(step.counts) == len(second)


def test_replayed_tokens_count_once_more_only_where_a_token_is_sampled():
    state = SequenceState(Request("r", (3, 4), SamplingParams(repetition_penalty=1.2)), 0, 0.0, HitRate())
    state.slot, state.generated = 0, [9, 3]
    steps = [next_step(state) for _ in range(3)]
    assert [dict(step.counts) for step in steps] == [{}, {}, {3: 1, 4: 0, 9: 1}]
