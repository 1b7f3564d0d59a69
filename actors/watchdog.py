"""Watchdog: knows whether every stage is alive and gets on, from pings beside the steps, without ever waiting for a step."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from qsa.actors.process import ProcessId
from qsa.actors.ray_errors import describe, is_actor_death
from qsa.actors.telemetry import StagePing

TICK_S = 1.0
UNHEALTHY_TICKS = 3  # a stage that has not answered for so many ticks turns health red,
DEAD_TICKS = 6  # and for so many is given up
STUCK_S = 8.0  # a step that runs longer hangs, unless steps of this engine are long:
STUCK_FACTOR = 20.0  # it must be so many times longer than any before

Kind = Literal["died", "silent", "stuck", "stalled", "broken"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trouble:
    """Why the stages cannot go on.

    Attributes:
        kind:   died: its process is gone; silent: it does not answer; stuck: it answers, but a step of it does not end;
                stalled: plans are under way and nobody computes; broken: a card has met a fault that only a new process mends.
        stage:  whose trouble it is; None: it is not known, or nobody's alone.
        reason: in words.
    """

    kind: Kind
    stage: int | None
    reason: str

    @property
    def is_process_bad(self) -> bool:
        """Whether the stage's process may still be there, but is of no use."""
        return self.stage is not None and self.kind in ("silent", "stuck", "broken")


@dataclass
class _Watched:
    """A stage as the watchdog sees it. `same_ticks`: for so many pings it has been in the step of `ping`."""

    asked: asyncio.Future[StagePing] | None = None
    ping: StagePing | None = None
    missed: int = 0
    same_ticks: int = 0

    @property
    def is_computing(self) -> bool:
        return self.ping is not None and self.ping.running_s > 0


class Watchdog:
    """Pings each stage once a tick, one ping under way at most.

    Silence and long steps are counted in ticks of this process, not in seconds: when the whole machine stood still,
    answers that wait to be read do not look like silence, nor does a step that stood still with it look like one that hangs.

    Attributes:
        longest_s: of the steps so far, as far as it is known: how long a step may take depends on it.
    """

    def __init__(
        self,
        pings: Sequence[Callable[[], Awaitable[StagePing]]],
        on_trouble: Callable[[Trouble], None],
        *,
        processes: dict[int, ProcessId] | None = None,
        is_busy: Callable[[], bool] = lambda: False,
        tick_s: float = TICK_S,
        stuck_s: float = STUCK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            pings:      one a stage.
            on_trouble: called in the event loop; the same trouble may be reported more than once.
            processes:  which process each stage is; what is not known is filled in here, and a stage that answers as
                        another one has died in between.
            is_busy:    whether plans are under way.
            stuck_s:    a step that runs for less is never taken for one that hangs.
        """
        self._pings, self._on_trouble, self._is_busy = list(pings), on_trouble, is_busy
        self._processes = {} if processes is None else processes
        self._tick_s, self._stuck_s, self._clock = tick_s, stuck_s, clock
        self._stages = [_Watched() for _ in self._pings]
        self._idle_ticks, self._idle_since = 0, tuple[object, ...]()
        self.longest_s = 0.0
        self._heartbeat = clock()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Watch, with nothing held against any stage. Again after `stop`."""
        self.stop()
        self._stages = [_Watched() for _ in self._pings]
        self._idle_ticks = 0
        self.beat()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        """Watch no more; answers that are still on their way are ignored."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        for watched in self._stages:
            if watched.asked is not None:
                watched.asked.cancel()
        self._stages = [_Watched() for _ in self._pings]

    def beat(self) -> None:
        """A step has come back from all stages: everything is alive."""
        self._heartbeat = self._clock()

    def learn(self, step_s: float) -> None:
        """A step took so long, and that was no hang."""
        self.longest_s = max(self.longest_s, step_s)

    @property
    def heartbeat_age_s(self) -> float:
        return self._clock() - self._heartbeat

    @property
    def step_limit_s(self) -> float:
        """A step that runs longer hangs."""
        return max(self._stuck_s, STUCK_FACTOR * self.longest_s)

    def complaint(self) -> str | None:
        """Why the stages are not healthy; None when they are."""
        for stage, watched in enumerate(self._stages):
            if watched.missed >= UNHEALTHY_TICKS:
                return f"stage {stage} has not answered for {watched.missed * self._tick_s:.0f} s"
        return None

    async def _run(self) -> None:
        try:
            while True:
                for stage in range(len(self._pings)):
                    self._ask(stage)
                if not any(watched.missed for watched in self._stages):
                    self.beat()
                    self._look_for_a_standstill()
                await asyncio.sleep(self._tick_s)
        except Exception as error:  # without a watchdog nobody would hear of a death
            logger.exception("the watchdog failed")
            self._on_trouble(Trouble("stalled", None, f"the watchdog failed: {describe(error)}"))

    def _ask(self, stage: int) -> None:
        watched = self._stages[stage]
        if watched.asked is None:
            asked = watched.asked = asyncio.ensure_future(self._pings[stage]())
            asked.add_done_callback(lambda done: self._take_answer(stage, watched, done))
            return
        self._miss(stage, watched)

    def _miss(self, stage: int, watched: _Watched) -> None:
        """There was no answer, or one that is none."""
        watched.missed += 1
        if watched.missed == DEAD_TICKS:
            self._report("silent", stage, f"has not answered for {DEAD_TICKS * self._tick_s:.0f} s")

    def _take_answer(self, stage: int, watched: _Watched, answer: asyncio.Future[StagePing]) -> None:
        """Read an answer when it comes, not at the next tick: a death is noticed a second earlier."""
        if answer.cancelled() or watched is not self._stages[stage]:
            return
        watched.asked = None
        error = answer.exception()
        if error is None:
            watched.missed = 0
            self._read(stage, watched, answer.result())
        elif is_actor_death(error):
            self._report("died", stage, "has died")
        else:
            self._miss(stage, watched)

    def _read(self, stage: int, watched: _Watched, ping: StagePing) -> None:
        if self._processes.setdefault(stage, ping.process) != ping.process:
            self._report("died", stage, "has died")
            return
        before = watched.ping
        watched.ping = ping
        if before is None or before.num_steps != ping.num_steps or not ping.running_s or not before.running_s:
            if before is not None:
                self.learn(before.running_s)
            watched.same_ticks = 0
            return
        watched.same_ticks += 1
        if watched.same_ticks * self._tick_s > self.step_limit_s:
            self._report("stuck", stage, f"has been in one step for {ping.running_s:.0f} s")

    def _look_for_a_standstill(self) -> None:
        """Stages that wait for each other, for a message that was lost, would do so for ever."""
        progress = tuple(None if w.ping is None else w.ping.num_steps for w in self._stages)
        if not self._is_busy() or progress != self._idle_since or any(w.is_computing for w in self._stages):
            self._idle_ticks, self._idle_since = 0, progress
            return
        self._idle_ticks += 1
        if self._idle_ticks * self._tick_s > self._stuck_s:
            self._idle_ticks = 0
            reason = f"no stage has computed anything for {self._stuck_s:.0f} s, though there is something to compute"
            self._on_trouble(Trouble("stalled", None, reason))

    def _report(self, kind: Kind, stage: int, what: str) -> None:
        self._on_trouble(Trouble(kind, stage, f"stage {stage} {what}"))
