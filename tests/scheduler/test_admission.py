"""Admission: what can never be answered is refused with its numbers, the rest is admitted in order or waits."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_loads import make_request, make_stages

from qsa.errors import CapacityError, ContextLengthError, RequestError
from qsa.scheduler.admission import MAX_BYPASS, Candidate, admit, check_request, queue_key
from qsa.scheduler.growth import ChunkMeter

METER = ChunkMeter(make_stages(10, 6))


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "ok"),
    [(399, 1, True), (400, 1, False), (401, 1, False), (300, 100, True), (300, 101, False), (300, 10**9, False)],
)
def test_context_length_is_checked_at_the_limit(prompt_len, max_tokens, ok):
    request = make_request("r", prompt_len, max_tokens)
    if ok:
        check_request(request, 400, METER)
        return
    with pytest.raises(ContextLengthError) as caught:
        check_request(request, 400, METER)
    text = str(caught.value)
    assert "This model's maximum context length is 400 tokens" in text
    assert f"({prompt_len} in the prompt, {max_tokens} in the completion)" in text
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == ("prompt" if prompt_len >= 400 else "max_tokens")


@pytest.mark.parametrize(
    ("request_", "param", "text"),
    [
        (make_request("r", 0), "prompt", "no tokens"),
        (make_request("r", 5, 0), "max_tokens", "at least 1, got 0"),
        (make_request("r", 5, -1), "max_tokens", "got -1"),
        (make_request("r", 5, sparse_id=7), "sparse_id", "sparse_id is 7, but this server has 0, 1"),
    ],
)
def test_wrong_requests_name_the_field(request_, param, text):
    with pytest.raises(RequestError, match=text) as caught:
        check_request(request_, 400, METER)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", -1.0), ("temperature", math.nan), ("temperature", math.inf), ("top_p", 1.1), ("top_p", math.nan)),
        *(("min_p", 1.5), ("min_p", -0.1), ("repetition_penalty", 0.0), ("repetition_penalty", math.inf)),
        *(("presence_penalty", math.nan), ("frequency_penalty", -math.inf)),
    ],
)
def test_sampling_parameters_that_would_fail_a_whole_step_are_refused(name, value):
    with pytest.raises(RequestError, match=f"{name} must lie between") as caught:
        check_request(make_request("r", **{name: value}), 400, METER)
    assert caught.value.param == name


@pytest.mark.parametrize(
    "sampling",
    [dict(temperature=0.0, top_p=0.0, min_p=1.0, presence_penalty=-2.0), dict(temperature=1e30, repetition_penalty=0.01)],
    ids=str,
)
def test_extreme_sampling_parameters_are_taken(sampling):
    check_request(make_request("r", **sampling), 400, METER)


def test_what_can_never_fit_is_refused_with_numbers():
    # stage 1 has 6 pages of 128 tokens: 768 tokens in the cache, and the last token is sampled but never stored
    check_request(make_request("r", 700, 69), 4096, METER)
    with pytest.raises(CapacityError) as caught:
        check_request(make_request("r", 700, 70), 4096, METER)
    text = str(caught.value)
    assert "700 prompt tokens and max_tokens 70" in text
    assert "stage 0: 7 of 10, stage 1: 7 of 6" in text
    assert "cache.device_bytes" in text


def candidate(name: str, need: int, final: int | None = None, **rest: object) -> Candidate:
    return Candidate(name, (need,), (final if final is not None else need,), **rest)


def test_admits_in_order_while_it_fits_every_stage():
    queue = [Candidate("a", (2, 2), (9, 9)), Candidate("b", (2, 3), (9, 9)), Candidate("c", (1, 1), (9, 9))]
    assert admit(queue, (4, 4), (4, 4), (10, 8), 4).admitted == ("a", "c")  # b would take stage 1 to 9 of 8
    assert admit(queue, (4, 4), (4, 4), (10, 10), 2).admitted == ("a", "b")  # two slots


def test_a_blocked_request_is_passed_a_bounded_number_of_times():
    smalls = [candidate(f"s{i}", 0) for i in range(40)]
    first = admit([candidate("big", 5), *smalls], (8,), (8,), (10,), 10)
    assert first.bypassed == (("big", 10),) and len(first.admitted) == 10
    second = admit([candidate("big", 5, num_bypassed=10), *smalls], (8,), (8,), (10,), 40)
    assert second.bypassed == (("big", MAX_BYPASS - 10),)
    assert admit([candidate("big", 5, num_bypassed=MAX_BYPASS), *smalls], (8,), (8,), (10,), 40).admitted == ()


def test_the_preempted_and_the_protected_are_not_passed():
    assert admit([candidate("p", 5, is_passable=False), candidate("s", 1)], (8,), (8,), (10,), 4).admitted == ()
    protected = candidate("p", 1, 6, needs_final=True)
    assert admit([protected], (2,), (5,), (10,), 4).admitted == ()  # 5 + 6 at final lengths
    assert admit([protected], (2,), (4,), (10,), 4).admitted == ("p",)


def test_queue_order_is_urgency_with_age():
    def key(priority: int, waited_s: float, arrival: int, **flags: bool) -> tuple:
        return queue_key(priority, waited_s, arrival, **({"is_protected": False, "must_replay": False} | flags))

    assert key(0, 0, 5) < key(1, 0, 1)  # urgent first
    assert key(3, 31, 1) < key(0, 0, 5)  # but waiting counts
    assert key(0, 0, 9, must_replay=True) < key(0, 0, 1)  # preempted goes to the front
    assert key(9, 0, 9, is_protected=True) < key(0, 0, 1)


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8), st.booleans(), st.integers(0, MAX_BYPASS)), max_size=12),
    st.integers(0, 12),
    st.integers(0, 6),
)
def test_admission_never_overbooks(rows, used, free_slots):
    queue = [
        Candidate(str(i), (need,), (need + more,), is_passable=passable, num_bypassed=bypassed)
        for i, (need, more, passable, bypassed) in enumerate(rows)
    ]
    result = admit(queue, (used,), (used,), (12,), free_slots)
    needs = {c.request_id: c.need[0] for c in queue}
    assert len(result.admitted) <= free_slots and len(set(result.admitted)) == len(result.admitted)
    assert not result.admitted or used + sum(needs[name] for name in result.admitted) <= 12
    for name, count in result.bypassed:
        assert name not in result.admitted and queue[int(name)].num_bypassed + count <= MAX_BYPASS
