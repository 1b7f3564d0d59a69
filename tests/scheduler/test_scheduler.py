"""The Scheduler, one behaviour a test: aborts in every state, errors, preemption with replay, lanes, ends, restarts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scheduler_driver import Driver
from scheduler_loads import make_request, make_stages, solo_tokens

from qsa.errors import CapacityError, ContextLengthError, OverloadedError, RequestError
from qsa.scheduler.plan import SequenceResult, StepResult
from qsa.scheduler.request import FinishReason, RequestOutput, TokenOutput
from qsa.scheduler.sequence import MAX_PREEMPTIONS
from qsa.scheduler.simulator import SimulatedStage, choose_token, scripted_result


def test_a_request_from_prompt_to_end():
    driver = Driver()
    request = make_request("r", prompt_len=300, max_tokens=3)
    driver.scheduler.add(request)
    plans = [driver.step() for _ in range(6)]
    steps = [item for plan in plans if plan for item in plan.items]
    assert [(s.start, s.end, s.is_prefill, s.sampling is not None) for s in steps] == [
        (0, 128, True, False), (128, 256, True, False), (256, 300, True, True), (300, 301, False, True), (301, 302, False, True)
    ]  # fmt: skip
    assert plans[0].open_slots == ((steps[0].slot, 0),) and plans[5].release_slots == (steps[0].slot,)
    assert driver.tokens("r") == solo_tokens(request) and driver.reason("r") is FinishReason.LENGTH
    assert [o.computed_len for o in driver.outputs] == [0, 128, 256, 300, 300, 300]
    assert {o.prompt_len for o in driver.outputs} == {300}
    driver.drain()


def test_chunks_of_one_prompt_overlap_but_decodes_do_not():
    driver = Driver()
    driver.scheduler.add(make_request("r", prompt_len=300))
    first, second = driver.start(0), driver.start(1)
    assert [(i.start, i.end) for plan in (first, second) for i in plan.items] == [(0, 128), (128, 256)]
    assert driver.start(0) is None and driver.start(1) is None  # each lane has one plan in flight
    driver.finish(first)
    third = driver.start(0)
    assert third.items[0].end == 300
    driver.finish(second)
    assert driver.start(1) is None  # the next token is not known yet
    driver.finish(third)
    assert [bool(driver.start(lane)) for lane in (0, 1)].count(True) == 1
    assert driver.tokens("r") != []


@pytest.mark.parametrize("state", ["waiting", "admitted", "prefill", "two_chunks", "decode", "between"])
def test_abort_in_each_state_gives_memory_back_within_two_steps(state):
    driver = Driver(max_sequences=1)
    request = make_request("r", prompt_len=300, max_tokens=50)
    if state == "waiting":
        driver.scheduler.add(make_request("other", max_tokens=2))
        driver.step()
    driver.scheduler.add(request)
    flights = []
    if state == "prefill":
        flights = [driver.start(0)]
    elif state == "two_chunks":
        flights = [driver.start(0), driver.start(1)]
    elif state in ("decode", "between"):
        while not driver.tokens("r"):
            driver.step()
        if state == "decode":
            flights = [driver.start(0)]
            assert flights[0].items[0].is_prefill is False
    driver.scheduler.abort("r")
    driver.scheduler.abort("r")
    driver.outputs += driver.scheduler.take_outputs()
    assert driver.reason("r") is FinishReason.ABORT, "the client hears at once"
    before = len(driver.tokens("r"))
    slot = flights[0].items[0].slot if flights else None
    for plan in flights:
        other = driver.start(1 - plan.lane)  # in flight still: nothing may release or reuse the slot
        assert other is None or (slot not in other.release_slots and not other.open_slots)
        driver.finish(plan)
    plans = [driver.step(), driver.step()]
    if flights:
        assert [slot in (plan.release_slots if plan else ()) for plan in plans] == [True, False]
    if state != "waiting":
        driver.assert_empty()
    driver.drain()
    assert len(driver.tokens("r")) == before
    counters = driver.scheduler.counters()
    assert (counters.aborted, counters.added) == (1, 2 if state == "waiting" else 1)


def test_late_foreign_and_double_results_are_dropped():
    driver = Driver()
    driver.scheduler.add(make_request("r"))
    plan = driver.start()
    result = scripted_result(plan, choose_token)
    assert driver.scheduler.take_outputs() == [RequestOutput("r", prompt_len=10)]  # admitted
    assert driver.scheduler.apply(replace(result, epoch=7)) == []
    assert driver.scheduler.apply(replace(result, step=99)) == []
    assert [len(o.tokens) for o in driver.scheduler.apply(result)] == [1]
    assert driver.scheduler.apply(result) == []
    driver.drain()


def test_an_id_may_come_back_while_its_dead_self_is_in_flight():
    driver = Driver()
    request = make_request("r", max_tokens=3)
    driver.scheduler.add(request)
    plan = driver.start(0)
    driver.scheduler.abort("r")
    driver.scheduler.add(request)
    with pytest.raises(RequestError, match="request id r is in use"):
        driver.scheduler.add(request)
    driver.scheduler.take_outputs()
    second = driver.start(1)
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
        driver.scheduler.add(make_request(name, **sampling))
        while driver.step(choose=lambda item, token=ending: token):
            pass
        assert (driver.tokens(name), driver.reason(name)) == (expected, reason)
        driver.assert_empty()


def test_an_error_ends_its_own_sequence_only():
    driver = Driver()
    requests = [make_request("good"), make_request("bad"), make_request("mute")]
    for request in requests:
        driver.scheduler.add(request)
    while not driver.scheduler.is_idle:
        for lane in (0, 1):
            plan = driver.start(lane)
            if plan is None:
                continue
            result = scripted_result(plan, choose_token)
            broken = {"bad": SequenceResult("bad", error="logits are not finite"), "mute": SequenceResult("mute")}
            results = tuple(broken.get(r.request_id, r) for r in result.results)
            driver.outputs += driver.scheduler.apply(replace(result, results=results))
    driver.outputs += driver.scheduler.take_outputs()
    assert driver.tokens("good") == solo_tokens(requests[0])
    errors = {o.request_id: o.error for o in driver.outputs if o.finish_reason is FinishReason.ERROR}
    assert errors == {"bad": "logits are not finite", "mute": "the last stage gave no token for this step"}
    driver.assert_empty()


def test_a_failed_plan_ends_its_sequences_and_releases_them():
    driver = Driver(max_sequences=2)
    driver.scheduler.add(make_request("a", prompt_len=300))
    driver.scheduler.add(make_request("b", max_tokens=3))
    first = driver.scheduler.next_plan(0)  # stage 1 never sees this one
    driver.stages[0].run(first)
    driver.scheduler.fail_plan(first, "stage 1 failed at step 0")
    driver.scheduler.fail_plan(first, "again")
    driver.outputs += driver.scheduler.take_outputs()
    (victim,) = {item.request_id for item in first.items}
    survivor = "b" if victim == "a" else "a"
    assert driver.reason(victim) is FinishReason.ERROR and driver.reason(survivor) is None
    driver.drain()
    assert driver.reason(survivor) is FinishReason.LENGTH
    assert driver.scheduler.counters().failed == 1


def test_releases_of_a_failed_plan_are_made_again():
    driver = Driver(max_sequences=2)
    driver.scheduler.add(make_request("a", max_tokens=1))
    driver.step()
    release = driver.scheduler.next_plan(0)
    assert release.release_slots and not release.items
    driver.scheduler.fail_plan(release, "lost")
    assert driver.stages[0].held == 1
    driver.drain()


def test_two_sequences_that_need_the_last_chunk_both_finish():
    driver = Driver(4, 4, growth_horizon=1)  # each needs 3 pages in the end
    requests = [make_request(name, prompt_len=120, max_tokens=200) for name in ("one", "two")]
    for request in requests:
        driver.scheduler.add(request)
    driver.drain()
    for request in requests:
        assert driver.tokens(request.request_id) == solo_tokens(request)
    assert driver.scheduler.counters().preempted == 1


def test_replay_after_preemption_repeats_the_same_steps_without_sampling():
    driver = Driver(4, 4, growth_horizon=1)
    requests = [make_request("one", 120, 200), make_request("two", 200, 120)]
    for request in requests:
        driver.scheduler.add(request)
    lives: list[list] = [[]]
    for _ in range(900):
        for lane in (0, 1):
            plan = driver.step(lane)
            for item in plan.items if plan else ():
                if item.request_id != "two":
                    continue
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
    driver.assert_empty()


def test_refusals_leave_no_trace():
    driver = Driver(6, 6)
    with pytest.raises(ContextLengthError, match="maximum context length is 4096 tokens"):
        driver.scheduler.add(make_request("long", 5000))
    with pytest.raises(CapacityError, match="stage 0: 7 of 6"):
        driver.scheduler.add(make_request("big", 700, 100))
    assert driver.scheduler.counters().refused == 2 and driver.scheduler.counters().added == 0
    driver.assert_empty()


def test_overload_tells_when_to_come_back():
    now = [0.0]
    driver = Driver(max_sequences=2, max_waiting=1, clock=lambda: now[0])
    for name in "abc":  # a burst on an idle engine: every place and the queue
        driver.scheduler.add(make_request(name, prompt_len=100, max_tokens=400))
    with pytest.raises(OverloadedError, match=r"0 requests run and 3 wait, at most 1 may wait for 2 places") as idle:
        driver.scheduler.add(make_request("d"))
    assert idle.value.retry_after_s == 1.0
    for _ in range(12):
        driver.step(0)
        driver.step(1)
        now[0] += 1.0
    with pytest.raises(OverloadedError) as busy:
        driver.scheduler.add(make_request("d"))
    speed = driver.scheduler.counters().tokens_per_s
    backlog = sum(500 - len(driver.tokens(name)) - (100 if driver.tokens(name) else 0) for name in "abc")
    assert busy.value.retry_after_s == pytest.approx(backlog / 3 / speed, rel=0.02)
    driver.drain()
    driver.scheduler.add(make_request("d"))
    driver.drain()


def test_lanes_are_balanced_and_stay_so():
    driver = Driver(max_sequences=8)
    for i in range(6):
        driver.scheduler.add(make_request(f"r{i}", max_tokens=60))

    def lanes() -> list[set[str]]:
        plans = [driver.step(lane) for lane in (0, 1)]
        return [{item.request_id for item in plan.items} if plan else set() for plan in plans]

    for _ in range(20):
        before = lanes()
    assert [len(names) for names in before] == [3, 3]
    for name in before[1]:  # a whole lane leaves
        driver.scheduler.abort(name)
    lanes()
    after = lanes()
    assert sorted(map(len, after)) == [1, 2] and after[0] | after[1] == before[0]
    driver.drain()


def test_nothing_is_admitted_while_a_sequence_lacks_chunks():
    driver = Driver(5, 5, growth_horizon=1)
    for name in ("one", "two"):
        driver.scheduler.add(make_request(name, prompt_len=120, max_tokens=136))  # 2 pages in the end
    driver.scheduler.add(make_request("late", prompt_len=10, max_tokens=300))  # 3 pages in the end
    seen = 0
    for number in range(500):
        held_back = any(s.is_stalled for s in driver.scheduler._running.values())
        running = set(driver.scheduler._running)
        if held_back and driver.scheduler.counters().num_waiting == 0:
            driver.scheduler.add(make_request(f"n{number}", 5, 1))
        driver.step(0)
        if held_back and any(s.is_stalled for s in driver.scheduler._running.values()):
            seen += 1
            assert set(driver.scheduler._running) <= running
        driver.step(1)
    assert seen > 5, "the load was to make one wait for chunks"
    driver.drain()


def test_an_often_preempted_sequence_is_not_preempted_again():
    """An urgent request comes whenever a patient one runs, and takes its chunks; in the end the patient one keeps them."""
    driver = Driver(3, 3, max_sequences=2, growth_horizon=1)
    patient = make_request("patient", 120, 200, priority=5)  # 3 pages in the end
    driver.scheduler.add(patient)
    state = driver.scheduler._waiting["patient"]
    for number in range(2000):
        if driver.reason("patient"):
            break
        counters = driver.scheduler.counters()
        if counters.num_running == 1 and counters.num_waiting == 0 and "patient" in driver.scheduler._running:
            driver.scheduler.add(make_request(f"u{number}", 120, 40))  # 2 pages in the end
        driver.step(0)
        driver.step(1)
    assert driver.tokens("patient") == solo_tokens(patient)
    assert state.num_preemptions == MAX_PREEMPTIONS
    driver.drain()


def test_releases_of_a_failed_plan_reach_a_slot_that_is_taken_again():
    """Both lanes: the plan that releases slot 0 is lost after the slot has been promised to the next request."""
    driver = Driver(max_sequences=1)
    driver.scheduler.add(make_request("a", prompt_len=5, max_tokens=1))
    driver.step(0)
    driver.scheduler.add(make_request("b", prompt_len=5, max_tokens=30, sparse_id=1))
    with_room = driver.scheduler.next_plan(0)
    assert with_room.release_slots == (0,) and with_room.open_slots == ((0, 1),)
    driver.scheduler.fail_plan(with_room, "lost")
    assert [stage.held for stage in driver.stages] == [1, 1], "the stages never heard of it"
    driver.scheduler.add(make_request("c", prompt_len=5, max_tokens=3))
    driver.drain()
    assert driver.tokens("c") == solo_tokens(make_request("c", prompt_len=5, max_tokens=3))


def test_releases_of_a_failed_plan_reach_a_slot_that_somebody_waits_in():
    driver = Driver(max_sequences=3)
    driver.scheduler.add(make_request("old", prompt_len=600, max_tokens=1))
    driver.scheduler.add(make_request("done", prompt_len=5, max_tokens=1))
    while not driver.reason("done"):
        driver.step(0)
    slot = driver.scheduler._slots._to_release[0][0]
    for name in ("new", "newer"):  # one of the two gets the slot; only one prompt goes into a plan
        driver.scheduler.add(make_request(name, prompt_len=5, max_tokens=3))
    lost = driver.scheduler.next_plan(0)
    assert slot in lost.release_slots
    waiting = [s for s in driver.scheduler._running.values() if s.slot == slot]
    assert waiting and not waiting[0].is_open, "the slot is promised, but not opened in the lost plan"
    driver.scheduler.fail_plan(lost, "lost")
    driver.drain()
    assert driver.tokens(waiting[0].request_id) == solo_tokens(waiting[0].request)


def test_a_restart_recomputes_what_was_alive_and_drops_late_results():
    driver = Driver()
    requests = [make_request("a", 300, 20), make_request("b", 10, 20)]
    for request in requests:
        driver.scheduler.add(request)
    for _ in range(6):
        driver.step(0)
        driver.step(1)
    late = driver.start(0)
    assert driver.scheduler.restart() == 1
    driver.stages = [SimulatedStage(stage) for stage in make_stages(100, 100)]
    assert driver.scheduler.apply(scripted_result(late, choose_token)) == []
    driver.scheduler.fail_plan(late, "of the old epoch")
    assert driver.start(0).epoch == 1
    for flight in list(driver.scheduler._in_flight.values()):
        driver.finish(flight.plan)
    driver.drain()
    for request in requests:
        assert driver.tokens(request.request_id) == solo_tokens(request)


def test_replayed_decodes_wait_for_the_prompt():
    driver = Driver()
    driver.scheduler.add(make_request("r", 100, 20))
    while len(driver.tokens("r")) < 3:
        driver.step(0)
    driver.scheduler.restart()
    driver.stages = [SimulatedStage(stage) for stage in make_stages(100, 100)]
    prompt = driver.start(0)
    assert prompt.items[0].end == 100 and prompt.items[0].sampling is None
    assert driver.start(1) is None, "the tokens are known, but only chunks of a prompt may overlap"
    driver.finish(prompt)
    driver.drain()
    assert driver.tokens("r") == solo_tokens(make_request("r", 100, 20))


def test_attended_share_comes_from_all_stages():
    driver = Driver()
    driver.scheduler.add(make_request("r", prompt_len=20, max_tokens=1))
    plan = driver.start()
    admitted, output = driver.scheduler.apply(scripted_result(plan, choose_token))
    assert admitted == RequestOutput("r", prompt_len=20)
    assert output.attended_share == 1.0 and output.tokens == (TokenOutput(solo_tokens(make_request("r", 20, 1))[0]),)
    assert driver.scheduler.apply(StepResult(0, plan.step, 0)) == []
