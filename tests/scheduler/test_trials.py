"""Who was in flight when the stages were lost goes on alone from there, so that one fault does not end everybody's text."""

from __future__ import annotations

import pytest
from scheduler_driver import Driver, items_of, start_decoding
from scheduler_loads import make_request, solo_tokens

from qsa.scheduler.burst import Burst
from qsa.scheduler.plan import BurstPlan, StepPlan
from qsa.scheduler.request import FinishReason
from qsa.scheduler.sequence import MAX_RESTARTS

NEIGHBOURS = [make_request("a", 300, 40), make_request("b", 10, 90), make_request("c", 200, 40)]


class PoisonDriver(Driver):
    """Stages that are lost when they compute position `position` of the request `bad`."""

    def __init__(self, position: int, **settings: object) -> None:
        super().__init__(**settings)
        self.position = position
        self.num_losses = 0

    def is_fatal(self, step: StepPlan) -> bool:
        return any(item.request_id == "bad" and item.start <= self.position < item.end for item in step.items)

    def lose(self) -> None:
        self.num_losses += 1
        assert self.num_losses < 20
        self.scheduler.restart()
        self.new_stages()
        self.release()

    def poisoned_round(self) -> bool:
        """A burst beside a chunk, until the stages are lost or both are done; False when there was nothing to do."""
        burst, chunk = self.scheduler.next_burst(), None
        self.release()
        if burst is not None:
            self.burst = Burst(burst)
        chunk = self.scheduler.next_chunk()
        self.release()
        if burst is None and chunk is None:
            return False
        lanes = range(len(burst.lanes)) if burst is not None else ()
        while steps := [step for step in map(self.next_step, lanes) if step is not None]:
            for step in steps:
                if self.is_fatal(step):
                    self.lose()
                    return True
                self.run(step)
                self.finish_step(step)
        if self.burst is not None:
            self.end_burst()
        if chunk is not None:
            if self.is_fatal(chunk):
                self.lose()
                return True
            self.run(chunk)
            self.finish(chunk)
        return True

    def next_step(self, lane: int) -> StepPlan | None:
        if self.scheduler.should_cut():
            self.burst.cut()
        return self.burst.next_step(lane)


@pytest.mark.parametrize("position", [0, 150, 259, 260, 275], ids=lambda p: f"at {p}")
@pytest.mark.parametrize("place", range(4))
def test_a_poisonous_request_ends_alone(position, place):
    driver = PoisonDriver(position)
    requests = [*NEIGHBOURS[:place], make_request("bad", 260, 40), *NEIGHBOURS[place:]]
    driver.add(*requests)
    while driver.poisoned_round():
        pass
    driver.assert_empty()
    assert driver.num_losses == MAX_RESTARTS + 1 and list(driver.errors()) == ["bad"]
    for request in NEIGHBOURS:
        assert driver.reason(request.request_id) is FinishReason.LENGTH
        assert driver.tokens(request.request_id) == solo_tokens(request)
    bad = driver.tokens("bad")
    assert bad == solo_tokens(make_request("bad", 260, 40))[: len(bad)] and len(bad) == max(0, position - 259)


def test_everybody_goes_one_step_alone_and_then_together_again():
    driver = Driver(burst_steps=8)
    start_decoding(driver, "a", "b", "c", max_tokens=60)
    driver.start_burst()
    for lane in (0, 1):
        driver.burst_step(lane)
    driver.scheduler.restart()
    driver.new_stages()
    plans = [plan for _ in range(12) for plan in (driver.play_burst(), driver.chunk()) if isinstance(plan, BurstPlan)]
    alone = [items_of(plan)[0] for plan in plans if len(items_of(plan)) == 1 and items_of(plan)[0].start == 11]
    assert [item.request_id for item in alone] == ["a", "b", "c"], "each where the stages were lost"
    assert not any(item.start <= 11 < item.start + plan.max_steps for plan in plans for item in items_of(plan)[1:])
    assert len(items_of(plans[-1])) == 3 and plans[-1].max_steps == 8
    driver.drain()
    for name in "abc":
        assert driver.tokens(name) == solo_tokens(make_request(name, 10, 60))


def test_progress_clears_a_request():
    driver = Driver()
    start_decoding(driver, "r", max_tokens=60)
    for count in range(3 * MAX_RESTARTS):
        driver.start_burst()
        for _ in range(6 * (count + 1)):
            driver.burst_step()
        driver.scheduler.restart()
        driver.new_stages()
        driver.chunk()
    driver.drain()
    assert driver.tokens("r") == solo_tokens(make_request("r", 10, 60))
