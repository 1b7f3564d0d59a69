"""Chunks beside bursts: what is in flight together, how long a burst is, when it ends early, and restarts in the middle."""

from __future__ import annotations

import random

import pytest
from scheduler_driver import Driver, items_of, start_decoding
from scheduler_loads import make_request, solo_tokens

from qsa.scheduler.policy import MIN_DECODE_TURNS
from qsa.scheduler.sequence import MAX_RESTARTS
from qsa.scheduler.simulated_stages import choose_token, scripted_result


def spans(driver: Driver, name: str) -> list[tuple[int, int]]:
    """The chunks of a prompt that the stages ran."""
    return [(i.start, i.end) for step in driver.steps for i in step.items if i.request_id == name and i.is_prefill]


def test_chunks_of_one_prompt_overlap_up_to_a_limit():
    driver = Driver()
    driver.add(make_request("r", prompt_len=600))
    flights = [driver.start_chunk() for _ in range(3)]
    assert spans(driver, "r") == [(0, 128), (128, 256), (256, 384)]
    assert driver.start_chunk() is None, "two stages have one more than they can work on"
    assert driver.start_burst() is None
    driver.finish(flights.pop(0))
    flights.append(driver.start_chunk())
    for flight in flights:
        driver.finish(flight)
    last = driver.start_chunk()
    assert last.items[0].end == 600 and driver.start_burst() is None, "the next token is not known yet"
    driver.finish(last)
    assert driver.start_chunk() is None and driver.start_burst() is not None
    driver.end_burst()
    assert driver.tokens("r") == solo_tokens(make_request("r", 600))


def test_prompts_take_turns_within_the_limit():
    driver = Driver()
    driver.add(make_request("long", 600), make_request("short", 200))
    flights = [driver.start_chunk() for _ in range(3)]
    assert [flight.items[0].request_id for flight in flights] == ["short", "long", "short"]
    for flight in flights:
        driver.finish(flight)
    driver.drain()


def test_one_chunk_a_burst_while_anything_decodes():
    driver = Driver()
    start_decoding(driver, "chat")
    driver.add(make_request("long", 1000))
    assert driver.start_burst() is not None
    chunk = driver.start_chunk()
    assert chunk is not None and driver.start_chunk() is None, "a second one would keep the next burst waiting"
    driver.end_burst()
    assert driver.start_chunk() is None, "decodes first"
    assert driver.start_burst().max_steps == MIN_DECODE_TURNS
    assert driver.start_burst() is None, "one at a time"
    second = driver.start_chunk()
    assert second.items[0].start == 128
    driver.end_burst()
    driver.finish(chunk)
    driver.finish(second)
    driver.drain()
    assert driver.tokens("long") == solo_tokens(make_request("long", 1000))


def test_lengths_of_bursts():
    driver = Driver(burst_steps=10)
    start_decoding(driver, "a", "b", max_tokens=40)
    assert driver.play_burst().max_steps == 10, "nobody waits"
    driver.add(make_request("long", 1000))
    chunk = driver.start_chunk()
    assert driver.play_burst().max_steps == 3, "times are not known yet"
    driver.finish(chunk)
    assert driver.play_burst().max_steps == 3
    for name in "ab":
        driver.scheduler.abort(name)
    driver.drain()
    driver = Driver(burst_steps=10)
    start_decoding(driver, "a", max_tokens=5)
    assert driver.play_burst().max_steps == 4, "there is no more to generate"


def test_bursts_follow_measured_times():
    driver = Driver(burst_steps=100)
    start_decoding(driver, "a", max_tokens=400)
    driver.start_burst()
    for _ in range(10):
        driver.burst_step()
    driver.burst.cut()
    driver.end_burst(wall_ms=50.0)  # 5 ms a step
    driver.add(make_request("long", 1000))
    chunk = driver.start_chunk()
    driver.outputs += driver.scheduler.apply(scripted_result(chunk, choose_token, (20.0, 60.0)))
    assert driver.play_burst().max_steps == 8, "40 ms of decodes beside 60 ms on the slower stage"


def test_prompts_are_read_in_small_chunks_while_others_decode():
    driver = Driver(busy_chunk=32)
    driver.add(make_request("long", 330))
    driver.finish(driver.start_chunk())
    start_decoding(driver, "chat", max_tokens=20)
    while driver.round():
        pass
    ends = [end for _, end in spans(driver, "long")]
    assert ends[0] == 128 and ends[-1] == 330 and ends == sorted(ends)
    assert 288 in ends and all(end % 32 == 0 for end in ends[:-1]), "on the grid of the size that is used"


def test_the_last_chunk_in_flight_counts_as_decoding():
    driver = Driver(busy_chunk=32)
    driver.add(make_request("short", 20))
    first = driver.start_chunk()
    driver.add(make_request("long", 330))
    assert driver.start_chunk().items[0].end == 32
    driver.finish(first)


def test_chunks_end_where_they_ended_before():
    driver = Driver(busy_chunk=32, max_sequences=2)
    driver.add(make_request("long", 300, 20))
    driver.chunk()
    start_decoding(driver, "chat", max_tokens=5)
    while not driver.tokens("long"):
        driver.round()
    before = spans(driver, "long")
    assert {end - start for start, end in before} >= {128, 32}
    driver.scheduler.restart()
    driver.new_stages()
    driver.steps.clear()
    driver.drain()
    assert spans(driver, "long") == before
    assert driver.tokens("long") == solo_tokens(make_request("long", 300, 20))


def test_lanes_share_the_sequences():
    driver = Driver(max_sequences=8)
    start_decoding(driver, *(f"r{i}" for i in range(7)), max_tokens=200)
    plan = driver.start_burst()
    assert sorted(map(len, plan.lanes)) == [3, 4] and len({i.slot for i in items_of(plan)}) == 7
    for item in plan.lanes[1]:  # a whole lane leaves
        driver.scheduler.abort(item.request_id)
    driver.end_burst()
    assert list(map(len, driver.start_burst().lanes)) == [2, 2] or list(map(len, driver.burst.plan.lanes)) == [2, 2]
    driver.end_burst()
    driver = Driver(max_sequences=8, lanes=1)
    start_decoding(driver, "a", "b")
    assert list(map(len, driver.start_burst().lanes)) == [2]
    driver.end_burst()
    driver = Driver(max_sequences=8)
    start_decoding(driver, "a")
    assert list(map(len, driver.start_burst().lanes)) == [1], "no lane is empty"


def test_a_burst_books_its_steps_and_gives_back_what_it_did_not_use():
    driver = Driver()
    start_decoding(driver, "a", "b", prompt_len=120, max_tokens=300)
    plan = driver.start_burst()
    assert plan.max_steps == 32 and driver.scheduler.counters().held_chunks == (4, 4), "a second page for both"
    driver.burst_step(0)
    driver.burst.cut()
    driver.end_burst()
    assert driver.scheduler.counters().held_chunks == (2, 2) == tuple(stage.held for stage in driver.stages)
    driver.drain()


def test_a_burst_is_as_long_as_chunks_allow():
    driver = Driver(3, 3, growth_horizon=1)
    start_decoding(driver, "a", prompt_len=110, max_tokens=100)
    start_decoding(driver, "b", prompt_len=120, max_tokens=40)
    assert driver.scheduler.counters().held_chunks == (2, 2)
    assert driver.start_burst().max_steps == 18, "of the two that reach their next page, only one gets it"
    driver.end_burst()
    driver.drain()


def test_replayed_tokens_go_through_bursts():
    driver = Driver(burst_steps=8)
    start_decoding(driver, "r", max_tokens=30, presence_penalty=0.5)
    driver.play_burst()
    driver.play_burst()
    known = driver.tokens("r")
    assert len(known) == 17
    driver.scheduler.restart()
    driver.new_stages()
    assert driver.chunk().items[0].sampling is None
    for start, fed in [(10, 9), (18, 9), (26, 1)]:
        plan = driver.start_burst()
        (item,) = items_of(plan)
        assert (item.start, len(item.token_ids), item.remaining) == (start, fed, 13)
        assert item.token_ids == tuple(known[start - 10 :][:fed]), "one more than the steps feed, so that none of them samples"
        assert bool(item.counts) == (start == 26)
        driver.end_burst()
        assert len(driver.tokens("r")) == (17 if start < 26 else 25)
    driver.drain()
    assert driver.tokens("r") == solo_tokens(make_request("r", 10, 30))


def test_replay_and_sampling_meet_in_one_burst():
    driver = Driver(burst_steps=8)
    start_decoding(driver, "r", max_tokens=30)
    driver.start_burst()
    for _ in range(4):
        driver.burst_step()
    driver.scheduler.restart()
    driver.new_stages()
    driver.chunk()
    assert [len(item.token_ids) for item in items_of(driver.start_burst())] == [5]
    driver.end_burst()
    assert len(driver.tokens("r")) == 9
    driver.drain()
    assert driver.tokens("r") == solo_tokens(make_request("r", 10, 30))


def test_what_ends_in_a_burst_leaves_its_slot_at_the_end_of_it():
    driver = Driver()
    start_decoding(driver, "a", max_tokens=3)
    start_decoding(driver, "b", max_tokens=50)
    driver.start_burst()
    while driver.reason("a") is None:
        driver.burst_step(0)
        driver.burst_step(1)
    assert not driver.scheduler.should_cut(), "nobody waits for the slot"
    assert driver.stages[0].num_sequences == 2
    assert driver.burst_step(1) is not None or driver.burst_step(0) is not None
    driver.burst.cut()
    driver.end_burst()
    assert driver.stages[0].num_sequences == 1
    driver.drain()


def test_a_burst_is_cut_for_a_slot_that_somebody_waits_for():
    driver = Driver(max_sequences=2)
    start_decoding(driver, "a", max_tokens=3)
    start_decoding(driver, "b", max_tokens=50)
    driver.start_burst()
    driver.add(make_request("c"))
    assert not driver.scheduler.should_cut() and driver.start_chunk() is None, "no slot is free"
    while driver.reason("a") is None:
        driver.burst_step(0)
        driver.burst_step(1)
    assert driver.scheduler.should_cut()
    driver.end_burst()
    assert driver.start_burst().max_steps == MIN_DECODE_TURNS
    driver.end_burst()
    driver.drain()


def test_a_long_burst_is_cut_for_a_prompt_and_a_short_one_is_not():
    driver = Driver()
    start_decoding(driver, "a")
    driver.start_burst()
    assert not driver.scheduler.should_cut()
    driver.add(make_request("b", 300, 5))
    assert driver.scheduler.should_cut()
    chunk = driver.start_chunk()
    assert chunk is not None and driver.scheduler.should_cut()
    driver.end_burst()
    assert not driver.scheduler.should_cut(), "none is in flight"
    assert driver.start_burst().max_steps == MIN_DECODE_TURNS
    driver.add(make_request("c", 300, 5))
    driver.finish(chunk)
    assert not driver.scheduler.should_cut()
    driver.end_burst()
    driver.drain()


def test_a_long_burst_is_cut_for_who_has_joined_the_decodes():
    driver = Driver()
    start_decoding(driver, "a", max_tokens=90)
    driver.start_burst()
    driver.add(make_request("b", 20, 5))
    driver.finish(driver.start_chunk())
    assert driver.scheduler.should_cut()
    driver.end_burst()
    assert {item.request_id for item in items_of(driver.start_burst())} == {"a", "b"}
    driver.end_burst()
    driver.drain()


def test_a_burst_is_cut_for_a_stronger_sequence_that_lacks_chunks():
    driver = Driver(4, 4, growth_horizon=1)
    start_decoding(driver, "weak", prompt_len=100, max_tokens=200, priority=1)
    driver.start_burst()
    driver.add(make_request("strong", 120, 260))
    chunk = driver.start_chunk()
    assert chunk is not None
    driver.add(make_request("long", 200, 4, priority=-1))
    driver.finish(chunk)
    while not driver.scheduler._places.running["weak"].is_leaving:
        if driver.chunk() is None and driver.burst_step() is None:
            break
    if driver.scheduler._places.running["weak"].is_leaving:
        assert driver.scheduler.should_cut()
    driver.end_burst()
    driver.drain()
    for name, prompt_len, max_tokens in (("weak", 100, 200), ("strong", 120, 260), ("long", 200, 4)):
        assert driver.tokens(name) == solo_tokens(make_request(name, prompt_len, max_tokens))


@pytest.mark.parametrize("at", range(8))
def test_a_restart_recomputes_what_was_alive_and_drops_late_results(at):
    driver = Driver()
    requests = [make_request("a", 300, 20), make_request("b", 10, 20), make_request("c", 200, 20)]
    driver.add(*requests)
    for _ in range(at):
        driver.round()
    late_burst = driver.start_burst()
    late_step = driver.start_step() if late_burst else None
    late = driver.start_chunk()
    if late_step is not None:
        driver.finish_step(late_step)
        late_step = driver.start_step()
    burst = driver.burst
    assert driver.scheduler.restart() == 1
    driver.new_stages()
    for step in filter(None, [late, late_step]):
        assert driver.scheduler.apply(scripted_result(step, choose_token)) == []
    for plan in filter(None, [late, late_burst]):
        driver.scheduler.fail_plan(plan, "of the old epoch")
    if burst is not None:
        burst.cut()
        burst.apply(scripted_result(late_step, choose_token)) if late_step else None
        assert driver.scheduler.end_burst(burst.end(1.0)) == []
    driver.steps.clear()
    driver.drain()
    assert driver.steps[0].epoch == 1
    for request in requests:
        assert driver.tokens(request.request_id) == solo_tokens(request)


def test_a_restart_does_not_blame_the_next_one_with_an_id():
    driver = Driver()
    driver.add(make_request("r"))
    driver.start_chunk()
    driver.scheduler.abort("r")
    driver.add(make_request("r"))
    driver.scheduler.next_burst()
    (state,) = driver.scheduler._places.running.values()
    driver.scheduler.restart()
    assert state.num_restarts == 0 and not driver.scheduler.is_idle


def test_who_is_in_flight_in_too_many_restarts_ends_with_an_error():
    driver = Driver(max_sequences=1)
    driver.add(make_request("suspect", 10, 50))
    while driver.scheduler.counters().num_waiting == 1:
        driver.chunk()
    driver.add(make_request("waits", 10, 50))
    for number in range(MAX_RESTARTS + 1):
        assert driver.errors() == {}
        if number:
            driver.chunk()
        assert driver.start_burst() is not None
        driver.scheduler.restart("stage 1 died")
        driver.new_stages()
        driver.release()
    assert driver.errors() == {"suspect": "stage 1 died"}
    driver.drain()
    assert driver.tokens("waits") == solo_tokens(make_request("waits", 10, 50))


def test_a_restart_between_plans_blames_nobody():
    driver = Driver()
    start_decoding(driver, "r")
    for _ in range(MAX_RESTARTS + 3):
        driver.scheduler.restart()
        driver.new_stages()
        driver.chunk()
    driver.drain()
    assert driver.tokens("r") == solo_tokens(make_request("r", 10, 50))


def test_a_stalled_sequence_does_not_wait_for_a_long_bursts_end():
    """A sequence that has ended holds what another one lacks: its burst is cut, however many steps are left."""
    rng = random.Random(24)
    driver = Driver(7, 7, max_sequences=4, growth_horizon=1, burst_steps=256)
    for number in range(4):
        driver.add(make_request(f"r{number}", rng.randint(20, 250), rng.choice([30, 60, 300, 400])))
    cuts = []
    while True:
        while driver.chunk() is not None:
            pass
        plan = driver.start_burst()
        if plan is None:
            break
        while any([driver.burst_step(lane) for lane in range(len(plan.lanes))]):
            stalled = any(s.is_stalled for s in driver.scheduler._places.running.values())
            if stalled and any(s.is_ended for s in driver.scheduler._flights.burst.sequences):
                cuts.append(driver.scheduler.should_cut())
                break
        driver.end_burst()
    assert cuts and all(cuts)
    assert not any(driver.errors().values())
