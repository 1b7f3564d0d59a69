"""Flights: plans whose results are still to come, and which sequences they hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from qsa.scheduler.plan import BurstPlan, StepPlan, StepResult
from qsa.scheduler.sequence import SequenceState


@dataclass(frozen=True)
class ChunkFlight:
    """A chunk of a prompt under way."""

    plan: StepPlan
    sequence: SequenceState


@dataclass
class BurstFlight:
    """A burst under way. The state: how many steps of every lane have been answered, and who is still in it.

    Attributes:
        sequences:   everyone that the plan holds; they are busy until the burst ends.
        was_aborted: one of them was aborted since the burst began.
        has_chunk:   a chunk of a prompt was planned since.
        has_news:    a request has come since that may be admitted at once.
    """

    plan: BurstPlan
    sequences: tuple[SequenceState, ...]
    lanes: list[list[SequenceState]]
    num_steps: list[int] = field(init=False)
    was_aborted: bool = False
    has_chunk: bool = False
    has_news: bool = False

    def __post_init__(self) -> None:
        self.num_steps = [0] * len(self.lanes)


class Flights:
    """The state: chunks under way by step, and the burst under way."""

    def __init__(self) -> None:
        self.chunks: dict[int, ChunkFlight] = {}
        self.burst: BurstFlight | None = None

    def __len__(self) -> int:
        return len(self.chunks) + (self.burst is not None)

    def sequences(self) -> Iterator[SequenceState]:
        """Everyone in flight, once for each plan."""
        yield from (chunk.sequence for chunk in self.chunks.values())
        if self.burst is not None:
            yield from self.burst.sequences

    def ends(self) -> dict[int, int]:
        """Where the plans in flight take everyone at most, by the id of the sequence's state."""
        ends: dict[int, int] = {}
        for chunk in self.chunks.values():
            key = id(chunk.sequence)
            ends[key] = max(ends.get(key, 0), chunk.plan.items[0].end)
        if self.burst is not None:
            items = {item.request_id: item for lane in self.burst.plan.lanes for item in lane}
            for sequence in self.burst.sequences:
                ends[id(sequence)] = items[sequence.request_id].start + self.burst.plan.max_steps
        return ends

    def clear(self) -> None:
        self.chunks.clear()
        self.burst = None

    def take_chunk(self, step: int) -> ChunkFlight | None:
        """The chunk is no longer under way; None when it was not."""
        return self.chunks.pop(step, None)

    def take_burst(self, step: int) -> BurstFlight | None:
        """The burst is no longer under way; None when it was not."""
        burst = self.burst
        if burst is None or burst.plan.step != step:
            return None
        self.burst = None
        return burst

    def take_burst_step(self, result: StepResult) -> BurstFlight | None:
        """The burst that the result is the next one of, in its lane; None when there is none, as for a second result."""
        burst = self.burst
        if burst is None or not result.lane < len(burst.lanes):
            return None
        if result.step != burst.plan.step + burst.num_steps[result.lane]:
            return None
        burst.num_steps[result.lane] += 1
        return burst
