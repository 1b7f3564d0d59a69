"""Driver: runs a Scheduler's plans on counting stages, step by step, and collects what clients would see."""

from __future__ import annotations

from collections.abc import Callable

from scheduler_loads import make_request, make_scheduler, make_stages

from qsa.scheduler.burst import Burst
from qsa.scheduler.plan import BurstItem, BurstPlan, SequenceStep, StepPlan, StepResult
from qsa.scheduler.request import FinishReason, RequestOutput
from qsa.scheduler.scheduler import Scheduler
from qsa.scheduler.simulated_stages import SimulatedStage, choose_token, scripted_result


class Driver:
    """Runs plans on counting stages when told to, all stages at once, and collects what clients would see.

    `edit` changes the results of burst steps before anybody sees them.
    """

    def __init__(self, *chunks: int, **settings: object) -> None:
        self.chunks = chunks or (100, 100)
        self.scheduler: Scheduler = make_scheduler(*self.chunks, **settings)
        self.outputs: list[RequestOutput] = []
        self.edit: Callable[[StepResult], StepResult] = lambda result: result
        self.choose: Callable[[SequenceStep], int] = choose_token
        self.burst: Burst | None = None
        self.steps: list[StepPlan] = []  # everything the stages ran
        self.new_stages()

    def new_stages(self) -> None:
        """Fresh stages, as after a restart."""
        self.stages = [SimulatedStage(stage) for stage in make_stages(*self.chunks)]
        self.burst = None

    def add(self, *requests) -> None:
        for request in requests:
            self.scheduler.add(request)

    def release(self) -> tuple[int, ...]:
        """Do on all stages what the scheduler wants released."""
        self.outputs += self.scheduler.take_outputs()
        slots = self.scheduler.take_releases()
        for stage in self.stages:
            stage.release(slots)
        return slots

    # chunks

    def start_chunk(self) -> StepPlan | None:
        plan = self.scheduler.next_chunk()
        self.release()
        if plan is not None:
            self.run(StepPlan.from_bytes(plan.to_bytes()))
        return plan

    def finish(self, plan: StepPlan) -> None:
        self.outputs += self.scheduler.apply(self.edit(scripted_result(plan, self.choose)))
        self.release()

    def chunk(self) -> StepPlan | None:
        """One chunk of a prompt, to its end."""
        plan = self.start_chunk()
        if plan is not None:
            self.finish(plan)
        return plan

    # bursts

    def start_burst(self) -> BurstPlan | None:
        plan = self.scheduler.next_burst()
        self.release()
        if plan is not None:
            self.burst = Burst(BurstPlan.from_bytes(plan.to_bytes()))
        return plan

    def start_step(self, lane: int = 0) -> StepPlan | None:
        """The next step of a lane reaches the stages."""
        assert self.burst is not None
        if self.scheduler.should_cut():
            self.burst.cut()
        step = self.burst.next_step(lane)
        if step is not None:
            self.run(step)
        return step

    def finish_step(self, step: StepPlan) -> None:
        assert self.burst is not None
        result = self.edit(scripted_result(step, self.choose))
        self.burst.apply(result)
        self.outputs += self.scheduler.apply(result)
        self.release()

    def burst_step(self, lane: int = 0) -> StepPlan | None:
        step = self.start_step(lane)
        if step is not None:
            self.finish_step(step)
        return step

    def end_burst(self, wall_ms: float = 0.0) -> None:
        """Run the burst under way to its end."""
        assert self.burst is not None
        while any([self.burst_step(lane) for lane in range(len(self.burst.plan.lanes))]):
            pass
        burst, self.burst = self.burst, None
        self.outputs += self.scheduler.end_burst(burst.end(wall_ms))
        self.release()

    def play_burst(self) -> BurstPlan | None:
        """A burst from its plan to its end."""
        plan = self.start_burst()
        if plan is not None:
            self.end_burst()
        return plan

    # both

    def round(self) -> bool:
        """A burst and a chunk, as far as there are any; False when there was nothing to do."""
        burst, chunk = self.play_burst(), self.chunk()
        return burst is not None or chunk is not None

    def drain(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.round():
                break
        self.assert_empty()

    def run(self, plan: StepPlan) -> None:
        self.steps.append(plan)
        for stage in self.stages:
            stage.run(plan)

    def tokens(self, name: str) -> list[int]:
        return [token.token_id for output in self.outputs if output.request_id == name for token in output.tokens]

    def reason(self, name: str) -> FinishReason | None:
        reasons = [o.finish_reason for o in self.outputs if o.request_id == name and o.finish_reason is not None]
        assert len(reasons) <= 1, f"{name} ended {len(reasons)} times"
        return reasons[0] if reasons else None

    def errors(self) -> dict[str, str | None]:
        return {o.request_id: o.error for o in self.outputs if o.finish_reason is FinishReason.ERROR}

    def assert_empty(self) -> None:
        counters = self.scheduler.counters()
        assert self.scheduler.is_idle, counters
        assert (counters.num_waiting, counters.num_running, counters.num_in_flight, counters.num_slots) == (0, 0, 0, 0)
        assert set(counters.held_chunks) == {0}
        assert [stage.held for stage in self.stages] == [0] * len(self.stages)
        assert [stage.num_sequences for stage in self.stages] == [0] * len(self.stages)


def items_of(plan: BurstPlan) -> list[BurstItem]:
    return [item for lane in plan.lanes for item in lane]


def start_decoding(driver: Driver, *names: str, prompt_len: int = 10, max_tokens: int = 50, **sampling: object) -> None:
    """Add requests and read their prompts; none of them decodes yet."""
    driver.add(*(make_request(name, prompt_len, max_tokens, **sampling) for name in names))
    while not all(driver.tokens(name) for name in names):
        if driver.chunk() is None:  # the first ones are to decode in between
            assert driver.start_burst() is not None and driver.burst is not None
            driver.burst.cut()
            driver.end_burst()
