"""CardClock: a StageClock whose decode steps are timed on the card, where they run after the host has launched them.

The host launches a step and goes on, to wait for other stages perhaps, while the card computes. So a span of `compute` lies
between two events on the card's stream, and of the host's waits and transfers only what lies beside the card's work counts:
that is when the card stood still. Spans of `chunk` and `sample` are the host's, which waits for the card at their end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from qsa.actors.stage_clock import TRANSFER, Kind, StageClock, _OpenSpan

NEW_ZERO_S = 5.0  # the card's clock is laid over the host's this often: its differences are float32 milliseconds
LAST_STEPS = 8  # that a host's span can overlap: two lanes have one under way each


class _CardSpan:
    """One step between two events."""

    __slots__ = ("begin", "clock", "end", "lane", "step")

    def __init__(self, clock: CardClock, lane: int, step: int) -> None:
        self.clock, self.lane, self.step = clock, lane, step

    def __enter__(self) -> None:
        self.begin = self.clock._record()

    def __exit__(self, *error: object) -> None:
        self.end = self.clock._record()
        self.clock._under_way.append(self)


class _HostSpan(NamedTuple):
    """Seconds of the host in which it waited or moved data; begin and end of `time.perf_counter()`."""

    kind: Kind
    begin: float
    end: float
    own_s: float


class CardClock(StageClock):
    """Like StageClock. A step of `compute` counts once it is known to have ended: when a later span of the host ends."""

    def __init__(self, make_event: Callable[[], Any] = lambda: torch.cuda.Event(enable_timing=True)) -> None:
        super().__init__()
        self._make_event = make_event
        self._events: list[Any] = []  # that may be used again
        self._under_way: deque[_CardSpan] = deque()
        self._steps: deque[tuple[float, float]] = deque(maxlen=LAST_STEPS)  # the last ones, of `time.perf_counter()`
        self._host: deque[_HostSpan] = deque()  # whose overlap with steps is not known yet
        self._zero: Any = None  # an event of the time `_zero_at`
        self._zero_at = 0.0

    def span(self, kind: Kind, lane: int = 0, step: int = 0) -> AbstractContextManager[None]:
        if kind != "compute":
            return super().span(kind, lane, step)
        if not self._under_way and time.perf_counter() - self._zero_at > NEW_ZERO_S:
            self._lay_over()
        return _CardSpan(self, lane, step)

    def _ended(self, span: _OpenSpan, end: float, own_s: float) -> None:
        if span.kind == "wait" or span.kind in TRANSFER:
            super()._ended(span, end, 0.0)
            self._host.append(_HostSpan(span.kind, span.begin, end, own_s))
        else:
            super()._ended(span, end, own_s)
        self._settle()

    def _settle(self) -> None:
        """Count the steps that have ended, and the host's spans beside which no other step can still turn out to lie."""
        under_way = self._under_way
        while under_way and under_way[0].end.query():
            step = under_way.popleft()
            begin, end = (self._zero_at + self._zero.elapsed_time(event) / 1e3 for event in (step.begin, step.end))
            self._events += step.begin, step.end
            self._steps.append((begin, end))
            offset = time.time() - time.perf_counter()
            self.add("compute", step.lane, step.step, begin + offset, end + offset)
        known_until = self._steps[-1][1] if under_way and self._steps else float("-inf" if under_way else "inf")
        while self._host and self._host[0].end <= known_until:
            kind, begin, end, own_s = self._host.popleft()
            beside = sum(max(0.0, min(end, there) - max(begin, here)) for here, there in self._steps)
            self._seconds[kind] += max(0.0, own_s - beside)

    def _record(self) -> Any:
        event = self._events.pop() if self._events else self._make_event()
        event.record()
        return event

    def _lay_over(self) -> None:
        """Find out what the host's clock says at an event. On a stream of its own, which waits for nothing."""
        self._zero = self._make_event()
        with _side_stream():
            self._zero.record()
        self._zero.synchronize()
        self._zero_at = time.perf_counter()


def _side_stream() -> AbstractContextManager[Any]:
    return torch.cuda.stream(torch.cuda.Stream() if torch.cuda.is_available() else None)
