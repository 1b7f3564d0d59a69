"""Preemption on the real model: a sequence that loses its chunks, and is computed again, writes the same text."""

from __future__ import annotations

from pathlib import Path

import pytest

from qsa.actors.placement import plan_engine
from qsa.actors.stage import StageActor
from qsa.config import make_config
from qsa.model.checkpoint.load import open_checkpoint
from qsa.scheduler.burst import Burst
from qsa.scheduler.request import Request, SamplingParams
from qsa.scheduler.scheduler import Scheduler

DOCUMENT = Path(__file__).parents[2] / "qsa" / "data" / "alice.txt"
PROMPT_LEN, NUM_TOKENS = 1000, 40  # a page has 1024 tokens: every sequence needs a second one on the way
POOL = 80 << 20  # two sequences of one page fit the first stage's 17 layers, one of two pages and one of one page do not


@pytest.fixture(scope="module")
def engine_parts():
    config = make_config({"cache": {"device_bytes": POOL}, "model": {"max_model_len": 2048}, "limits": {"growth_horizon": 1}})
    checkpoint = open_checkpoint("default")
    plan = plan_engine(config, checkpoint)
    stages = [StageActor(spec) for spec in plan.stages]
    capacities = [stage.load() for stage in stages]
    for stage in stages:
        stage.open_link(0, "object_store", b"secret")
    document = checkpoint.tokenizer().encode(DOCUMENT.read_text(encoding="utf-8"))
    checkpoint.close()
    return plan.scheduler, capacities, stages, document


def answer(spec, capacities, stages, requests):
    """Run the requests to their end on the given stages; their tokens, and the scheduler's counters."""
    scheduler = Scheduler(
        capacities,
        max_sequences=spec.max_sequences,
        max_waiting=spec.max_waiting,
        max_model_len=spec.max_model_len,
        prefill_chunk=spec.prefill_chunk,
        growth_horizon=spec.growth_horizon,
        eos_token_ids=spec.eos_token_ids,
        sparse=spec.sparse,
    )
    scheduler.epoch = answer.epoch = answer.epoch + 1  # the stages have seen the steps of earlier calls
    for request in requests:
        scheduler.add(request)
    tokens = {request.request_id: [] for request in requests}

    def release() -> None:
        slots = scheduler.take_releases()
        for stage in stages:
            stage.release(scheduler.epoch, slots)

    def run(plan):
        message = None
        for stage in stages:
            message = stage.forward(plan.to_bytes(), message)
        for output in scheduler.apply(message):
            assert output.error is None
            tokens[output.request_id] += [token.token_id for token in output.tokens]
        return message

    while not scheduler.is_idle:
        burst_plan = scheduler.next_burst()
        release()
        if burst_plan is not None:
            burst = Burst(burst_plan)
            while not burst.is_over:
                for lane in range(len(burst_plan.lanes)):
                    if (step := burst.next_step(lane)) is not None:
                        burst.apply(run(step))
            scheduler.end_burst(burst.end(1.0))
        chunk = scheduler.next_chunk()
        release()
        assert burst_plan is not None or chunk is not None or scheduler.is_idle, "nothing to do, and not idle"
        if chunk is not None:
            run(chunk)
    return tokens, scheduler.counters()


answer.epoch = 0


def test_a_preempted_sequence_writes_what_it_writes_alone(engine_parts):
    spec, capacities, stages, document = engine_parts
    requests = [
        Request(
            f"r{i}",
            tuple(document[i * 700 : i * 700 + PROMPT_LEN]),
            SamplingParams(temperature=0.7, seed=i, max_tokens=NUM_TOKENS, ignore_eos=True),
        )
        for i in range(2)
    ]
    alone = {}
    for request in requests:
        tokens, counters = answer(spec, capacities, stages, [request])
        assert counters.preempted == 0
        alone |= tokens

    together, counters = answer(spec, capacities, stages, requests)

    assert counters.preempted > 0
    assert together == alone
    assert [len(tokens) for tokens in together.values()] == [NUM_TOKENS, NUM_TOKENS]
    assert not any(counters.held_chunks)
    assert all(stage.stats().pool.num_free == stage.stats().pool.num_chunks for stage in stages)
