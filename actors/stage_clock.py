"""StageClock: what a stage does with its time, summed by kind, and span by span while someone traces.

A stage's step thread opens the spans; control threads read sums and traces. Seconds of a span that is opened inside another
one count for the inner kind alone, so the kinds never count a moment twice and their sum is the time under the clock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import msgpack

Kind = Literal["compute", "chunk", "sample", "wait", "send", "receive"]
KINDS: tuple[Kind, ...] = get_args(Kind)
BUSY: tuple[Kind, ...] = ("compute", "chunk", "sample")  # work of the model
TRANSFER: tuple[Kind, ...] = ("send", "receive")  # bytes between stages; waiting for them is `wait`
TRACE_SPANS = 200_000  # kept at most: minutes of decode, some tens of megabytes


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a stage's time, in seconds of `time.time()`, so that spans of several stages can be laid side by side.

    Attributes:
        kind: compute: one decode step of a lane; chunk: one prefill chunk; sample: choosing tokens; wait: for data of another
              stage in a burst; send, receive: packing, handing over and unpacking what travels between stages.
        step: number of the plan, or of the lane's step in a burst.
    """

    kind: Kind
    lane: int
    step: int
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


def pack_spans(spans: Sequence[Span]) -> bytes:
    """Spans as bytes to travel as: a full trace as objects would hold up each process on its way for seconds."""
    packed: bytes = msgpack.packb([(KINDS.index(s.kind), s.lane, s.step, s.begin_s, s.end_s) for s in spans])
    return packed


def unpack_spans(data: bytes) -> list[Span]:
    """The inverse of `pack_spans`."""
    return [Span(KINDS[kind], *place) for kind, *place in msgpack.unpackb(data)]


class StageClock:
    """Seconds a kind since the last `reset`, and the newest spans since `start_trace`."""

    def __init__(self) -> None:
        self._seconds: dict[Kind, float] = dict.fromkeys(KINDS, 0.0)
        self._trace: deque[Span] | None = None
        self._offset = 0.0  # from perf_counter to time.time
        self._inner_s = 0.0  # of the spans that ended inside the one that is open

    def span(self, kind: Kind, lane: int = 0, step: int = 0) -> _OpenSpan:
        """A context manager: the time inside it is of this kind, however it ends. Step thread only."""
        return _OpenSpan(self, kind, lane, step)

    def add(self, kind: Kind, lane: int, step: int, begin_s: float, end_s: float) -> None:
        """Count a span that was timed elsewhere, as on a card, in seconds of `time.time()`. Step thread only."""
        self._seconds[kind] += end_s - begin_s
        if self._trace is not None:
            self._trace.append(Span(kind, lane, step, begin_s, end_s))

    def seconds(self) -> dict[Kind, float]:
        """Seconds so far, all kinds. A span counts when it has ended. Any thread."""
        return dict(self._seconds)

    def reset(self) -> None:
        """Begin counting at zero. Any thread; a span that is open meanwhile counts whole."""
        self._seconds = dict.fromkeys(KINDS, 0.0)

    def start_trace(self, limit: int = TRACE_SPANS) -> None:
        """Keep the newest `limit` spans from now on; what an earlier trace kept is dropped. Any thread."""
        self._offset = time.time() - time.perf_counter()
        self._trace = deque(maxlen=limit)

    def take_trace(self) -> list[Span]:
        """The spans kept, in the order of their ends, and stop keeping them. Without `start_trace`: none. Any thread."""
        trace, self._trace = self._trace, None
        return [] if trace is None else list(trace.copy())  # copy is one C call: the step thread may hold `trace` still


class _OpenSpan:
    __slots__ = ("_begin", "_clock", "_kind", "_lane", "_outer_s", "_step")

    def __init__(self, clock: StageClock, kind: Kind, lane: int, step: int) -> None:
        self._clock, self._kind, self._lane, self._step = clock, kind, lane, step

    def __enter__(self) -> None:
        clock = self._clock
        self._outer_s, clock._inner_s = clock._inner_s, 0.0
        self._begin = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        end, clock = time.perf_counter(), self._clock
        elapsed = end - self._begin
        clock._seconds[self._kind] += elapsed - clock._inner_s
        clock._inner_s = self._outer_s + elapsed
        trace = clock._trace
        if trace is not None:
            offset = clock._offset
            trace.append(Span(self._kind, self._lane, self._step, self._begin + offset, end + offset))
