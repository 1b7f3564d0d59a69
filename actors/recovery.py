"""Recovery: after a stage was lost, all of them are made ready for a new epoch. Survivors keep their weights.

    a survivor        is told that nothing will come any more, then closes its slots behind the step it is in
    the lost one      is ended if its process is still there; Ray starts it again, with nothing loaded; it loads and warms up
    all of them       get a new link

All stages at the same time. Whatever goes wrong on the way, such as another death, makes one more round of the same.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from qsa.actors.process import ProcessId, end_process
from qsa.actors.ray_errors import describe, is_actor_death, is_final_death, original_error
from qsa.actors.telemetry import StagePing
from qsa.actors.watchdog import DEAD_TICKS, Trouble
from qsa.errors import BudgetError, EngineDeadError, QSAError

CONTROL = {"concurrency_group": "control"}
MAX_RECOVERIES = 6  # in a row, without a step in between
MOST_ASKED = 30  # pings of one stage under way
ROUNDS = 6  # of one recovery
ASKED, STARTING = "asked", "being started"
NOT_THERE = (ASKED, STARTING)  # of a stage that has not answered
NO_ROOM_TICKS = 2  # a stage without a place is believed when it has none twice: between two nodes it has none for a moment

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RecoveryLimits:
    """How long things may take, in seconds.

    Attributes:
        total_s: a whole recovery: `pipeline.start_timeout_s`.
        reset_s: the step that a survivor is in, and what of older plans is queued behind it.
        link_s:  linking the stages.
        silent_s: no answer to pings from a process that runs; loading_silent_s: from one that loads or warms up, where a
                  library may hold the interpreter for long; starting_s: from one that Ray is starting.
        ask_s:   between two pings of a stage that is waited for.
        memory_s: until a dead process's memory is free again.
    """

    total_s: float = 600.0
    reset_s: float = 8.0
    link_s: float = 60.0
    silent_s: float = float(DEAD_TICKS)
    loading_silent_s: float = 30.0
    starting_s: float = 60.0
    ask_s: float = 0.1
    memory_s: float = 10.0


class _Lost(Exception):
    """A stage's process is gone, or of no use. `has_ended`: it is gone, so nothing needs to be killed."""

    def __init__(self, stage: int, reason: str, *, has_ended: bool) -> None:
        super().__init__(reason)
        self.stage, self.has_ended = stage, has_ended


class Recovery:
    """Brings stages back. The state: what it is doing, and how often it has done so in vain.

    Attributes:
        loads:   arguments of each stage's `load`; set them before the first recovery.
        seconds: of the last recovery.
        count:   recoveries that have succeeded.
    """

    def __init__(
        self,
        stages: Sequence[Any],
        link: Callable[[], Awaitable[Any]],
        processes: dict[int, ProcessId],
        limits: RecoveryLimits | None = None,
        *,
        why_no_room: Callable[[int], str | None] = lambda _: None,
        on_no_room: Callable[[str], None] = lambda _: None,
    ) -> None:
        """
        Args:
            stages:    actor handles that stay the same when a process is started again.
            link:      gives all stages a new link; raises when one cannot be reached.
            processes: which process each stage is, shared with the watchdog.
            why_no_room: why no node can take a stage that is to be started; None when one can. Called in a thread.
            on_no_room:  called with that reason when nobody can say how long it will take: until there is another node.
        """
        self._stages, self._link = list(stages), link
        self.loads: Sequence[tuple[Any, ...]] = ()
        self._processes, self._limits = processes, limits or RecoveryLimits()
        self._in_a_row = 0
        self._trouble: Trouble | None = None
        self._doing: dict[int, str] = {}
        self._why_no_room, self._on_no_room = why_no_room, on_no_room
        self._no_room: dict[int, str] = {}
        self.seconds, self.count = 0.0, 0

    @property
    def reason(self) -> str | None:
        """What is being done, for people who wait; None when nothing is."""
        if self._trouble is None:
            return None
        doing = "; ".join(
            f"stage {stage} is {'waiting for a node: ' + self._no_room[stage] if stage in self._no_room else what}"
            for stage, what in sorted(self._doing.items())
            if what != "ready"
        )
        return f"recovering: {self._trouble.reason}; {doing or 'stages are being linked'}"

    @property
    def has_no_room(self) -> bool:
        """A stage waits for a node that is not there."""
        return bool(self._no_room)

    def completed_step(self) -> None:
        """A step has come back from all stages: the recoveries so far were not in vain."""
        self._in_a_row = 0

    def run(self, trouble: Trouble, new_epoch: Callable[[], int], step_s: float = 0.0) -> Awaitable[None]:
        """Make all stages ready; `reason` says so from now on.

        Args:
            new_epoch: begins a new epoch, once a round.
            step_s:    a step of a survivor may take so long.

        Raises:
            EngineDeadError: it cannot be done.
        """
        self._trouble = trouble
        return self._run(trouble, new_epoch, self._limits.reset_s + step_s)

    async def _run(self, trouble: Trouble, new_epoch: Callable[[], int], reset_s: float) -> None:
        began, limits = time.monotonic(), self._limits
        self._in_a_row += 1
        if self._in_a_row > MAX_RECOVERIES:
            self._trouble = None
            raise EngineDeadError(f"{trouble.reason}, {MAX_RECOVERIES} times in a row without a step in between")
        logger.warning("recovery begins: %s", trouble.reason)
        looking = asyncio.ensure_future(self._look_for_room())
        try:
            async with asyncio.timeout(limits.total_s):
                await self._run_rounds(trouble, new_epoch, reset_s)
        except TimeoutError:
            raise EngineDeadError(f"{self.reason}, and was not done after {limits.total_s:g} s") from None
        finally:
            looking.cancel()
            self._trouble = None
            self._doing.clear()
            self._no_room.clear()
            self.seconds = time.monotonic() - began
        self.count += 1
        logger.warning("recovery done after %.1f s: %s", self.seconds, trouble.reason)

    async def _run_rounds(self, trouble: Trouble, new_epoch: Callable[[], int], reset_s: float) -> None:
        useless = {trouble.stage} if trouble.is_process_bad else set[int | None]()
        for round_ in range(ROUNDS):
            epoch = new_epoch()
            self._doing = dict.fromkeys(range(len(self._stages)), ASKED)
            tasks = [
                asyncio.ensure_future(self._make_ready(stage, epoch, reset_s, is_useless=stage in useless))
                for stage in range(len(self._stages))
            ]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
            try:
                await self._guard_all(self._link())
                return
            except Exception as error:
                reason = describe(error)
                logger.warning("the stages could not be linked: %s", reason)
                if isinstance(error, _Lost) and not error.has_ended:
                    useless = {error.stage}
                elif isinstance(error, _Lost) or is_actor_death(error):  # who has died shows at the next round
                    useless = set()
                else:  # nobody has died: a link that fails twice needs new processes
                    useless = set(range(len(self._stages))) if round_ else set()
        raise EngineDeadError(f"{trouble.reason}, and the stages could not be linked again: {reason}")

    async def _look_for_room(self) -> None:
        """Find out whether stages that do not answer can be started."""
        ticks: dict[int, int] = {}
        while True:
            await asyncio.sleep(5 * self._limits.ask_s)
            for stage, doing in list(self._doing.items()):
                reason = None
                try:
                    reason = await asyncio.to_thread(self._why_no_room, stage) if doing in NOT_THERE else None
                except Exception as error:  # it is only for people who wait
                    logger.warning("it is not known whether a node has room for stage %d: %s", stage, describe(error))
                ticks[stage] = ticks.get(stage, 0) + 1 if reason is not None else 0
                if reason is None or self._doing.get(stage) not in NOT_THERE:
                    self._no_room.pop(stage, None)
                elif ticks[stage] >= NO_ROOM_TICKS and self._no_room.get(stage) != reason:
                    logger.warning("stage %d cannot be started: %s", stage, reason)
                    self._no_room[stage] = reason
                    self._on_no_room(f"stage {stage} cannot be started again: {reason}")

    # one stage

    async def _make_ready(self, stage: int, epoch: int, reset_s: float, *, is_useless: bool) -> None:
        """Bring a stage to: loaded, warm, no slot open, no link."""
        has_ended = False
        ended: ProcessId | None = None
        if is_useless:
            ended, has_ended = self._processes.get(stage), True
            await self._end(stage)
        for _ in range(ROUNDS):
            try:
                ping = await self._wait_for_answer(stage, ended, self._limits.starting_s if has_ended else None)
                self._processes[stage] = ping.process
                if not ping.is_loaded:
                    await self._load(stage)
                await self._reset(stage, epoch, reset_s)
                self._note(stage, "ready")
                return
            except _Lost as lost:
                logger.warning("stage %d: %s", stage, lost)
                ended = self._processes.get(stage)
                if not lost.has_ended:
                    await self._end(stage)
                has_ended = True
        raise EngineDeadError(f"stage {stage} was started {ROUNDS} times and lost each time")

    async def _wait_for_answer(self, stage: int, ended: ProcessId | None, starting_s: float | None) -> StagePing:
        """The first answer of the stage's process, whichever it is, but not of one that has been ended.

        starting_s: how long Ray may take to start it; None: it is thought to be there. A call that meets the actor between
        two processes fails, and only after a second or two; so the stage is asked often, and what fails is not waited for.
        """
        self._note(stage, STARTING if starting_s is not None else ASKED)
        handle, limits, asked = self._stages[stage], self._limits, set[asyncio.Future[StagePing]]()
        waited_s, limit_s = 0.0, limits.silent_s if starting_s is None else starting_s
        try:
            while waited_s < limit_s:
                if len(asked) < MOST_ASKED:
                    asked.add(_future(handle.ping.options(**CONTROL).remote()))
                done, asked = await asyncio.wait(asked, timeout=limits.ask_s, return_when=asyncio.FIRST_COMPLETED)
                for answer in done:
                    error = answer.exception()
                    if error is None and answer.result().process != ended:
                        return answer.result()
                    if error is not None and is_final_death(error):
                        raise EngineDeadError(f"stage {stage} was ended for good, so Ray does not start it again")
                    if error is not None and is_actor_death(error) and limit_s < limits.starting_s:
                        self._note(stage, STARTING)
                        limit_s = limits.starting_s
                if done:
                    await asyncio.sleep(limits.ask_s)
                if stage not in self._no_room:
                    waited_s += limits.ask_s
        finally:
            for answer in asked:
                answer.cancel()
        raise _Lost(stage, f"has not answered for {limit_s:g} s", has_ended=False)

    async def _load(self, stage: int) -> None:
        began = time.monotonic()
        self._note(stage, "loading")
        deadline = began + self._limits.memory_s
        handle, silent_s = self._stages[stage], self._limits.loading_silent_s
        while True:
            try:
                await self._guard(stage, handle.load.remote(*self.loads[stage]), None, silent_s)
                break
            except BudgetError as error:  # perhaps the dead process's memory is still being taken back
                if time.monotonic() > deadline:
                    raise EngineDeadError(f"stage {stage} could not be loaded again: {error}") from None
                await asyncio.sleep(5 * self._limits.ask_s)
            except QSAError as error:
                raise EngineDeadError(f"stage {stage} could not be loaded again: {error}") from None
        loaded = time.monotonic()
        self._note(stage, "warming up")
        try:
            await self._guard(stage, handle.warm_up.remote(), None, silent_s)
        except QSAError as error:
            raise EngineDeadError(f"stage {stage} could not be warmed up again: {error}") from None
        logger.warning(
            "stage %d: loaded again in %.1f s, warm after %.1f s more", stage, loaded - began, time.monotonic() - loaded
        )

    async def _reset(self, stage: int, epoch: int, limit_s: float) -> None:
        """Behind the step under way, which may wait for what will not come."""
        self._note(stage, "ending its step")
        handle = self._stages[stage]
        abandon = _future(handle.abandon.options(**CONTROL).remote(epoch))
        try:
            await self._guard(stage, handle.reset.remote(epoch), limit_s, self._limits.silent_s)
        except QSAError as error:
            raise _Lost(stage, f"cannot give up what it holds: {error}", has_ended=False) from None
        finally:
            abandon.cancel()

    async def _guard(self, stage: int, call: Awaitable[Any], limit_s: float | None, silent_s: float) -> Any:
        """The result of a call in the stage's step queue, as long as the stage answers pings beside it.

        Raises:
            QSAError: the call's own.
            _Lost:    the process is gone, silent for `silent_s`, or not done after `limit_s`, or raised what was not foreseen.
        """
        limits, handle = self._limits, self._stages[stage]
        tick_s = 10 * limits.ask_s
        result, ping = _future(call), _future(handle.ping.options(**CONTROL).remote())
        waited_s = missed_s = 0.0
        try:
            while True:
                await asyncio.wait({result}, timeout=tick_s)
                if result.done():
                    return result.result()
                waited_s += tick_s
                if ping.done() and ping.exception() is None:
                    if ping.result().process != self._processes.get(stage):
                        raise _Lost(stage, "has died", has_ended=True)
                    missed_s, ping = 0.0, _future(handle.ping.options(**CONTROL).remote())
                elif ping.done():
                    result.cancel()
                    ping.result()
                else:
                    missed_s += tick_s
                if missed_s >= silent_s:
                    raise _Lost(stage, f"has not answered for {missed_s:g} s", has_ended=False)
                if limit_s is not None and waited_s >= limit_s:
                    raise _Lost(stage, f"was still {self._doing.get(stage)} after {waited_s:g} s", has_ended=False)
        except _Lost:
            raise
        except Exception as error:
            cause = original_error(error)
            if isinstance(cause, QSAError):
                raise cause from None
            raise _Lost(stage, describe(error), has_ended=is_actor_death(error)) from None
        finally:
            result.cancel()
            ping.cancel()

    async def _guard_all(self, work: Awaitable[Any]) -> None:
        """Link the stages, as long as all of them answer; raises what that raises, and _Lost, and TimeoutError."""
        linking, limits = asyncio.ensure_future(work), self._limits

        async def end() -> None:
            await asyncio.wait({linking})

        stages = range(len(self._stages))
        guards = [asyncio.ensure_future(self._guard(stage, end(), None, limits.silent_s)) for stage in stages]
        try:
            async with asyncio.timeout(limits.link_s):
                await asyncio.gather(*guards)
            linking.result()
        finally:
            for guard in guards:
                guard.cancel()
            linking.cancel()

    async def _end(self, stage: int) -> None:
        """End a stage's process, so that Ray starts another one."""
        process = self._processes.get(stage)
        logger.warning("stage %d: %s is ended", stage, process or "its process")
        if not end_process(process):
            await asyncio.to_thread(_kill_actor, self._stages[stage])

    def _note(self, stage: int, what: str) -> None:
        self._doing[stage] = what
        if what not in NOT_THERE:
            self._no_room.pop(stage, None)


def _kill_actor(handle: Any) -> None:
    if not ray.is_initialized():  # `kill` would start a cluster
        return
    try:
        ray.kill(handle, no_restart=False)
    except Exception as error:  # it is being started anyway
        logger.debug("kill: %s", error)


def _future(call: Awaitable[Any]) -> asyncio.Future[Any]:
    """A call's result as a future that nobody needs to read."""

    async def answer() -> Any:
        return await call

    future = asyncio.ensure_future(answer())
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future
