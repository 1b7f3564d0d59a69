"""Watchdog: knows whether every stage is alive, from pings beside the steps, without ever waiting for a step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from qsa.actors.ray_errors import describe, is_actor_death

TICK_S = 1.0
UNHEALTHY_TICKS = 3  # a stage that has not answered for so many ticks turns health red,
DEAD_TICKS = 6  # and for so many is given up: everybody who waits for it is told
STUCK_STEP_S = 600.0  # a single step that runs longer than this hangs


class Watchdog:
    """Pings each stage once a tick, one ping under way at most.

    Silence is counted in ticks of this process, not in seconds: when the whole machine stood still, answers that wait to
    be read do not look like silence.
    """

    def __init__(
        self,
        pings: Sequence[Callable[[], Awaitable[float]]],
        on_death: Callable[[str], None],
        *,
        tick_s: float = TICK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pings`: one a stage; each returns how long the stage's step has been running, in seconds."""
        self._pings, self._on_death, self._tick_s, self._clock = pings, on_death, tick_s, clock
        self._missed = [0] * len(pings)
        self._running_s = [0.0] * len(pings)
        self._asked: list[asyncio.Future[float] | None] = [None] * len(pings)
        self._heartbeat = clock()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def beat(self) -> None:
        """A step has come back from all stages: everything is alive."""
        self._heartbeat = self._clock()

    @property
    def heartbeat_age_s(self) -> float:
        return self._clock() - self._heartbeat

    def complaint(self) -> str | None:
        """Why the stages are not healthy; None when they are."""
        for stage, missed in enumerate(self._missed):
            if missed >= UNHEALTHY_TICKS:
                return f"stage {stage} has not answered for {missed * self._tick_s:.0f} s"
        return None

    async def _run(self) -> None:
        try:
            while True:
                for stage in range(len(self._pings)):
                    self._look_at(stage)
                if not any(self._missed):
                    self.beat()
                await asyncio.sleep(self._tick_s)
        except Exception as error:  # without a watchdog nobody would hear of a death
            self._on_death(f"the watchdog failed: {describe(error)}")

    def _look_at(self, stage: int) -> None:
        asked = self._asked[stage]
        if asked is not None and asked.done():
            error = asked.exception()
            if error is None:
                self._missed[stage], self._running_s[stage] = 0, asked.result()
                if self._running_s[stage] > STUCK_STEP_S:
                    self._on_death(f"stage {stage} has been in one step for {self._running_s[stage]:.0f} s")
            elif is_actor_death(error):
                self._on_death(f"stage {stage} has died")
            else:
                self._missed[stage] += 1
            asked = None
        if asked is None:
            self._asked[stage] = asyncio.ensure_future(self._pings[stage]())
            return
        self._missed[stage] += 1
        if self._missed[stage] == DEAD_TICKS:
            self._on_death(f"stage {stage} has not answered for {DEAD_TICKS * self._tick_s:.0f} s")
