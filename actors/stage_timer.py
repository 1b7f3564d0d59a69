"""StepTimer: times the decode steps of a burst, on the host, or on a card that works on while the host goes ahead."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from qsa.actors.stage_clock import StageClock

LEAST_GAP_S = 5e-6  # between two steps; below it the card did not wait


class StepTimer:
    """On the CPU a step takes as long as its call, and waiting is waiting."""

    def __init__(self, clock: StageClock) -> None:
        self._clock = clock

    def begin(self) -> None:
        """A burst begins."""

    def compute(self, lane: int, step: int) -> AbstractContextManager[Any]:
        return self._clock.span("compute", lane, step)

    def wait(self, lane: int, step: int) -> AbstractContextManager[Any]:
        return self._clock.span("wait", lane, step)

    def settle(self) -> None:
        """Count what has been done."""

    def anchor(self) -> None:
        """The device is idle now."""


@dataclass
class _Step:
    lane: int
    step: int
    begin: torch.cuda.Event
    end: torch.cuda.Event
    is_first: bool


class CardTimer(StepTimer):
    """Steps between two events each; what lies between two steps of a burst is waiting. Nobody waits for an event here.

    A card's clock is read against an event whose time the host knows: the last one at which the card was idle.
    """

    def __init__(self, clock: StageClock) -> None:
        super().__init__(clock)
        self._under_way: deque[_Step] = deque()
        self._spare: list[torch.cuda.Event] = []
        self._anchor: torch.cuda.Event | None = None
        self._anchor_s = 0.0
        self._is_first = True
        self._last_end_s = 0.0

    def anchor(self) -> None:
        self.settle()
        assert not self._under_way, "the card is not idle"
        if self._anchor is None:
            self._anchor = self._event()
        self._anchor.record()
        self._anchor.synchronize()
        self._anchor_s = time.time()

    def begin(self) -> None:
        self._is_first = True
        if self._anchor is None:
            self.anchor()

    @contextmanager
    def compute(self, lane: int, step: int) -> Iterator[None]:
        begin, end = self._event(), self._event()
        begin.record()
        try:
            yield
        finally:
            end.record()
            self._under_way.append(_Step(lane, step, begin, end, self._is_first))
            self._is_first = False

    def wait(self, lane: int, step: int) -> AbstractContextManager[Any]:
        return nullcontext()

    def settle(self) -> None:
        """Count the steps that the card has done."""
        while self._under_way and self._under_way[0].end.query():
            step = self._under_way.popleft()
            assert self._anchor is not None
            begin_s = self._anchor_s + self._anchor.elapsed_time(step.begin) / 1e3
            end_s = begin_s + step.begin.elapsed_time(step.end) / 1e3
            if not step.is_first and begin_s - self._last_end_s > LEAST_GAP_S:
                self._clock.add("wait", step.lane, step.step, self._last_end_s, begin_s)
            self._clock.add("compute", step.lane, step.step, begin_s, end_s)
            self._last_end_s = end_s
            self._spare += (step.begin, step.end)

    def _event(self) -> torch.cuda.Event:
        return self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)


def make_timer(clock: StageClock, device: torch.device) -> StepTimer:
    """The timer for a stage's device."""
    return CardTimer(clock) if device.type == "cuda" else StepTimer(clock)
