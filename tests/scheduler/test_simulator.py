"""Fairness and progress under load, played on the simulator: short against long, priorities, thousands of requests."""

from __future__ import annotations

import pytest
import torch
from scheduler_loads import KV, make_request, make_stages

from qsa.errors import OutOfChunksError
from qsa.memory.kv_cache import KVCache
from qsa.scheduler.plan import SequenceStep, StepPlan
from qsa.scheduler.request import FinishReason
from qsa.scheduler.simulator import Arrival, CostModel, SimulatedStage, Simulation

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
    one = play(load, max_model_len=20000, lanes=1).requests["long"].first_token_s
    assert two < 0.55 * one, "16 chunks on two stages take 17 turns, not 32"


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
    containers = [value for value in vars(scheduler).values() if isinstance(value, (dict, list, set))]
    assert [c for c in containers if c and c is not scheduler._totals] == []


def test_plans_run_on_real_caches():
    """What the counting stages accept, the product's own KV cache accepts too, to the last chunk."""
    load = [Arrival(0.01 * i, make_request(f"r{i}", 100 + 60 * (i % 5), 150, sparse_id=i % 2)) for i in range(12)]
    stages = make_stages(11, 11)
    report = play(load, 11, 11, prefill_chunk=128, max_sequences=6, growth_horizon=1)
    assert report.num_preempted > 0 and report.max_held == (11, 11)
    cache = KVCache(
        KV, torch.float32, num_layers=1, num_chunks=11, max_sequences=6, max_seq_len=1000, device=torch.device("cpu")
    )
    for plan in report.plans:
        for slot in plan.release_slots:
            cache.release(slot)
        for slot, sparse_id in plan.open_slots:
            cache.open(slot, stages[0].summaries[sparse_id])
        for item in plan.items:
            cache.extend(item.slot, item.end)
    assert cache.stats().num_free == 11 and cache.stats().num_sequences == 0


def test_runs_are_reproducible():
    load = [Arrival(0.01 * i, make_request(f"r{i}", 100 + 70 * (i % 4), 30)) for i in range(15)]
    assert play(load, 12, 12, prefill_chunk=128).plans == play(load, 12, 12, prefill_chunk=128).plans


def test_simulated_stages_notice_wrong_plans():
    """The checks that the other tests lean on are able to fail."""

    def plan(items, opened=(), released=()):
        return StepPlan(0, 0, 0, tuple(items), tuple(opened), tuple(released))

    stage = SimulatedStage(make_stages(1)[0])
    stage.run(plan([SequenceStep("r", 0, 0, (1,) * 128, True)], [(0, 0)]))
    with pytest.raises(OutOfChunksError):
        stage.run(plan([SequenceStep("r", 0, 128, (1,), False)]))
    with pytest.raises(AssertionError, match="starts at 5"):
        stage.run(plan([SequenceStep("r", 0, 5, (1,), False)]))
    with pytest.raises(AssertionError, match="not open"):
        stage.run(plan([SequenceStep("q", 1, 0, (1,), True)]))
    with pytest.raises(AssertionError, match="opened twice"):
        stage.run(plan([], [(0, 0)]))
    stage.run(plan([], [(0, 0)], [0]))
    assert stage.held == 0
