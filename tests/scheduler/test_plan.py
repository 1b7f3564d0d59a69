"""Step plans survive their msgpack form."""

from __future__ import annotations

from qsa.scheduler.plan import SequenceStep, StepPlan
from qsa.scheduler.request import SamplingParams


def test_plans_survive_packing():
    sampling = SamplingParams(0.5, 3, 0.9, 0.1, 2**63 + 1, 7, (1, 2), True, ((5, -1.5),), 4, 0.1, 0.2, 1.1)
    items = (
        SequenceStep("a", 3, 17, (99,), False, sampling, ((4, 2), (99, 1))),
        SequenceStep("b", 0, 0, tuple(range(512)), True),
    )
    plan = StepPlan(2, 10**6, 1, items, ((0, 1),), (2, 5))
    assert StepPlan.from_bytes(plan.to_bytes()) == plan
    assert plan.num_tokens == 513 and plan.items[1].end == 512
