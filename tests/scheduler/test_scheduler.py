"""The Scheduler, one behaviour a test: aborts in every state, errors, preemption with replay, ends, overload."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scheduler_driver import Driver, items_of, start_decoding
from scheduler_loads import make_request, solo_tokens

from qsa.errors import CapacityError, ContextLengthError, OverloadedError, RequestError
from qsa.scheduler.plan import BurstEnd, SequenceResult, StepResult
from qsa.scheduler.request import FinishReason, RequestOutput, TokenOutput
from qsa.scheduler.sequence import MAX_PREEMPTIONS
from qsa.scheduler.simulated_stages import choose_token, scripted_result


def test_a_request_from_prompt_to_end():
    driver = Driver()
    request = make_request("r", prompt_len=300, max_tokens=3)
    driver.add(request)
    assert driver.start_burst() is None
    chunks = [driver.chunk() for _ in range(3)]
    assert [(p.lane, len(p.items)) for p in chunks] == [(0, 1)] * 3
    assert chunks[0].open_slots == ((0, 0),) and not chunks[1].open_slots
    assert driver.chunk() is None
    burst = driver.play_burst()
    assert (burst.step, burst.max_steps, burst.num_items, burst.eos_token_ids) == (3, 2, 1, (0,))
    assert [(s.step, i.start, i.end, i.is_prefill, i.sampling is not None) for s in driver.steps for i in s.items] == [
        (0, 0, 128, True, False), (1, 128, 256, True, False), (2, 256, 300, True, True),
        (3, 300, 301, False, True), (4, 301, 302, False, True),
    ]  # fmt: skip
    assert driver.stages[0].log[-1] == (0,), "the slot is released"
    assert driver.tokens("r") == solo_tokens(request) and driver.reason("r") is FinishReason.LENGTH
    assert [o.computed_len for o in driver.outputs] == [0, 128, 256, 300, 300, 300]
    assert {o.prompt_len for o in driver.outputs} == {300}
    driver.assert_empty()


def test_everything_alive_can_be_ended_at_once_to_be_sent_again():
    driver = Driver(max_sequences=1)
    start_decoding(driver, "runs", max_tokens=50)
    driver.add(make_request("waits", prompt_len=300, max_tokens=5))
    driver.start_burst()
    driver.scheduler.restart()
    ends = driver.scheduler.interrupt("no node")
    assert {(end.request_id, end.finish_reason, end.error) for end in ends} == {
        ("runs", FinishReason.LOST, "no node"),
        ("waits", FinishReason.LOST, "no node"),
    }
    assert driver.scheduler.is_idle and driver.scheduler.counters().failed == 2


@pytest.mark.parametrize("state", ["waiting", "admitted", "prefill", "two_chunks", "decode", "between"])
def test_abort_in_each_state_gives_memory_back_once_nothing_is_in_flight(state):
    driver = Driver(max_sequences=1)
    request = make_request("r", prompt_len=300, max_tokens=50)
    if state == "waiting":
        start_decoding(driver, "other", max_tokens=2)
    driver.add(request)
    flights = []
    if state == "admitted":
        driver.scheduler.next_burst()
    elif state == "prefill":
        flights = [driver.start_chunk()]
    elif state == "two_chunks":
        flights = [driver.start_chunk(), driver.start_chunk()]
    elif state in ("decode", "between"):
        while not driver.tokens("r"):
            driver.chunk()
        if state == "decode":
            driver.start_burst()
            flights = [driver.start_step()]
    driver.scheduler.abort("r")
    driver.scheduler.abort("r")
    assert driver.release() == ((0,) if state == "between" else ())
    assert driver.reason("r") is FinishReason.ABORT, "the client hears at once"
    before = len(driver.tokens("r"))
    if state == "decode":
        assert driver.scheduler.should_cut()
        driver.finish_step(flights[0])
        assert driver.start_step() is None, "the burst is cut"
        driver.end_burst()
    else:
        for plan in flights:
            assert driver.scheduler.take_releases() == () and driver.stages[0].num_sequences == 1
            driver.finish(plan)
    if state != "waiting":
        driver.assert_empty()
    driver.drain()
    assert len(driver.tokens("r")) == before
    counters = driver.scheduler.counters()
    assert (counters.aborted, counters.added) == (1, 2 if state == "waiting" else 1)


def test_late_foreign_and_double_results_are_dropped():
    driver = Driver()
    driver.add(make_request("r"))
    plan = driver.start_chunk()
    result = scripted_result(plan, choose_token)
    assert driver.outputs == [RequestOutput("r", prompt_len=10)]  # admitted
    assert driver.scheduler.apply(replace(result, epoch=7)) == []
    assert driver.scheduler.apply(replace(result, step=99)) == []
    assert [len(o.tokens) for o in driver.scheduler.apply(result)] == [1]
    assert driver.scheduler.apply(result) == []
    burst = driver.start_burst()
    step = driver.start_step()
    result = scripted_result(step, choose_token)
    assert driver.scheduler.apply(replace(result, epoch=7)) == driver.scheduler.apply(replace(result, lane=1)) == []
    assert driver.scheduler.apply(replace(result, step=burst.end_step)) == []
    driver.finish_step(step)
    assert driver.scheduler.apply(result) == []
    assert driver.scheduler.end_burst(BurstEnd(7, burst.step, (1,), 1.0)) == []
    assert driver.scheduler.end_burst(BurstEnd(0, burst.step + 1, (1,), 1.0)) == []
    driver.end_burst()
    assert driver.scheduler.end_burst(BurstEnd(0, burst.step, (4,), 1.0)) == []
    driver.drain()


def test_a_burst_does_not_end_before_its_results():
    driver = Driver()
    start_decoding(driver, "r")
    burst = driver.start_burst()
    with pytest.raises(AssertionError, match="results of"):
        driver.scheduler.end_burst(BurstEnd(0, burst.step, (3,), 1.0))


def test_an_id_may_come_back_while_its_dead_self_is_in_flight():
    driver = Driver()
    request = make_request("r", max_tokens=3)
    driver.add(request)
    plan = driver.start_chunk()
    driver.scheduler.abort("r")
    driver.add(request)
    with pytest.raises(RequestError, match="request id r is in use"):
        driver.add(request)
    second = driver.start_chunk()
    assert second.items[0].slot != plan.items[0].slot
    driver.finish(plan)
    assert driver.tokens("r") == []
    driver.finish(second)
    driver.drain()
    assert driver.tokens("r") == solo_tokens(request)


def test_ends_by_token_by_stop_id_and_by_length():
    for name, sampling, ending, expected, reason in [
        ("eos", {}, 0, [], FinishReason.STOP),
        ("ignored", {"ignore_eos": True}, 0, [0, 0, 0, 0, 0], FinishReason.LENGTH),
        ("stop", {"stop_token_ids": (77,), "ignore_eos": True}, 77, [], FinishReason.STOP),
    ]:
        driver = Driver()
        driver.add(make_request(name, **sampling))
        driver.choose = lambda item, token=ending: token
        driver.drain()
        assert (driver.tokens(name), driver.reason(name)) == (expected, reason)


def test_an_error_ends_its_own_sequence_only():
    broken = {"bad": SequenceResult("bad", error="logits are not finite"), "mute": SequenceResult("mute")}
    for in_burst in (False, True):
        driver = Driver()
        requests = [make_request("good"), make_request("bad"), make_request("mute")]
        if in_burst:
            start_decoding(driver, "good", "bad", "mute", max_tokens=5)
        else:
            driver.add(*requests)
        driver.edit = lambda result: replace(
            result, results=tuple(broken.get(entry.request_id, entry) for entry in result.results)
        )
        driver.drain()
        assert driver.tokens("good") == solo_tokens(requests[0])
        assert driver.errors() == {"bad": "logits are not finite", "mute": "the last stage gave no token for this step"}


def test_a_failed_step_ends_the_sequences_of_its_lane_only():
    driver = Driver()
    start_decoding(driver, "a", "b", "c", "d")
    plan = driver.start_burst()
    lost = {item.request_id for item in plan.lanes[1]}
    driver.edit = lambda result: StepResult(result.epoch, result.step, result.lane, error="boom") if result.lane else result
    driver.burst_step(1)
    driver.edit = lambda result: result
    assert driver.errors() == dict.fromkeys(lost, "boom") and driver.release() == (), "the burst still holds their slots"
    driver.end_burst()
    driver.drain()
    for name in {"a", "b", "c", "d"} - lost:
        assert driver.tokens(name) == solo_tokens(make_request(name, 10, 50))


def test_a_failed_chunk_result_ends_its_sequence():
    driver = Driver()
    driver.add(make_request("r", 300))
    driver.edit = lambda result: StepResult(result.epoch, result.step, result.lane, error="boom")
    driver.chunk()
    assert driver.errors() == {"r": "boom"}
    driver.assert_empty()


def test_a_failed_plan_ends_its_sequences_and_releases_them():
    driver = Driver(max_sequences=2)
    driver.add(make_request("a", prompt_len=300), make_request("b", max_tokens=3))
    first = driver.scheduler.next_chunk()  # stage 1 never sees this one
    driver.stages[0].run(first)
    driver.scheduler.fail_plan(first, "stage 1 failed at step 0")
    driver.scheduler.fail_plan(first, "again")
    driver.release()
    (victim,) = {item.request_id for item in first.items}
    survivor = "b" if victim == "a" else "a"
    assert driver.reason(victim) is FinishReason.ERROR and driver.reason(survivor) is None
    driver.drain()
    assert driver.reason(survivor) is FinishReason.LENGTH
    assert driver.scheduler.counters().failed == 1


def test_a_failed_burst_ends_everybody_in_it():
    driver = Driver()
    start_decoding(driver, "a", "b")
    plan = driver.start_burst()
    driver.burst_step(0)
    driver.scheduler.abort("a")
    driver.scheduler.fail_plan(plan, "stage 0 failed")
    driver.scheduler.fail_plan(plan, "again")
    assert sorted(driver.release()) == sorted(item.slot for item in items_of(plan))
    assert (driver.reason("a"), driver.reason("b")) == (FinishReason.ABORT, FinishReason.ERROR)
    driver.assert_empty()


def test_two_sequences_that_need_the_last_chunk_both_finish():
    driver = Driver(4, 4, growth_horizon=1)  # each needs 3 pages in the end
    requests = [make_request(name, prompt_len=120, max_tokens=200) for name in ("one", "two")]
    driver.add(*requests)
    driver.drain()
    for request in requests:
        assert driver.tokens(request.request_id) == solo_tokens(request)
    assert driver.scheduler.counters().preempted == 1


def test_replay_after_preemption_repeats_the_same_steps_without_sampling():
    driver = Driver(4, 4, growth_horizon=1)
    requests = [make_request("one", 120, 200), make_request("two", 200, 120)]
    driver.add(*requests)
    driver.drain()
    lives: list[list] = [[]]
    for item in (item for step in driver.steps for item in step.items if item.request_id == "two"):
        if item.start == 0 and lives[-1]:
            lives.append([])
        lives[-1].append(item)
    assert len(lives) == 2, "the younger one was preempted once"
    first, second = lives
    assert 1 < len(first) < len(second)
    for before, again in zip(first, second, strict=False):
        assert (again.start, again.token_ids, again.is_prefill) == (before.start, before.token_ids, before.is_prefill)
    assert all(item.sampling is None for item in second[: len(first) - 1])
    assert driver.tokens("two") == solo_tokens(requests[1]), "no token twice, none lost"


def test_refusals_leave_no_trace():
    driver = Driver(6, 6)
    with pytest.raises(ContextLengthError, match="maximum context length is 4096 tokens"):
        driver.add(make_request("long", 5000))
    with pytest.raises(CapacityError, match="stage 0: 7 of 6"):
        driver.add(make_request("big", 700, 100))
    assert driver.scheduler.counters().refused == 2 and driver.scheduler.counters().added == 0
    driver.assert_empty()


def test_overload_tells_when_to_come_back():
    now = [0.0]
    driver = Driver(max_sequences=2, max_waiting=1, burst_steps=4, clock=lambda: now[0])
    driver.add(*(make_request(name, prompt_len=100, max_tokens=400) for name in "abc"))  # every place and the queue
    with pytest.raises(OverloadedError, match=r"0 requests run and 3 wait, at most 1 may wait for 2 places") as idle:
        driver.add(make_request("d"))
    assert idle.value.retry_after_s == 1.0
    for _ in range(12):
        driver.round()
        now[0] += 1.0
    with pytest.raises(OverloadedError) as busy:
        driver.add(make_request("d"))
    speed = driver.scheduler.counters().tokens_per_s
    backlog = sum(500 - len(driver.tokens(name)) - (100 if driver.tokens(name) else 0) for name in "abc")
    assert busy.value.retry_after_s == pytest.approx(backlog / 3 / speed, rel=0.02)
    driver.drain()
    driver.add(make_request("d"))
    driver.drain()


def test_nothing_is_admitted_while_a_sequence_lacks_chunks():
    driver = Driver(5, 5, growth_horizon=1, burst_steps=1)
    driver.add(*(make_request(name, prompt_len=120, max_tokens=136) for name in ("one", "two")))  # 2 pages in the end
    driver.add(make_request("late", prompt_len=10, max_tokens=300))  # 3 pages in the end
    seen = 0
    running = driver.scheduler._places.running
    for number in range(500):
        held_back = any(s.is_stalled for s in running.values())
        before = set(running)
        if held_back and driver.scheduler.counters().num_waiting == 0:
            driver.add(make_request(f"n{number}", 5, 1))
        driver.round()
        if held_back and any(s.is_stalled for s in running.values()) and before <= set(running):  # nobody has left
            seen += 1
            assert set(running) == before
    assert seen > 5, "the load was to make one wait for chunks"
    driver.drain()


def test_an_often_preempted_sequence_is_not_preempted_again():
    """An urgent request comes whenever a patient one runs, and takes its chunks; in the end the patient one keeps them."""
    driver = Driver(3, 3, max_sequences=2, growth_horizon=1, burst_steps=8)
    patient = make_request("patient", 120, 200, priority=5)  # 3 pages in the end
    driver.add(patient)
    places = driver.scheduler._places
    state = places.waiting["patient"]
    for number in range(2000):
        if driver.reason("patient"):
            break
        if list(places.running) == ["patient"] and not places.waiting:
            driver.add(make_request(f"u{number}", 120, 40))  # 2 pages in the end
        driver.round()
    assert driver.tokens("patient") == solo_tokens(patient)
    assert state.num_preemptions == MAX_PREEMPTIONS
    driver.drain()


def test_attended_share_comes_from_all_stages():
    driver = Driver()
    driver.add(make_request("r", prompt_len=20, max_tokens=1))
    plan = driver.start_chunk()
    (output,) = driver.scheduler.apply(scripted_result(plan, choose_token))
    assert driver.outputs == [RequestOutput("r", prompt_len=20)]
    assert output.attended_share == 1.0 and output.tokens == (TokenOutput(solo_tokens(make_request("r", 20, 1))[0]),)
