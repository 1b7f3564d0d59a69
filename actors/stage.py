"""StageActor: one run of layers with its KV pool, as a process that computes step after step."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from qsa.actors.stage_spec import StageSpec
from qsa.actors.telemetry import StageStart, StageStats, WarmUpProgress
from qsa.scheduler.growth import StageCapacity
from qsa.scheduler.plan import StepPlan, StepResult

if TYPE_CHECKING:
    from qsa.actors.stage_steps import ModelBuilder, StageSteps
    from qsa.actors.transport import HiddenMessage
    from qsa.memory.budget import CardMemory


class StageActor:
    """Layers [first_layer, last_layer) and their K and V. Steps run one at a time, in the order of their calls.

    A plain class, so that a test can build it in-process. As an actor, `ping`, `progress`, `stats` and `reset_stats` run
    beside a step in the concurrency group `control`; they read counters only.
    """

    def __init__(self, spec: StageSpec, build: ModelBuilder | None = None) -> None:
        self._spec, self._build = spec, build
        self._steps: StageSteps | None = None
        self._last_step = (-1, 0)  # epoch, step
        self._step_began: float | None = None
        self._progress = WarmUpProgress()
        self._busy_s, self._num_steps, self._num_tokens = 0.0, 0, 0

    def __repr__(self) -> str:
        s = self._spec
        return f"Stage{s.stage}(layers {s.first_layer} to {s.last_layer - 1}, {s.device})"

    # The scheduler has handles of this class, so its process imports this file: without torch, thanks to the imports below.

    def look_at_card(self) -> CardMemory:
        """What the stage's card has free, before anything is planned for it.

        Raises:
            ConfigError: there is none.
        """
        from qsa.actors.stage_steps import look_at_card  # noqa: PLC0415

        return look_at_card(self._spec)

    def load(self, num_chunks: int | None = None) -> StageCapacity:
        """Read the weights and allocate the KV pool; not in `__init__`, where Ray would lose the error's type.

        num_chunks: of the pool, where it was not known when the stage was started.

        Raises:
            QSAError: the model or the memory is not there.
        """
        from qsa.actors.stage_steps import StageSteps, build_model  # noqa: PLC0415

        if num_chunks is not None:
            self._spec = replace(self._spec, num_chunks=num_chunks)
        self._steps = StageSteps(self._spec, self._build or build_model)
        return self._steps.capacity()

    def warm_up(self) -> StageStart:
        """Do everything that happens once, before the first step; `progress` tells how far it is.

        Raises:
            QSAError: it cannot be done, for want of memory.
        """
        return self._loaded().warm_up(self._note_progress)

    def _note_progress(self, done: int, total: int, what: str) -> None:
        self._progress = WarmUpProgress(done, total, what)

    def forward(self, data: bytes, message: HiddenMessage | None) -> HiddenMessage | StepResult:
        """Run this stage's part of a step.

        Args:
            data:    a StepPlan's bytes.
            message: what the stage before returned for the same plan; None on the first stage.

        Returns:
            The message for the next stage; on the last stage, the step's result.
        """
        steps = self._loaded()
        began = self._step_began = time.perf_counter()
        try:
            plan = StepPlan.from_bytes(data)
            assert (plan.epoch, plan.step) > self._last_step, f"step {plan.step} came after {self._last_step}"
            self._last_step = (plan.epoch, plan.step)
            result = steps.run(plan, message, began)
            self._num_steps += 1
            self._num_tokens += plan.num_tokens
            return result
        finally:
            self._step_began = None
            self._busy_s += time.perf_counter() - began

    # control: runs beside a step

    def ping(self) -> float:
        """How long the step under way has been running, in seconds; 0 when there is none."""
        began = self._step_began
        return 0.0 if began is None else time.perf_counter() - began

    def progress(self) -> WarmUpProgress:
        """How far the warm-up is."""
        return self._progress

    def stats(self) -> StageStats:
        spec, model = self._spec, self._loaded().model
        return StageStats(
            stage=spec.stage,
            layers=(spec.first_layer, spec.last_layer),
            device=spec.device,
            pid=os.getpid(),
            pool=model.cache.stats(),
            weight_bytes=model.weight_bytes,
            busy_s=self._busy_s,
            steps=self._num_steps,
            tokens=self._num_tokens,
            running_s=self.ping(),
        )

    def reset_stats(self) -> None:
        """Begin counting at zero, after a warm-up."""
        self._busy_s, self._num_steps, self._num_tokens = 0.0, 0, 0

    def close(self) -> None:
        """Give weights and KV back. Calling it again does nothing."""
        if self._steps is not None:
            self._steps.model.close()
            self._steps = None

    def _loaded(self) -> StageSteps:
        if self._steps is None:
            raise RuntimeError(f"{self!r} has not been loaded, or is closed")
        return self._steps
