"""Fairness and progress under load, played on the simulator: short against long, priorities, thousands of requests."""

from __future__ import annotations

import pytest
import torch
from scheduler_loads import KV, make_request, make_stages

from qsa.errors import OutOfChunksError
from qsa.memory.kv_cache import KVCache
from qsa.memory.layout import KVLayout, SummaryLayout
from qsa.scheduler.burst import Burst
from qsa.scheduler.growth import StageCapacity
from qsa.scheduler.plan import BurstPlan, SequenceStep, StepPlan
from qsa.scheduler.request import FinishReason
from qsa.scheduler.simulated_stages import SimulatedStage, StageCalls
from qsa.scheduler.simulator import Arrival, CostModel, Report, Simulation

COST = CostModel(step_ms=1.0, prefill_token_ms=0.6, decode_token_ms=2.0)


def play(load, *chunks, **settings):
    simulation = Simulation(make_stages(*(chunks or (500, 500))), cost=COST, **({"prefill_chunk": 512} | settings))
    return simulation.run(load)


def test_a_long_prompt_does_not_stall_a_chat():
    load = [Arrival(0.0, make_request("long", 8000, 5)), Arrival(1.0, make_request("chat", 50, 50))]
    report = play(load, max_model_len=20000)
    chat, chunk_s = report.requests["chat"], 512 * 0.6e-3 + 1e-3
    assert chat.first_token_s < 4 * chunk_s, "a chat waits for the chunks that are under way, and its own"
    assert chat.longest_gap_s < 3 * chunk_s, "between two tokens lies one chunk of a prompt on each stage at most"
    assert chat.finish_s < report.requests["long"].first_token_s
    alone = play(load[:1], max_model_len=20000).requests["long"]
    assert report.requests["long"].first_token_s < 1.5 * alone.first_token_s


def test_a_stream_of_chats_does_not_starve_a_long_prompt():
    chats = [Arrival(0.05 * i, make_request(f"chat{i}", 300, 10)) for i in range(300)]
    load = [Arrival(0.5, make_request("long", 8000, 5)), *chats]
    report = play(load, max_model_len=20000, max_sequences=8, max_waiting=400)
    assert {log.finish_reason for log in report.requests.values()} == {FinishReason.LENGTH}
    alone = play(load[:1], max_model_len=20000).requests["long"].first_token_s
    assert report.requests["long"].first_token_s < 5 * alone


def test_a_big_request_is_not_passed_for_ever():
    """The pool holds the big one only when nearly nothing else runs; small ones keep coming."""
    smalls = [Arrival(0.02 * i, make_request(f"s{i}", 120, 30)) for i in range(200)]
    load = [Arrival(0.5, make_request("big", 1000, 200)), *smalls]
    report = play(load, 10, 10, prefill_chunk=128, max_sequences=6, max_waiting=500, growth_horizon=200)
    big = report.requests["big"]
    assert big.finish_reason is FinishReason.LENGTH
    assert big.finish_s < 0.5 * report.duration_s


def test_low_priority_is_served_at_last():
    """Urgent requests keep the only place busy and pass the other one until it has waited 20 s: two priorities."""
    urgent = [Arrival(0.5 * i, make_request(f"u{i}", 100, 100, priority=0)) for i in range(120)]
    load = [Arrival(0.2, make_request("low", 100, 20, priority=2)), *urgent]
    report = play(load, 4, 4, prefill_chunk=128, max_sequences=1, max_waiting=200)
    waited_s = report.requests["low"].finish_s - 0.2
    assert 20 < waited_s < 25
    assert sum(log.finish_s < waited_s for log in report.requests.values()) > 20
    assert report.duration_s > 60


def test_an_overlapping_prompt_keeps_both_stages_busy():
    load = [Arrival(0.0, make_request("long", 8192, 1))]
    two = play(load, max_model_len=20000).requests["long"].first_token_s
    assert two == pytest.approx(17 * (1.0 + 512 * 0.6) / 1e3), "16 chunks on two stages take 17 turns, not 32"


def test_lanes_keep_both_stages_busy():
    load = [Arrival(0.0, make_request(f"r{i}", 10, 200)) for i in range(4)]
    two, one = (play(load, lanes=lanes).duration_s for lanes in (2, 1))
    assert two < 0.65 * one, "a lane's step of two rows takes 5 ms a stage, one of four rows 9 ms"


def test_prompts_are_read_on_both_stages_at_once_beside_decodes():
    """A round is a burst of k steps and a chunk, not two chunks one behind the other."""
    cost = CostModel(step_ms=2.0, prefill_token_ms=0.1, decode_token_ms=0.0)  # a chunk 53.2 ms, a round of decodes 4 ms
    load = [Arrival(0.0, make_request(f"s{i}", 10, 4000)) for i in range(2)]
    load.append(Arrival(0.5, make_request("long", 512 * 64, 2)))
    simulation = Simulation(make_stages(2000, 2000), prefill_chunk=512, max_model_len=40000, cost=cost)
    report = simulation.run(load)
    log = report.requests["long"]
    begin, end = log.arrival_s, log.token_times_s[0]
    assert end - begin < 1.8 * 64 * 0.0532
    gaps = gaps_between(report, "s", begin, end)
    assert gaps[len(gaps) // 2] < 1.5 * 0.004
    assert gaps[-1] < 0.004 + 0.0532 + 0.010


def gaps_between(report: Report, prefix: str, begin_s: float, end_s: float) -> list[float]:
    """Times between tokens of some requests while something else went on, sorted."""
    logs = [log for name, log in report.requests.items() if name.startswith(prefix)]
    pairs = [pair for log in logs for pair in zip(log.token_times_s[1:], log.gaps_s, strict=True)]
    return sorted(gap for time, gap in pairs if begin_s < time < end_s)


def test_streams_beside_a_very_long_prompt():
    """Card-like costs: a round of decodes 4.6 ms, a chunk of 2048 tokens 27 ms a stage, 0.3 ms until the scheduler hears."""
    cost = CostModel(step_ms=1.9, prefill_token_ms=25.1 / 2048, decode_token_ms=0.4 / 3.5, notice_ms=0.3)
    stage = StageCapacity(1, 100_000, KVLayout(8, 128, 2), {0: SummaryLayout(64, 0)})
    settings: dict = {"max_sequences": 8, "max_model_len": 300_000, "prefill_chunk": 2048, "cost": cost}
    streams = [Arrival(0.01 * i, make_request(f"s{i}", 100, 1500)) for i in range(7)]
    alone = Simulation([stage] * 2, **settings).run([Arrival(0.0, make_request("long", 2**18, 2))]).requests["long"]
    report = Simulation([stage] * 2, **settings).run([*streams, Arrival(1.0, make_request("long", 2**18, 2))])
    log = report.requests["long"]
    quiet = gaps_between(report, "s", 0.5, 1.0)
    busy = gaps_between(report, "s", 1.0, log.token_times_s[0])
    assert quiet[len(quiet) // 2] == pytest.approx(0.0047, abs=2e-4)
    assert busy[len(busy) // 2] < 1.1 * quiet[len(quiet) // 2], "most gaps are the quiet ones"
    assert busy[int(0.99 * len(busy))] < 0.040
    assert log.first_token_s < 2 * alone.first_token_s, "prompts get half of the time"


def test_tight_pools_preempt_and_still_answer_everything():
    load = [Arrival(0.01 * i, make_request(f"r{i}", 100 + 30 * (i % 5), 150)) for i in range(20)]
    report = play(load, 9, 9, prefill_chunk=128, max_sequences=6, growth_horizon=1, max_waiting=50)
    assert report.num_preempted > 0 and report.max_held == (9, 9)
    assert {log.finish_reason for log in report.requests.values()} == {FinishReason.LENGTH}
    cautious = play(load, 9, 9, prefill_chunk=128, max_sequences=6, growth_horizon=300, max_waiting=50)
    assert cautious.num_preempted == 0


def test_thousands_of_requests_leave_nothing_behind():
    simulation = Simulation(make_stages(50, 50), prefill_chunk=128, max_waiting=10000, cost=COST)
    report = simulation.run(Arrival(0.005 * i, make_request(f"r{i}", 5, 1)) for i in range(3000))
    assert len(report.requests) == 3000
    scheduler = simulation.scheduler
    owners = (scheduler, scheduler._places, scheduler._flights, simulation._calls)
    containers = [value for owner in owners for value in vars(owner).values() if isinstance(value, (dict, list, set))]
    assert [c for c in containers if c and c is not scheduler._totals and c is not simulation._calls.queues] == []
    assert simulation._calls.is_empty


def test_plans_run_on_real_caches():
    """What the counting stages accept, the product's own KV cache accepts too, to the last chunk."""
    load = [Arrival(0.01 * i, make_request(f"r{i}", 100 + 60 * (i % 5), 150, sparse_id=i % 2)) for i in range(12)]
    stages = make_stages(11, 11)
    simulation = Simulation(stages, prefill_chunk=128, max_sequences=6, growth_horizon=1, cost=COST)
    report = simulation.run(load)
    assert report.num_preempted > 0 and report.max_held == (11, 11)
    first, last = (stage.counts.log for stage in simulation.stages)
    assert first != last, "the last stage runs chunks later than bursts that were planned after them"
    for log in (first, last):
        cache = KVCache(
            KV, torch.float32, num_layers=1, num_chunks=11, max_sequences=6, max_seq_len=1000, device=torch.device("cpu")
        )
        for call in log:
            if isinstance(call, tuple):
                for slot in call:
                    cache.release(slot)
                continue
            for slot, sparse_id in call.open_slots:
                cache.open(slot, stages[0].summaries[sparse_id])
            for item in call.items:
                cache.extend(item.slot, item.end)
        assert cache.stats().num_free == 11 and cache.stats().num_sequences == 0


def test_runs_are_reproducible():
    load = [Arrival(0.01 * i, make_request(f"r{i}", 100 + 70 * (i % 4), 30)) for i in range(15)]
    assert play(load, 12, 12, prefill_chunk=128).plans == play(load, 12, 12, prefill_chunk=128).plans


def test_simulated_stages_notice_wrong_plans():
    """The checks that the other tests lean on are able to fail."""

    def plan(*items: SequenceStep, opened=()) -> StepPlan:
        return StepPlan(0, 0, 0, items, tuple(opened))

    stage = SimulatedStage(make_stages(1)[0])
    stage.run(plan(SequenceStep("r", 0, 0, (1,) * 128, True), opened=[(0, 0)]))
    with pytest.raises(OutOfChunksError):
        stage.run(plan(SequenceStep("r", 0, 128, (1,), False)))
    with pytest.raises(AssertionError, match="starts at 5"):
        stage.run(plan(SequenceStep("r", 0, 5, (1,), False)))
    with pytest.raises(AssertionError, match="not open"):
        stage.run(plan(SequenceStep("q", 1, 0, (1,), True)))
    with pytest.raises(AssertionError, match="opened twice"):
        stage.run(plan(SequenceStep("q", 0, 0, (1,), True), opened=[(0, 0)]))
    with pytest.raises(AssertionError, match="company"):
        stage.run(plan(SequenceStep("q", 1, 0, (1,), True), SequenceStep("r", 0, 128, (1,), False), opened=[(1, 0)]))
    stage.release((0, 1, 3))
    assert stage.held == 0


def test_the_order_of_calls():
    def chunk(step: int) -> StepPlan:
        return StepPlan(0, step, 0)

    def burst(step: int) -> Burst:
        return Burst(BurstPlan(0, step, (), 1))

    calls = StageCalls(3)
    first, second, third = (burst(step) for step in (0, 2, 4))
    calls.send_burst(first)
    calls.send_chunk(chunk(1), in_round=True)
    calls.send_burst(second)
    calls.release((7,))
    calls.send_chunk(chunk(3), in_round=True)
    calls.send_burst(third)
    calls.flush()
    assert list(calls.queues[0]) == [first, chunk(1), second, (7,), chunk(3), third]
    assert list(calls.queues[1]) == [first, second, chunk(1), (7,), third, chunk(3)]
    assert list(calls.queues[2]) == [first, second, (7,), third, chunk(1), chunk(3)]
    calls = StageCalls(2)
    calls.send_chunk(chunk(0), in_round=False)
    assert calls.head(0) == chunk(0) and calls.head(1) is None, "the first stage has not done it"
    calls.take(0)
    assert not calls.chunk_done(chunk(0), 0)
    assert calls.head(1) == chunk(0)
    calls.take(1)
    assert calls.chunk_done(chunk(0), 1) and calls.is_empty
