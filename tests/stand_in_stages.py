"""Stages without a model behind an actor handle's interface, which die, freeze and raise as a test says, and start again."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from ray.exceptions import ActorUnavailableError

from qsa.actors.process import ProcessId
from qsa.actors.telemetry import StagePing

_pids = itertools.count(1)


class _Method:
    def __init__(self, start: Callable[..., Any]) -> None:
        self.remote = start

    def options(self, **_: Any) -> _Method:
        return self


class StandInStage:
    """One actor: calls in its step queue run one after another, control calls beside them.

    Set `frozen` to let it answer nothing, `stuck` to let its step queue stand still. `on_call(name)` may raise, or kill.
    """

    def __init__(self, start_s: float = 0.02) -> None:
        self.start_s = start_s
        self.calls: list[tuple[Any, ...]] = []
        self.num_starts = 0
        self.on_call: Callable[[str], Any] = lambda _: None
        self._begin()
        for name in ("load", "warm_up", "reset", "open_link", "connect"):
            setattr(self, name, _Method(lambda *arguments, name=name: self._call(self._queued, name, arguments)))
        for name in ("ping", "abandon"):
            setattr(self, name, _Method(lambda *arguments, name=name: self._call(self._beside, name, arguments)))

    def _begin(self) -> None:
        self.process = ProcessId("", next(_pids), "")
        self.is_loaded = self.frozen = self.stuck = False
        self.epoch = -1
        self.num_starts += 1
        self._died = asyncio.get_running_loop().create_future()
        self._queue = asyncio.Lock()
        self._starting: asyncio.Task[None] | None = None

    def die(self, *, comes_back: bool = True) -> None:
        """End the process; after `start_s` there is another one."""
        if self._starting is None:
            self._died.set_result(None)
            self._starting = (
                asyncio.ensure_future(self._start_again()) if comes_back else asyncio.ensure_future(asyncio.sleep(0))
            )

    async def _start_again(self) -> None:
        await asyncio.sleep(self.start_s)
        self._begin()

    def _call(self, run: Any, name: str, arguments: tuple[Any, ...]) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._until_death(run, name, arguments))

    async def _until_death(self, run: Any, name: str, arguments: tuple[Any, ...]) -> Any:
        died = self._died
        work = asyncio.ensure_future(run(name, arguments))
        try:
            await asyncio.wait({work, died}, return_when=asyncio.FIRST_COMPLETED)
            if died.done():
                await asyncio.sleep(0.02)  # Ray takes longer to say so
                raise ActorUnavailableError("the stand-in has died", None)
            return work.result()
        finally:
            work.cancel()

    async def _queued(self, name: str, arguments: tuple[Any, ...]) -> Any:
        async with self._queue:
            while self.stuck or self.frozen:
                await asyncio.sleep(0.002)
            result = self._do(name, arguments)
            while self.frozen:  # since this call
                await asyncio.sleep(0.002)
            return result

    async def _beside(self, name: str, arguments: tuple[Any, ...]) -> Any:
        while self.frozen:
            await asyncio.sleep(0.002)
        await asyncio.sleep(0)
        return self._do(name, arguments)

    def _do(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if name == "ping":
            return StagePing(0.0, 0, self.process, self.is_loaded)
        self.calls.append((name, *arguments))
        self.on_call(name)
        if name == "load":
            self.is_loaded = True
        elif name == "reset":
            if not self.is_loaded:
                raise RuntimeError("nothing is loaded")
            self.epoch = arguments[0]
        return f"address {self.process.pid}" if name == "open_link" else None

    @property
    def names(self) -> list[str]:
        return [call[0] for call in self.calls]
