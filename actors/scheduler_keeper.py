"""SchedulerKeeper: one thread that notices when the scheduler's process is lost, and brings its successor to work."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import ray

from qsa.actors.process import ProcessId, end_process
from qsa.actors.ray_errors import engine_error, is_actor_death, is_final_death, is_lost
from qsa.actors.telemetry import SchedulerPing
from qsa.errors import EngineDeadError, QSAError

MAX_LOSSES = 5  # in a row, each less than WORKS_S after it was brought back
WORKS_S = 10.0
EPOCHS = 1_000_000  # far more than a scheduler's process begins: those of its successor are newer

logger = logging.getLogger(__name__)


class Scheduler(Protocol):
    """The scheduler as the keeper sees it. Ray starts its process again by itself; the new one knows of nothing."""

    def ping(self, timeout_s: float) -> SchedulerPing:
        """Ask it; raises what Ray raises, and GetTimeoutError when there is no answer in time."""

    def end(self, process: ProcessId | None) -> None:
        """End a process that does not answer."""

    def resume(self, step_s: float) -> None:
        """Let a new process make the stages ready and take requests; blocks.

        step_s: the longest step that is known. Raises what Ray raises, and QSAError when it cannot be done.
        """


class RemoteScheduler:
    """The scheduler behind its actor handle."""

    def __init__(self, handle: Any, start_timeout_s: float) -> None:
        self._handle, self._start_timeout_s = handle, start_timeout_s
        self.arguments: tuple[Any, ...] = ()  # of `resume`, before those that the keeper and this class know
        self._num_resumed = 0

    def ping(self, timeout_s: float) -> SchedulerPing:
        ping: SchedulerPing = ray.get(self._handle.ping.remote(), timeout=timeout_s)
        return ping

    def end(self, process: ProcessId | None) -> None:
        if not end_process(process):
            with contextlib.suppress(Exception):  # it is gone already
                ray.kill(self._handle, no_restart=False)

    def resume(self, step_s: float) -> None:
        self._num_resumed += 1
        call = self._handle.resume.remote(*self.arguments, self._num_resumed * EPOCHS, step_s)
        ray.get(call, timeout=self._start_timeout_s)


@dataclass(frozen=True)
class KeeperEvents:
    """Who is told, in the keeper's thread: open requests are lost; the engine takes requests again; or never will."""

    on_lost: Callable[[str], None]
    on_back: Callable[[], None]
    on_dead: Callable[[str], None]


class SchedulerKeeper:
    """Asks the scheduler once a second. The state: whether it is there, and which process it is."""

    def __init__(
        self,
        scheduler: Scheduler,
        events: KeeperEvents,
        name: str,
        *,
        start_timeout_s: float = 600.0,
        tick_s: float = 1.0,
        dead_ticks: int = 6,
    ) -> None:
        """
        Args:
            start_timeout_s: how long bringing it back may take.
            dead_ticks:      after so many questions without an answer it is taken for dead.
        """
        self._scheduler, self._events, self._name = scheduler, events, name
        self._start_timeout_s, self._tick_s, self._dead_ticks = start_timeout_s, tick_s, dead_ticks
        self._wake = threading.Event()
        self._is_closed = self._is_asked = False
        self._thread: threading.Thread | None = None
        self._process: ProcessId | None = None
        self._longest_s = 0.0
        self._missed = self._num_losses = 0
        self._came_back_at = 0.0
        self.reason: str | None = None  # why no request is taken now; None while all is well

    @property
    def is_keeping(self) -> bool:
        return self._thread is not None and not self._is_closed

    def start(self) -> None:
        """Begin, when the scheduler takes requests."""
        self._thread = threading.Thread(target=self._run, name=f"{self._name} scheduler", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """A call has failed: ask at once, and say `on_back` also when nothing is wrong. From any thread."""
        self._is_asked = True
        self._wake.set()

    def close(self) -> None:
        """Do nothing more; the thread ends by itself. Calling it again does nothing."""
        self._is_closed = True
        self._wake.set()

    def _run(self) -> None:
        while not self._is_closed:
            is_asked, self._is_asked = self._is_asked, False
            trouble = self._find_trouble()
            if trouble is None and is_asked:
                if self._missed:
                    self._is_asked = True  # it is not known yet
                else:
                    self._events.on_back()
            elif trouble is not None and not self._is_closed:
                try:
                    self._bring_back(trouble)
                except Exception as error:
                    self._give_up(str(engine_error(error, "the scheduler")))
            self._wake.wait(self._tick_s)
            self._wake.clear()

    def _find_trouble(self) -> str | None:
        try:
            ping = self._scheduler.ping(self._tick_s)
        except Exception as error:
            if is_actor_death(error):
                return "the scheduler has died"
            if not is_lost(error):
                logger.warning("a ping of the scheduler failed: %s", error)
            self._missed += 1
            if self._missed < self._dead_ticks:
                return None
            self._scheduler.end(self._process)
            return f"the scheduler has not answered for {self._missed * self._tick_s:.0f} s"
        self._missed = 0
        if not ping.has_begun or (self._process is not None and ping.process != self._process):
            return "the scheduler has died"
        self._process, self._longest_s = ping.process, max(self._longest_s, ping.longest_s)
        return None

    def _bring_back(self, trouble: str) -> None:
        """Raises what makes it impossible."""
        began = time.monotonic()
        self._num_losses = 1 if began - self._came_back_at > WORKS_S else self._num_losses + 1
        self.reason = f"recovering: {trouble}"
        logger.warning("%s; open requests end, and it is started again", trouble)
        self._events.on_lost(trouble)
        if self._num_losses > MAX_LOSSES:
            self._give_up(f"{trouble}, {self._num_losses} times in a row")
            return
        while not self._is_closed:
            ping = self._wait_for_successor(began)
            if ping is None:
                self._give_up(f"{trouble}, and was not back after {self._start_timeout_s:g} s")
                return
            self._process = ping.process
            try:
                self._scheduler.resume(self._longest_s)
                break
            except Exception as error:
                if isinstance(error, QSAError) or not is_actor_death(error):
                    raise
                logger.warning("the scheduler has died again")
        if self._is_closed:
            return
        self._missed, self._came_back_at = 0, time.monotonic()
        self.reason = None
        self._events.on_back()
        logger.warning("the scheduler is back after %.1f s", time.monotonic() - began)

    def _wait_for_successor(self, began: float) -> SchedulerPing | None:
        """The answer of a process that has not begun; None when there is none in time.

        Raises:
            EngineDeadError: there will be none.
        """
        while time.monotonic() - began < self._start_timeout_s and not self._is_closed:
            try:
                ping = self._scheduler.ping(self._tick_s)
                if not ping.has_begun:
                    return ping
                self._scheduler.end(ping.process)  # it lives, but calls to it have been lost
            except Exception as error:
                if is_final_death(error):
                    raise EngineDeadError("the scheduler was ended for good, so Ray does not start it again") from None
                logger.debug("the scheduler is being started: %s", error)
            time.sleep(self._tick_s / 10)
        return None

    def _give_up(self, reason: str) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self.reason = reason
        logger.error("the engine is dead: %s", reason)
        self._events.on_dead(reason)
