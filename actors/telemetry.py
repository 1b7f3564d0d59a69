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
