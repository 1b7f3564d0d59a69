"""SchedulerKeeper and OutputPoller over stand-ins: how a lost scheduler is noticed, who is told, and when it is given up."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time

import pytest
from ray.exceptions import ActorUnavailableError, GetTimeoutError

from qsa.actors.output_poller import OutputPoller
from qsa.actors.process import ProcessId
from qsa.actors.scheduler_keeper import MAX_LOSSES, KeeperEvents, SchedulerKeeper
from qsa.actors.telemetry import SchedulerPing
from qsa.errors import EngineDeadError, EngineRecoveringError
from qsa.scheduler.request import RequestOutput

TICK_S = 0.01
GONE = ActorUnavailableError("gone", None)


class StandInScheduler:
    """A process that begins when it is told to, and dies, freezes and refuses as a test says."""

    def __init__(self, start_s: float = 0.03) -> None:
        self.start_s = start_s
        self.pids = itertools.count(1)
        self.process, self.has_begun, self.frozen, self.longest_s = self._next(), True, False, 0.0
        self.dead_until = 0.0
        self.ended: list[ProcessId | None] = []
        self.resumed: list[float] = []
        self.on_resume = lambda: None

    def _next(self) -> ProcessId:
        return ProcessId("", next(self.pids), "")

    def die(self) -> None:
        self.process, self.has_begun, self.frozen = self._next(), False, False
        self.dead_until = time.monotonic() + self.start_s

    def ping(self, timeout_s: float) -> SchedulerPing:
        if self.frozen:
            time.sleep(timeout_s)
            raise GetTimeoutError
        if time.monotonic() < self.dead_until:
            raise GONE
        return SchedulerPing(self.process, self.has_begun, self.longest_s)

    def end(self, process: ProcessId | None) -> None:
        self.ended.append(process)
        self.die()

    def resume(self, step_s: float) -> None:
        self.resumed.append(step_s)
        self.on_resume()
        self.has_begun = True


class Harness:
    def __init__(self, **settings) -> None:
        self.scheduler = StandInScheduler()
        self.events: list[str] = []
        events = KeeperEvents(
            lambda reason: self.events.append(f"lost: {reason}"),
            lambda: self.events.append("back"),
            lambda reason: self.events.append(f"dead: {reason}"),
        )
        self.keeper = SchedulerKeeper(self.scheduler, events, "test", tick_s=TICK_S, dead_ticks=4, **settings)

    def until(self, condition, timeout_s=5.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.events
            time.sleep(0.002)


@pytest.fixture
def make():
    keepers = []

    def make(**settings):
        harness = Harness(**settings)
        keepers.append(harness.keeper)
        harness.keeper.start()
        harness.until(lambda: harness.keeper._process is not None)
        return harness

    yield make
    for keeper in keepers:
        keeper.close()
        keeper._thread.join(2)
        assert not keeper._thread.is_alive()


def test_a_scheduler_that_died_is_brought_back_though_nobody_called_it(make):
    h = make()
    h.scheduler.longest_s = 2.5
    time.sleep(3 * TICK_S)
    h.scheduler.die()
    h.until(lambda: "back" in h.events)
    assert h.events == ["lost: the scheduler has died", "back"] and h.scheduler.resumed == [2.5]
    assert h.keeper.reason is None and h.keeper.is_keeping and not h.scheduler.ended


def test_one_that_was_replaced_between_two_pings_has_died(make):
    h = make()
    h.scheduler.start_s = 0.0
    h.scheduler.die()
    h.until(lambda: "back" in h.events)
    assert h.events[0] == "lost: the scheduler has died"


def test_one_that_does_not_answer_is_ended(make):
    h = make()
    first = h.scheduler.process
    h.scheduler.frozen = True
    h.until(lambda: "back" in h.events)
    assert h.scheduler.ended == [first] and h.events[0].startswith("lost: the scheduler has not answered")


def test_its_death_while_it_resumes(make):
    h = make()

    def die_once():
        h.scheduler.on_resume = lambda: None
        h.scheduler.die()
        raise GONE

    h.scheduler.on_resume = die_once
    h.scheduler.die()
    h.until(lambda: "back" in h.events)
    assert len(h.scheduler.resumed) == 2 and len(h.events) == 2


def test_it_says_why_it_cannot_be_brought_back(make):
    h = make()

    def refuse():
        raise EngineDeadError("stage 1 could not be loaded again")

    h.scheduler.on_resume = refuse
    h.scheduler.die()
    h.until(lambda: len(h.events) == 2)
    assert h.events[1] == "dead: stage 1 could not be loaded again" and h.keeper.reason == "stage 1 could not be loaded again"
    assert not h.keeper.is_keeping


def test_it_gives_up_after_its_time(make):
    h = make(start_timeout_s=0.1)
    h.scheduler.start_s = 60
    h.scheduler.die()
    h.until(lambda: len(h.events) == 2)
    assert h.events[1] == "dead: the scheduler has died, and was not back after 0.1 s"


def test_it_gives_up_one_that_dies_again_and_again(make):
    h = make()
    h.scheduler.start_s = 0.0
    for count in range(MAX_LOSSES):
        h.scheduler.die()
        h.until(lambda count=count: h.events.count("back") == count + 1)
    h.scheduler.die()
    h.until(lambda: h.events[-1].startswith("dead"))
    assert "6 times in a row" in h.events[-1]


def test_a_call_that_failed_for_nothing_is_answered_too(make):
    h = make()
    h.keeper.look()
    h.until(lambda: h.events == ["back"])


def test_nothing_is_brought_back_after_the_close(make):
    h = make()
    h.keeper.close()
    h.scheduler.die()
    time.sleep(5 * TICK_S)
    assert not h.events and not h.scheduler.resumed


# the poller


class Poll:
    """Outputs, or what a poll raises, from the test."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.items: list[object] = []

    def put(self, item) -> None:
        with self.changed:
            self.items.append(item)
            self.changed.notify()

    def __call__(self):
        with self.changed:
            self.changed.wait_for(lambda: self.items, 0.05)
            item = self.items.pop(0) if self.items else []
        if isinstance(item, Exception):
            raise item
        return item


def poll(scenario, on_lost=lambda: True):
    async def main():
        source = Poll()
        poller = OutputPoller(source, "test", on_lost)
        await scenario(source, poller)
        poller.fail("the test is over")
        poller._thread.join(2)
        assert not poller._thread.is_alive()

    asyncio.run(main())


def test_open_requests_end_when_the_scheduler_is_lost_and_later_ones_go_on():
    async def scenario(source, poller):
        queues = [poller.open(name) for name in "ab"]
        source.put(GONE)
        errors = [await asyncio.wait_for(queue.get(), 2) for queue in queues]
        assert all(type(error) is EngineRecoveringError for error in errors) and errors[0] is not errors[1]
        with pytest.raises(EngineRecoveringError, match="recovering: the scheduler has died"):
            poller.open("c")
        poller.interrupt("again")  # which is known already
        assert poller.dead_reason is None
        poller.resume()
        queue = poller.open("c")
        source.put([RequestOutput("c"), RequestOutput("a")])
        assert (await asyncio.wait_for(queue.get(), 2)).request_id == "c"
        assert all(queue.empty() for queue in queues), "each ends once"

    poll(scenario)


def test_a_poll_that_fails_after_the_scheduler_is_back_ends_nothing():
    """Ray takes a second or two to say that the one who was asked is gone; the keeper may be quicker."""
    is_polled, is_gone = threading.Event(), threading.Event()
    outputs = [[RequestOutput("b")]]

    def source():
        if not is_polled.is_set():  # the poll of the one that dies
            is_polled.set()
            is_gone.wait(5)
            raise GONE
        time.sleep(0.01)
        return outputs.pop() if outputs else []

    async def main():
        poller = OutputPoller(source, "test", lambda: True)
        first = poller.open("a")
        await asyncio.to_thread(is_polled.wait, 5)
        poller.interrupt("the scheduler has died")
        assert type(await asyncio.wait_for(first.get(), 2)) is EngineRecoveringError
        poller.resume()
        second = poller.open("b")
        is_gone.set()
        assert (await asyncio.wait_for(second.get(), 2)).request_id == "b"
        poller.fail("the test is over")

    asyncio.run(main())


def test_an_engine_that_says_that_it_is_dead_is_dead():
    async def scenario(source, poller):
        queue = poller.open("a")
        source.put(EngineDeadError("stage 1 has died too often"))
        assert type(await asyncio.wait_for(queue.get(), 2)) is EngineDeadError
        assert poller.dead_reason == "stage 1 has died too often"
        with pytest.raises(EngineDeadError, match="too often"):
            poller.open("b")

    poll(scenario)


def test_a_loss_is_the_end_where_nobody_brings_it_back():
    async def scenario(source, poller):
        queue = poller.open("a")
        source.put(GONE)
        assert type(await asyncio.wait_for(queue.get(), 2)) is EngineDeadError
        assert poller.dead_reason == "the scheduler has died"

    poll(scenario, on_lost=lambda: False)


def test_a_keeper_that_is_quicker_than_the_poller_is_heard():
    async def scenario(source, poller):
        resumed.append(poller.resume)
        queue = poller.open("a")
        source.put(GONE)
        assert type(await asyncio.wait_for(queue.get(), 2)) is EngineRecoveringError
        await asyncio.sleep(0.05)
        assert poller.lost_reason is None
        queue = poller.open("b")
        source.put([RequestOutput("b")])
        assert (await asyncio.wait_for(queue.get(), 2)).request_id == "b"

    resumed = []

    def on_lost():
        resumed[0]()  # it has looked already, and nothing was wrong
        return True

    poll(scenario, on_lost)
