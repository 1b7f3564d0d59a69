"""SchedulerSpec: the settings of a scheduler's process, as plain values that travel there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qsa.actors.watchdog import STUCK_S, TICK_S
from qsa.kernels.registry import SparseConfig
from qsa.scheduler.growth import StageCapacity
from qsa.scheduler.scheduler import Scheduler

LEASE_S = 30.0  # a client that has not polled for so long is gone, and its requests are aborted


@dataclass(frozen=True)
class SchedulerSpec:
    """The settings of a SchedulerActor; plain values. Names as in `Scheduler`.

    Attributes:
        vocab_size: token ids of a request must be below it.
        transport:  `pipeline.transport`; device: where the stages compute.
        lease_s:    a client that has not polled for so long is gone.
        tick_s:     of the watchdog; stuck_s: no step hangs before; start_timeout_s: nor does a recovery that takes less fail.
    """

    max_sequences: int
    max_waiting: int
    max_model_len: int
    prefill_chunk: int
    growth_horizon: int
    eos_token_ids: tuple[int, ...]
    lanes: int
    sparse: dict[int, SparseConfig]
    vocab_size: int
    default_sparse_id: int
    busy_chunk: int | None = None
    burst_steps: int = 32
    transport: str = "auto"
    device: str = "cpu"
    lease_s: float = LEASE_S
    tick_s: float = TICK_S
    stuck_s: float = STUCK_S
    start_timeout_s: float = 600.0

    def new_scheduler(self, capacities: Sequence[StageCapacity]) -> Scheduler:
        """One that knows of no request yet, over stages of these capacities."""
        return Scheduler(
            capacities,
            max_sequences=self.max_sequences,
            max_waiting=self.max_waiting,
            max_model_len=self.max_model_len,
            prefill_chunk=self.prefill_chunk,
            busy_chunk=self.busy_chunk,
            growth_horizon=self.growth_horizon,
            eos_token_ids=self.eos_token_ids,
            lanes=self.lanes,
            burst_steps=self.burst_steps,
            sparse=self.sparse,
        )
