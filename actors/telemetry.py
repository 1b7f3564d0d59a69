"""What the engine says about itself: statistics of the scheduler and of every stage, and health. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from qsa.actors.process import ProcessId
from qsa.actors.stage_clock import BUSY, TRANSFER, StageClock
from qsa.memory.pool_stats import PoolStats
from qsa.scheduler.counters import SchedulerCounters


@dataclass(frozen=True)
class StageStats:
    """One stage now.

    Attributes:
        layers:       first layer and the one after the last.
        weight_bytes: bytes of the weights held.
        busy_s:       seconds of computing since it was ready; `steps` and `tokens`: how many these were.
        running_s:    how long the step under way has been running; 0 when idle.
        wait_s:       seconds of waiting for another stage's data within bursts.
        transfer_s:   seconds that packing, sending and unpacking took from it.
        idle_share:   `wait_s` in the sum of the three: the pipeline's bubble, as this stage sees it.
        in_flight:    what it has sent and the next stage has not taken yet: frames of bursts and chunks.
        sent_bytes:   of hidden states.
        transport:    how hidden states leave it; empty where there is nowhere to send them.
    """

    stage: int
    layers: tuple[int, int]
    device: str
    pid: int
    pool: PoolStats
    weight_bytes: int
    busy_s: float
    steps: int
    tokens: int
    running_s: float = 0.0
    wait_s: float = 0.0
    transfer_s: float = 0.0
    idle_share: float = 0.0
    in_flight: int = 0
    sent_bytes: int = 0
    transport: str = ""


class LinkStats(Protocol):
    """What a transport counts, of which this is read here."""

    @property
    def in_flight(self) -> int: ...


class Link(Protocol):
    """The part of a Transport that statistics need."""

    @property
    def name(self) -> str: ...
    @property
    def stats(self) -> LinkStats: ...


def stage_stats(
    clock: StageClock,
    link: Link | None,
    *,
    stage: int,
    layers: tuple[int, int],
    device: str,
    pid: int,
    pool: PoolStats,
    weight_bytes: int,
    steps: int,
    tokens: int,
    running_s: float,
    sent_bytes: int,
) -> StageStats:
    """A stage's statistics, with where its time went from its clock.

    Args:
        link:       its transport; None where nothing is connected.
        sent_bytes: over this and all earlier transports, which each begin at zero.
    """
    seconds = clock.seconds()
    busy_s, transfer_s, wait_s = sum(seconds[k] for k in BUSY), sum(seconds[k] for k in TRANSFER), seconds["wait"]
    total_s = busy_s + transfer_s + wait_s
    return StageStats(
        stage=stage,
        layers=layers,
        device=device,
        pid=pid,
        pool=pool,
        weight_bytes=weight_bytes,
        busy_s=busy_s,
        steps=steps,
        tokens=tokens,
        running_s=running_s,
        wait_s=wait_s,
        transfer_s=transfer_s,
        idle_share=wait_s / total_s if total_s else 0.0,
        in_flight=0 if link is None else link.stats.in_flight,
        sent_bytes=sent_bytes,
        transport="" if link is None else link.name,
    )


@dataclass(frozen=True)
class StagePing:
    """What a stage answers beside its steps.

    Attributes:
        running_s: how long the chunk or step under way has been computed; 0 while the stage waits.
        num_steps: done so far.
        is_loaded: a stage that was started again has nothing until it is told to load.
    """

    running_s: float
    num_steps: int
    process: ProcessId
    is_loaded: bool


@dataclass(frozen=True)
class SchedulerPing:
    """What the scheduler answers at any time.

    Attributes:
        has_begun: one that was started again knows of nothing until it is told to resume.
        longest_s: of the stages' steps so far, as far as it is known.
    """

    process: ProcessId
    has_begun: bool
    longest_s: float


@dataclass(frozen=True)
class WarmUpProgress:
    """How far a warm-up is. `total` may still grow; `what`: what is being done now, in a few words."""

    done: int = 0
    total: int = 0
    what: str = ""

    def __str__(self) -> str:
        return f"warming up {self.done}/{self.total}" + (f": {self.what}" if self.what else "")


@dataclass(frozen=True)
class StageStart:
    """What a stage computes with, once it is warm.

    Attributes:
        device:     the card's name, or cpu.
        operators:  of its attention, by name.
        num_graphs: CUDA graphs captured.
        warm_up_s:  seconds of its own warm-up.
    """

    stage: int
    layers: tuple[int, int]
    device: str
    backend: str
    operators: tuple[str, ...]
    num_graphs: int
    warm_up_s: float

    def __str__(self) -> str:
        first, last = self.layers
        return (
            f"stage {self.stage}: layers {first} to {last - 1} on {self.device}, backend {self.backend},"
            f" attention {', '.join(self.operators) or 'unknown'}; {self.num_graphs} graphs captured,"
            f" warm after {self.warm_up_s:.1f} s"
        )


@dataclass(frozen=True)
class EngineStats:
    """The whole engine now; every count begins at zero when the engine is ready.

    Attributes:
        recoveries: losses of stages that it has come back from.
        recovery_s: how long the last one took.
    """

    scheduler: SchedulerCounters
    stages: tuple[StageStats, ...]
    uptime_s: float
    recoveries: int = 0
    recovery_s: float = 0.0


@dataclass(frozen=True)
class Health:
    """Whether the engine can answer.

    Attributes:
        reason:          why it cannot: it is starting, recovers, or is dead.
        heartbeat_age_s: since all parts were last known to be alive.
        is_dead:         it will not come back by itself: a new engine must take its place.
    """

    ok: bool
    reason: str | None
    heartbeat_age_s: float
    is_dead: bool = False
