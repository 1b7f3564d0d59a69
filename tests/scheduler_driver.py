"""Driver: runs a Scheduler's plans on counting stages, step by step, and collects what clients would see."""

from __future__ import annotations

from scheduler_loads import make_scheduler, make_stages

from qsa.scheduler.plan import StepPlan
from qsa.scheduler.request import FinishReason, RequestOutput
from qsa.scheduler.scheduler import Scheduler
from qsa.scheduler.simulator import SimulatedStage, choose_token, scripted_result


class Driver:
    """Runs plans on counting stages when told to, and collects what clients would see."""

    def __init__(self, *chunks: int, **settings: object) -> None:
        chunks = chunks or (100, 100)
        self.scheduler: Scheduler = make_scheduler(*chunks, **settings)
        self.stages = [SimulatedStage(stage) for stage in make_stages(*chunks)]
        self.outputs: list[RequestOutput] = []

    def start(self, lane: int = 0) -> StepPlan | None:
        plan = self.scheduler.next_plan(lane)
        if plan is not None:
            for stage in self.stages:
                stage.run(StepPlan.from_bytes(plan.to_bytes()))
        return plan

    def finish(self, plan: StepPlan, choose=choose_token) -> None:
        self.outputs += self.scheduler.apply(scripted_result(plan, choose))

    def step(self, lane: int = 0, choose=choose_token) -> StepPlan | None:
        plan = self.start(lane)
        if plan is not None:
            self.finish(plan, choose)
        self.outputs += self.scheduler.take_outputs()
        return plan

    def drain(self, limit: int = 2000, lanes: int = 2) -> None:
        for _ in range(limit):
            plans = [self.step(lane) for lane in range(lanes)]
            if not any(plans):
                break
        self.assert_empty()

    def tokens(self, name: str) -> list[int]:
        return [token.token_id for output in self.outputs if output.request_id == name for token in output.tokens]

    def reason(self, name: str) -> FinishReason | None:
        reasons = [o.finish_reason for o in self.outputs if o.request_id == name and o.finish_reason is not None]
        assert len(reasons) <= 1, f"{name} ended {len(reasons)} times"
        return reasons[0] if reasons else None

    def assert_empty(self) -> None:
        counters = self.scheduler.counters()
        assert self.scheduler.is_idle, counters
        assert (counters.num_waiting, counters.num_running, counters.num_in_flight, counters.num_slots) == (0, 0, 0, 0)
        assert set(counters.held_chunks) == {0}
        assert [stage.held for stage in self.stages] == [0] * len(self.stages)
        assert [stage.num_sequences for stage in self.stages] == [0] * len(self.stages)
