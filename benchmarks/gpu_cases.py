"""One operator on a card: checked against its reference, tried with several launch parameters, timed inside a CUDA graph.

A case that fails says so and the others go on: time on a card is short.
"""

from __future__ import annotations

import statistics
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks import timing

SETS = 4  # sets of inputs that take turns, so that nothing is timed out of the L2 cache


@dataclass
class Case:
    """An operator with its inputs.

    Attributes:
        call:   (number of a set of inputs, launch parameters) -> result; called inside a graph.
        check:  result of set 0 -> error, the reference's own error in that type; None: nothing to compare with.
        tune:   launch parameters to try; the first is the default.
        bytes, flops: what one call must move or compute; 0: not counted.
        bar:    for microseconds.
    """

    name: str
    call: Callable[[int, dict[str, Any]], object]
    check: Callable[[Any], tuple[float, float]] | None = None
    tune: Sequence[dict[str, Any]] = ({},)
    bytes: float = 0.0
    flops: float = 0.0
    bar: str | None = None
    graph: bool = True
    sets: int = SETS


@dataclass
class Found:
    """What became of a case: `error` and `own_error` of its result, and how long a call takes in microseconds."""

    case: Case
    launch: dict[str, Any] = field(default_factory=dict)
    us: float = float("nan")
    spread: float = 0.0
    error: float = float("nan")
    own_error: float = float("nan")
    tried: list[tuple[dict[str, Any], float]] = field(default_factory=list)
    failure: str = ""

    @property
    def is_right(self) -> bool:
        return self.case.check is None or self.error <= 2 * self.own_error

    def row(self, copy_gb_s: float) -> dict[str, object]:
        gb_s = self.case.bytes / self.us / 1e3 if self.case.bytes else ""
        return {
            "operator": self.case.name,
            "median_us": self.us,
            "spread": self.spread,
            "gb_per_s": gb_s,
            "of_copy": gb_s / copy_gb_s if isinstance(gb_s, float) else "",
            "tflop_per_s": self.case.flops / self.us / 1e6 if self.case.flops else "",
            "error": self.error,
            "own_error": self.own_error,
            "launch": " ".join(f"{key}={value}" for key, value in self.launch.items()),
            "failure": self.failure,
        }


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is wanted; infinite where something is not finite."""
    if not torch.isfinite(got.float()).all():
        return float("inf")
    return float((got.double() - want.double()).norm() / want.double().norm())


def time_graph(call: Callable[[int], object], sets: int = SETS, repeat: int = 2, replays: int = 30) -> timing.Timing:
    """Microseconds a call, in a CUDA graph that calls every set `repeat` times."""
    for one in range(sets):
        call(one)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeat):
            for one in range(sets):
                call(one)
    return time_events(graph.replay, replays, repeat * sets)


def time_eager(call: Callable[[int], object], sets: int = SETS, repeat: int = 5) -> timing.Timing:
    """Microseconds a call, launched from Python: for calls far longer than a launch."""

    def every() -> None:
        for one in range(sets):
            call(one)

    every()
    return time_events(every, repeat, sets)


def time_events(run: Callable[[], object], replays: int, calls: int) -> timing.Timing:
    """Microseconds of one of the `calls` calls that `run` makes; the first fifth of the replays warms up."""
    runs = []
    for _ in range(replays + max(1, replays // 5)):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        runs.append(begin.elapsed_time(end) * 1e3 / calls)
    return timing.timing_of(runs[max(1, replays // 5) :])


def copy_rate() -> float:
    """GB/s of a device copy, read and write counted."""
    source, target = torch.randn(2, 1 << 28, device="cuda").unbind()
    runs = []
    for _ in range(10):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        runs.append(begin.elapsed_time(end))
    return 2 * source.nbytes / statistics.median(runs) / 1e6


def run_case(case: Case, tunes: bool) -> Found:
    """Try, check and time one case; what goes wrong is printed and kept in `failure`."""
    found = Found(case, dict(case.tune[0]))
    try:
        time = time_graph if case.graph else time_eager
        if tunes and len(case.tune) > 1:
            for launch in case.tune:
                try:
                    us = time(lambda one, launch=launch: case.call(one, launch), case.sets).median
                except torch.AcceleratorError:
                    raise
                except Exception as error:  # too much shared memory, say: the next one may fit
                    print(f"    {case.name} {launch}: {type(error).__name__}: {str(error)[:160]}", flush=True)
                    continue
                found.tried.append((launch, us))
            for launch, us in sorted(found.tried, key=lambda pair: pair[1])[:4]:
                print(f"    {case.name:28} {us:9.2f} us  {launch}", flush=True)
            found.launch = min(found.tried, key=lambda pair: pair[1])[0]
        if case.check is not None:
            found.error, found.own_error = case.check(case.call(0, found.launch))
        measured = time(lambda one: case.call(one, found.launch), case.sets)
        found.us, found.spread = measured.median, measured.spread
    except Exception as error:
        found.failure = f"{type(error).__name__}: {str(error)[:300]}"
        print("".join(traceback.format_exception(error)[-3:])[-900:], flush=True)
    return found


def show(found: Found, copy_gb_s: float) -> str:
    row = found.row(copy_gb_s)
    parts = [f"{found.case.name:30} {found.us:9.2f} us {found.spread:6.1%}"]
    if found.case.bytes:
        parts.append(f"{row['gb_per_s']:6.0f} GB/s {row['of_copy']:5.2f} of copy")
    if found.case.flops:
        parts.append(f"{row['tflop_per_s']:6.0f} TFLOP/s")
    if found.case.check is not None:
        parts.append(f"error {found.error:.1e} own {found.own_error:.1e}{'' if found.is_right else '  WRONG'}")
    parts.append(str(row["launch"]) if not found.failure else f"FAILED {found.failure}")
    return "  ".join(parts)
