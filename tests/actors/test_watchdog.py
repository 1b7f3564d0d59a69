"""Watchdog over stand-in pings: death, silence, steps that hang and steps that are only long, and stages that all wait."""

from __future__ import annotations

import asyncio
import time

from ray.exceptions import ActorUnavailableError

from qsa.actors.process import ProcessId
from qsa.actors.telemetry import StagePing
from qsa.actors.watchdog import DEAD_TICKS, UNHEALTHY_TICKS, Trouble, Watchdog

TICK_S = 0.01
ONE, OTHER = ProcessId("here", 1, "5"), ProcessId("here", 2, "6")


class Stage:
    """Answers pings with what the test sets; `silent`: not at all."""

    def __init__(self) -> None:
        self.running_s, self.num_steps, self.process, self.silent = 0.0, 0, ONE, False
        self.error: Exception | None = None

    async def ping(self) -> StagePing:
        if self.silent:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return StagePing(self.running_s, self.num_steps, self.process, True)

    def compute(self, seconds: float) -> None:
        self.running_s = seconds


def watch(scenario, num_stages=2, **settings):
    """Run `scenario(watchdog, stages, troubles)` beside a watchdog of short ticks."""

    async def main():
        stages, troubles = [Stage() for _ in range(num_stages)], []
        values = {"tick_s": TICK_S, "stuck_s": 10 * TICK_S} | settings
        watchdog = Watchdog([stage.ping for stage in stages], troubles.append, **values)
        watchdog.start()
        await ticks(2)
        await scenario(watchdog, stages, troubles)
        watchdog.stop()

    asyncio.run(main())


async def ticks(count):
    await asyncio.sleep(count * TICK_S * 1.1)


async def first(troubles, timeout_s=2.0) -> Trouble:
    deadline = time.monotonic() + timeout_s
    while not troubles:
        assert time.monotonic() < deadline, "no trouble was reported"
        await asyncio.sleep(TICK_S / 2)
    return troubles[0]


def test_a_dead_stage_is_reported_at_the_next_ping():
    async def scenario(watchdog, stages, troubles):
        stages[1].error = ActorUnavailableError("gone", None)
        trouble = await first(troubles)
        assert (trouble.kind, trouble.stage, trouble.reason) == ("died", 1, "stage 1 has died")
        assert not trouble.is_process_bad

    watch(scenario)


def test_a_stage_that_answers_as_another_process_has_died_in_between():
    async def scenario(watchdog, stages, troubles):
        stages[0].process = OTHER
        assert (await first(troubles)).kind == "died"

    watch(scenario)


def test_silence_is_a_complaint_first_and_trouble_later():
    async def scenario(watchdog, stages, troubles):
        stages[1].silent = True
        while watchdog.complaint() is None:
            assert not troubles
            await asyncio.sleep(TICK_S / 2)
        assert "stage 1 has not answered" in watchdog.complaint()
        trouble = await first(troubles)
        assert (trouble.kind, trouble.stage) == ("silent", 1) and trouble.is_process_bad
        assert watchdog.heartbeat_age_s >= 4 * TICK_S
        stages[1].silent = False
        watchdog.start()
        await ticks(3)
        assert watchdog.complaint() is None and watchdog.heartbeat_age_s < 4 * TICK_S

    watch(scenario)


def test_pings_that_fail_for_another_reason_are_silence():
    async def scenario(watchdog, stages, troubles):
        stages[1].error = RuntimeError("the store is full")
        trouble = await first(troubles)
        assert (trouble.kind, trouble.stage) == ("silent", 1) and trouble.is_process_bad

    watch(scenario)


def test_silence_is_counted_in_own_ticks():
    async def scenario(watchdog, stages, troubles):
        stages[0].silent = True
        await ticks(1)
        time.sleep(30 * TICK_S)  # the whole process stands still, but that is no silence
        await ticks(1)
        assert not troubles and watchdog._stages[0].missed <= UNHEALTHY_TICKS
        await ticks(DEAD_TICKS + 6)
        assert troubles[0].kind == "silent"

    watch(scenario)


def test_a_step_that_does_not_end_is_stuck():
    async def scenario(watchdog, stages, troubles):
        stages[0].compute(5.0)
        trouble = await first(troubles)
        assert (trouble.kind, trouble.stage) == ("stuck", 0) and "in one step" in trouble.reason

    watch(scenario)


def test_a_long_step_is_not_stuck_when_the_warm_up_had_long_ones():
    async def scenario(watchdog, stages, troubles):
        watchdog.learn(2 * TICK_S)  # so it may take twenty times as long: 40 ticks
        stages[0].compute(5.0)
        await ticks(25)
        assert not troubles
        assert (await first(troubles)).kind == "stuck"

    watch(scenario)


def test_chunks_that_grow_slowly_are_learned_from():
    async def scenario(watchdog, stages, troubles):
        for length in (4, 8, 16, 30):  # ticks; the last ones are longer than what would be a hang at first
            for count in range(length):
                stages[0].compute((count + 1) * TICK_S)
                await ticks(1)
            stages[0].num_steps += 1
            stages[0].compute(0.0)
            await ticks(1)
        assert not troubles and watchdog.longest_s >= 10 * TICK_S

    watch(scenario)


def test_a_burst_is_many_short_steps():
    async def scenario(watchdog, stages, troubles):
        for _ in range(40):
            stages[0].num_steps += 3
            stages[0].compute(TICK_S / 3)
            await ticks(1)
        assert not troubles

    watch(scenario)


def test_stages_that_all_wait_though_plans_are_under_way_are_stalled():
    async def scenario(watchdog, stages, troubles):
        trouble = await first(troubles)
        assert (trouble.kind, trouble.stage) == ("stalled", None)

    watch(scenario, is_busy=lambda: True)


def test_an_idle_engine_is_not_stalled():
    async def scenario(watchdog, stages, troubles):
        await ticks(30)
        assert not troubles and watchdog.complaint() is None

    watch(scenario)


def test_answers_after_the_stop_are_ignored():
    async def scenario(watchdog, stages, troubles):
        watchdog.stop()
        stages[0].error = ActorUnavailableError("gone", None)
        await ticks(5)
        assert not troubles

    watch(scenario)
