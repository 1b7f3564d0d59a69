"""What the engine says about itself: statistics of the scheduler and of every stage, and health. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from qsa.memory.pool_stats import PoolStats
from qsa.scheduler.counters import SchedulerCounters


@dataclass(frozen=True)
class StageStats:
    """One stage now.

    Attributes:
        layers:       first layer and the one after the last.
        weight_bytes: bytes of the weights held.
        busy_s:       seconds spent in steps since it was ready; `steps` and `tokens`: how many these were.
        running_s:    how long the step under way has been running; 0 when idle.
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
    """The whole engine now; every count begins at zero when the engine is ready."""

    scheduler: SchedulerCounters
    stages: tuple[StageStats, ...]
    uptime_s: float


@dataclass(frozen=True)
class Health:
    """Whether the engine can answer. `heartbeat_age_s`: since all parts were last known to be alive."""

    ok: bool
    reason: str | None
    heartbeat_age_s: float
