"""A scripted stage in this process that dies, freezes, and is started again with nothing loaded, as Ray does with actors."""

from __future__ import annotations

import asyncio
import itertools
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from ray.exceptions import ActorUnavailableError
from scripted_stage import LocalStage, _LocalMethod, _LocalRef, build_scripted

from qsa.actors.process import ProcessId
from qsa.actors.stage import StageActor
from qsa.actors.stage_spec import StageSpec

_pids = itertools.count(1)


class MortalStage(LocalStage):
    """`die` and `freeze` are called from the event loop. Calls in flight then fail, a moment later, or never end."""

    STEPS: ClassVar = (*LocalStage.STEPS, "load", "warm_up")

    def __init__(self, spec: StageSpec, start_s: float = 0.02) -> None:
        self._spec, self.start_s = spec, start_s
        self.num_starts = 0
        self._begin()
        self.capacity = self.actor.load()

    def _begin(self) -> None:
        self.actor = StageActor(self._spec, build_scripted)
        self.process = ProcessId("", next(_pids), "")
        self.num_starts += 1
        self.calls: list[str] = []
        self._died: Future[None] = Future()
        self._is_frozen = False
        self._steps = ThreadPoolExecutor(1)
        self._groups = {group: ThreadPoolExecutor(2) for group in self.GROUPS}
        self._last: asyncio.Future[Any] | None = None
        for name in self.STEPS:
            setattr(self, name, _LocalMethod(partial(self._step, name)))
        for group, names in self.GROUPS.items():
            for name in names:
                setattr(self, name, _LocalMethod(partial(self._control, self._groups[group], name)))
        self.ping = _LocalMethod(partial(self._ping, self._groups["control"]))

    def die(self) -> None:
        """As `kill -9`: there is another process after `start_s`."""
        if not self._died.done():
            self._died.set_result(None)
            self._give_up_threads()
            asyncio.get_running_loop().call_later(self.start_s, self._begin)

    def freeze(self) -> None:
        """As SIGSTOP: nobody hears of it any more."""
        self._is_frozen = True

    def break_card(self) -> None:
        """As a card that has met a fault: it raises whatever it is asked for, until there is a new process."""

        def fault(*_: Any) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        steps = self.actor._steps
        assert steps is not None
        steps.compute = steps.settle = fault

    def _give_up_threads(self) -> None:
        self.actor.abandon(1 << 30)
        for pool in (self._steps, *self._groups.values()):
            pool.shutdown(wait=False)

    def _step(self, name: str, *arguments: Any) -> asyncio.Future[Any]:
        died = self._died
        call = None if died.done() else super()._step(name, *arguments)

        async def run() -> Any:
            lost = asyncio.wrap_future(died)
            await asyncio.wait({lost, call} if call is not None else {lost}, return_when=asyncio.FIRST_COMPLETED)
            if self._is_frozen and not died.done():
                await asyncio.wait({lost})
            if died.done():
                await asyncio.sleep(0.02)  # Ray does not know at once either
                raise ActorUnavailableError("the stage has died", None)
            return call.result()

        task = asyncio.ensure_future(run())
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    def _control(self, group: ThreadPoolExecutor, name: str, *arguments: Any) -> Any:
        answer: Future[Any] = Future()

        def finish(done: Future[Any]) -> None:
            if answer.done() or (self._is_frozen and not self._died.done()):
                return
            if self._died.done():
                answer.set_exception(ActorUnavailableError("the stage has died", None))
            elif done.exception() is not None:
                answer.set_exception(done.exception())
            else:
                answer.set_result(done.result())

        self._died.add_done_callback(finish)
        if not self._died.done():
            group.submit(getattr(self.actor, name), *arguments).add_done_callback(finish)
        return _LocalRef(answer)

    def _ping(self, group: ThreadPoolExecutor) -> Any:
        answer, process = self._control(group, "ping"), self.process

        async def ping() -> Any:
            return replace(await answer, process=process)

        return asyncio.ensure_future(ping())

    def close(self) -> None:
        self._give_up_threads()
        self.actor.close()
