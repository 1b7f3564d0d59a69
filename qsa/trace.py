"""What stages did when: their spans as a Chrome trace (chrome://tracing, Perfetto), and as shares of the time.

A trace is a list of spans a stage, as `Engine.take_trace` gives it. All functions are pure but `write_trace`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qsa.actors.stage_clock import BUSY, TRANSFER, Span

Trace = Sequence[Sequence[Span]]
Interval = tuple[float, float]  # begin and end, in seconds


@dataclass(frozen=True)
class StageShare:
    """How a stage spent `seconds`, as shares of them. `wait`: for other stages' data; `idle`: nothing was asked of it."""

    seconds: float
    busy: float
    transfer: float
    wait: float

    @property
    def idle(self) -> float:
        return max(0.0, 1.0 - self.busy - self.transfer - self.wait)


def work_window(trace: Trace, kind: str) -> Interval | None:
    """From the begin of the first span of this kind (`chunk`: prefill, `compute`: decode) to the last end, of all stages."""
    found = [span for spans in trace for span in spans if span.kind == kind]
    return (min(span.begin_s for span in found), max(span.end_s for span in found)) if found else None


def stage_share(spans: Sequence[Span], window: Interval) -> StageShare:
    """What a stage did in the window. A moment counts once: for computing before transfer, and for that before waiting."""
    length = window[1] - window[0]
    if length <= 0:
        return StageShare(0.0, 0.0, 0.0, 0.0)
    busy = _union(_clipped(spans, BUSY, window))
    moved = _union([*busy, *_clipped(spans, TRANSFER, window)])
    waited = _union([*moved, *_clipped(spans, ("wait",), window)])
    sums = [sum(end - begin for begin, end in part) for part in (busy, moved, waited)]
    return StageShare(length, sums[0] / length, (sums[1] - sums[0]) / length, (sums[2] - sums[1]) / length)


def shares_table(trace: Trace, phases: Sequence[tuple[str, Interval]]) -> list[tuple[str, ...]]:
    """Lines of a table: phase, stage, seconds, busy, transfer, wait, idle; the first one is the header."""
    rows: list[tuple[str, ...]] = [("phase", "stage", "time", "busy", "transfer", "wait", "idle")]
    for phase, window in phases:
        for stage, spans in enumerate(trace):
            share = stage_share(spans, window)
            parts = (f"{part:.1%}" for part in (share.busy, share.transfer, share.wait, share.idle))
            rows.append((phase, str(stage), f"{share.seconds:.3f} s", *parts))
    return rows


def name_waits(spans: Sequence[Span]) -> list[Span]:
    """A following stage does not know what it waits for: it was the step that it computes next."""
    ordered = sorted(spans, key=lambda span: span.begin_s)
    following: Span | None = None
    named = []
    for span in reversed(ordered):
        if span.kind in BUSY:
            following = span
        elif span.kind == "wait" and span.lane < 0:
            found = following is not None and following.kind == "compute"
            span = replace(span, lane=following.lane if found else 0, step=following.step if found else -1)  # type: ignore[union-attr]
        named.append(span)
    return named[::-1]


def span_name(span: Span) -> str:
    """What the row of a trace shows."""
    if span.kind == "chunk":
        return f"chunk {span.step}"
    if span.step < 0:
        return span.kind
    place = f"lane {span.lane} step {span.step}"
    return place if span.kind == "compute" else f"{span.kind} {place}"


def chrome_trace(trace: Trace, labels: Sequence[str] = ()) -> dict[str, Any]:
    """The trace in Chrome's JSON format: a process a stage, with a row of computing and one a lane of transfers and waits.

    Arrows lead from a stage's step to the next stage's. Times are microseconds since the first span.
    labels: what a process's name has after its number.
    """
    begins = [span.begin_s for spans in trace for span in spans]
    zero = min(begins, default=0.0)
    events: list[dict[str, Any]] = []
    for stage, spans in enumerate(trace):
        label = f"stage {stage}" + (f": {labels[stage]}" if stage < len(labels) else "")
        rows = {0: "computing"}
        events.append({"ph": "M", "name": "process_name", "pid": stage, "args": {"name": label}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": stage, "args": {"sort_index": stage}})
        for span in name_waits(spans):
            row = 0 if span.kind in BUSY else 1 + max(0, span.lane)
            rows.setdefault(row, f"lane {row - 1}: transfers and waits")
            where = {"pid": stage, "tid": row, "ts": (span.begin_s - zero) * 1e6, "dur": span.seconds * 1e6}
            place = {"lane": span.lane, "step": span.step}
            events.append({"ph": "X", "name": span_name(span), "cat": span.kind, **where, "args": place})
        for row, name in sorted(rows.items()):
            events.append({"ph": "M", "name": "thread_name", "pid": stage, "tid": row, "args": {"name": name}})
            events.append({"ph": "M", "name": "thread_sort_index", "pid": stage, "tid": row, "args": {"sort_index": row}})
    events += _arrows(trace, zero)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(path: str | Path, trace: Trace, labels: Sequence[str] = ()) -> None:
    """Write the trace where chrome://tracing and ui.perfetto.dev can open it.

    Raises:
        OSError: it cannot be written there.
    """
    Path(path).write_text(json.dumps(chrome_trace(trace, labels)), encoding="utf-8")


def read_trace(path: str | Path) -> list[list[Span]]:
    """The spans of a file that `write_trace` wrote, a list a stage; times begin at zero."""
    stages: dict[int, list[Span]] = {}
    for event in json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]:
        if event["ph"] == "X":
            begin_s, place = event["ts"] / 1e6, event["args"]
            span = Span(event["cat"], place["lane"], place["step"], begin_s, begin_s + event["dur"] / 1e6)
            stages.setdefault(event["pid"], []).append(span)
    return [stages.get(stage, []) for stage in range(max(stages, default=-1) + 1)]


def _arrows(trace: Trace, zero: float) -> Iterator[dict[str, Any]]:
    """Flow events between the spans of the same step on neighbouring stages."""
    steps = [{(s.kind, s.lane, s.step): s for s in spans if s.kind in ("compute", "chunk")} for spans in trace]
    number = 0
    for stage, (here, there) in enumerate(itertools.pairwise(steps)):
        for key, span in here.items():
            if key in there:
                number += 1
                common = {"name": "hidden states", "cat": "transfer", "id": number, "tid": 0}
                yield {"ph": "s", "pid": stage, "ts": (span.end_s - zero) * 1e6, **common}
                yield {"ph": "f", "bp": "e", "pid": stage + 1, "ts": (there[key].begin_s - zero) * 1e6, **common}


def _clipped(spans: Sequence[Span], kinds: Sequence[str], window: Interval) -> list[Interval]:
    cut = ((max(span.begin_s, window[0]), min(span.end_s, window[1])) for span in spans if span.kind in kinds)
    return [(begin, end) for begin, end in cut if end > begin]


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged
