"""Figures of a pipeline from its spans: the time of a round beside what the stages compute in it, and what transfers cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from qsa.actors.stage_clock import BUSY, Span
from qsa.trace import Interval, Trace


@dataclass(frozen=True)
class Rounds:
    """Decode steps of all lanes, one of each a round.

    Attributes:
        round_ms:    time from one round to the next, everything between bursts included.
        compute_ms:  what each stage computed in a round, on average.
        transfer_ms: of a round, how long a stage other than the first had nothing to do although its data was sent off.
        answer_ms:   the same of stage 0 and the last stage's answers.
    """

    num_rounds: int
    lanes: int
    round_ms: float
    compute_ms: tuple[float, ...]
    transfer_ms: float
    answer_ms: float

    @property
    def over_compute(self) -> float:
        """The round beside the slower stage's own compute in it; 1 is a pipeline that loses nothing."""
        return self.round_ms / max(self.compute_ms)

    @property
    def transfer_share(self) -> float:
        """Transfers in a round's time."""
        return self.transfer_ms / self.round_ms


def rounds_in(trace: Trace, window: Interval) -> Rounds:
    """Rounds of the decode steps that began in the window.

    Raises:
        ValueError: there are too few.
    """
    steps = [sorted(_of(spans, ("compute",), window), key=lambda span: span.begin_s) for spans in trace]
    first = steps[0]
    lanes = len({span.lane for span in first})
    if len(first) <= lanes or not all(steps):
        raise ValueError(f"no rounds in {window[1] - window[0]:.3f} s: the stages have {[len(part) for part in steps]} steps")
    num_rounds = (len(first) - 1) / lanes
    round_ms = (first[-1].begin_s - first[0].begin_s) / num_rounds * 1e3
    compute = tuple(sum(span.seconds for span in part) / len(part) * lanes * 1e3 for part in steps)
    lost = [_lost(trace, stage, window) / num_rounds * 1e3 for stage in range(1, len(trace))]
    answers = _lost_answers(trace, window) / num_rounds * 1e3
    return Rounds(int(num_rounds), lanes, round_ms, compute, sum(lost), answers)


def wait_share_of_prefill(trace: Trace, window: Interval) -> float:
    """Share of a prefill's time in which the last stage had no chunk to compute, after its first one.

    window: of the prefill, from its first chunk's begin on the first stage to its last one's end on the last.
    """
    chunks = sorted(_of(trace[-1], ("chunk",), window), key=lambda span: span.begin_s)
    gaps = (max(0.0, after.begin_s - before.end_s) for before, after in itertools.pairwise(chunks))
    return sum(gaps) / (window[1] - window[0])


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that `percent` of them do not exceed (nearest rank).

    Raises:
        ValueError: there are none.
    """
    if not values:
        raise ValueError("a percentile needs values")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def _of(spans: Sequence[Span], kinds: Sequence[str], window: Interval) -> list[Span]:
    return [span for span in spans if span.kind in kinds and window[0] <= span.begin_s < window[1]]


def _lost(trace: Trace, stage: int, window: Interval) -> float:
    """Seconds between the moment at which a step's data was computed, or the stage had become free if that was later, and
    the moment at which the stage began with it."""
    made = {(span.lane, span.step): span.end_s for span in trace[stage - 1] if span.kind == "compute"}
    return _lag(trace[stage], made, 0, window)


def _lost_answers(trace: Trace, window: Interval) -> float:
    """The same for the answers of the last stage, which a lane's next step on the first stage waits for."""
    if len(trace) < 2:
        return 0.0
    made = {(span.lane, span.step): span.end_s for span in trace[-1] if span.kind == "compute"}
    return _lag(trace[0], made, -1, window)


def _lag(spans: Sequence[Span], made: dict[tuple[int, int], float], offset: int, window: Interval) -> float:
    lost, free_at = 0.0, float("-inf")
    for span in sorted((span for span in spans if span.kind in BUSY), key=lambda span: span.begin_s):
        ready = made.get((span.lane, span.step + offset))
        if span.kind == "compute" and window[0] <= span.begin_s < window[1] and ready is not None:
            lost += max(0.0, span.begin_s - max(ready, free_at))
        free_at = span.end_s
    return lost
