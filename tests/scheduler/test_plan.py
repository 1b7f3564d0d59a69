"""Plans and results survive their msgpack form."""

from __future__ import annotations

import pickle

from qsa.scheduler.plan import BurstItem, BurstPlan, SelectionStats, SequenceResult, SequenceStep, StepPlan, StepResult
from qsa.scheduler.request import SamplingParams, TokenOutput

SAMPLING = SamplingParams(0.5, 3, 0.9, 0.1, 2**63 + 1, 7, (1, 2), True, ((5, -1.5),), 4, 0.1, 0.2, 1.1)


def test_step_plans_survive_packing():
    items = (
        SequenceStep("a", 3, 17, (99,), False, SAMPLING, ((4, 2), (99, 1))),
        SequenceStep("b", 0, 0, tuple(range(512)), True),
    )
    plan = StepPlan(2, 10**6, 1, items, ((0, 1),))
    assert StepPlan.from_bytes(plan.to_bytes()) == plan
    assert plan.num_tokens == 513 and plan.items[1].end == 512


def test_bursts_survive_packing():
    lanes = (
        (BurstItem("a", 3, 17, (99, 4), SAMPLING, ((4, 2), (99, 1)), 5), BurstItem("b", 1, 0, (1,), SamplingParams(), (), 1)),
        (BurstItem("c", 0, 10**5, (7,), SAMPLING, (), 9),),
    )
    plan = BurstPlan(1, 40, lanes, 32, (2, 151645))
    assert BurstPlan.from_bytes(plan.to_bytes()) == plan
    assert (plan.num_items, plan.end_step) == (3, 72)


def test_results_survive_packing():
    results = (
        SequenceResult("a", TokenOutput(5, -0.5, ((5, -0.5), (9, -1.25)))),
        SequenceResult("b", TokenOutput(0)),
        SequenceResult("c", error="logits are not finite"),
        SequenceResult("d"),
    )
    result = StepResult(1, 9, 1, results, (SelectionStats("a", 10.0, 20.0, 16, 4, 0.5),), (1.5, 2.5))
    assert StepResult.from_bytes(result.to_bytes()) == result
    failed = StepResult(1, 9, 1, error="stage 1: out of memory")
    assert StepResult.from_bytes(failed.to_bytes()) == failed


def test_packed_sampling_is_made_once_and_shared():
    assert SAMPLING.packed is SAMPLING.packed
    assert SamplingParams.unpack(SAMPLING.packed) is SamplingParams.unpack(bytes(SAMPLING.packed))
    assert pickle.loads(pickle.dumps(SAMPLING)) == SAMPLING
