"""StageActor: one run of layers with its KV pool, as a process that computes step after step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from qsa.actors.telemetry import StageStats
from qsa.actors.transport import HiddenMessage, ObjectStoreTransport
from qsa.kernels.registry import SparseConfig
from qsa.model.batch import Segment
from qsa.model.build import build_stage
from qsa.model.checkpoint.load import open_checkpoint
from qsa.model.sampler import SampleRow, sample
from qsa.scheduler.growth import StageCapacity
from qsa.scheduler.plan import SelectionStats, SequenceResult, SequenceStep, StepPlan, StepResult
from qsa.scheduler.request import SamplingParams, TokenOutput


@dataclass(frozen=True)
class StageSpec:
    """What a stage is made of; plain values, so that it travels to the stage's process.

    Attributes:
        model_path:  as in the configuration; every stage opens it and reads its own layers only.
        num_threads: CPU threads of its operators.
    """

    stage: int
    num_stages: int
    first_layer: int
    last_layer: int
    model_path: str
    num_chunks: int
    max_sequences: int
    max_model_len: int
    sparse: Mapping[int, SparseConfig]
    calibration_path: Path | None = None
    dtype: str = "auto"
    kv_dtype: str = "auto"
    quantization: str = "auto"
    device: str = "cpu"
    num_threads: int = 1

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1


class Model(Protocol):
    """The part of `StageModel` that a stage uses; a test may bring a scripted one."""

    dtype: torch.dtype
    attention: Any
    cache: Any

    @property
    def weight_bytes(self) -> int: ...
    def forward(
        self,
        segments: Sequence[Segment],
        token_ids: torch.Tensor | None,
        hidden: torch.Tensor | None,
        sample_rows: Sequence[int],
    ) -> torch.Tensor: ...
    def close(self) -> None: ...


ModelBuilder = Callable[[StageSpec], Model]


def build_model(spec: StageSpec) -> Model:
    """The product's ModelBuilder: read the stage's layers from the checkpoint."""
    checkpoint = open_checkpoint(spec.model_path)
    try:
        return build_stage(
            checkpoint,
            first_layer=spec.first_layer,
            last_layer=spec.last_layer,
            num_chunks=spec.num_chunks,
            max_sequences=spec.max_sequences,
            max_model_len=spec.max_model_len,
            sparse=spec.sparse,
            calibration_path=spec.calibration_path,
            dtype=spec.dtype,
            kv_dtype=spec.kv_dtype,
            quantization=spec.quantization,
            device=spec.device,
        )
    finally:
        checkpoint.close()


class StageActor:
    """Layers [first_layer, last_layer) and their K and V. Steps run one at a time, in the order of their calls.

    A plain class, so that a test can build it in-process. As an actor, `ping`, `stats` and `reset_stats` run beside a
    step in the concurrency group `control`; they read counters only.
    """

    def __init__(self, spec: StageSpec, build: ModelBuilder = build_model) -> None:
        self._spec, self._build = spec, build
        self._model: Model | None = None
        self._sparse_ids: dict[int, int] = {}  # slot -> its sequence's configuration
        self._last_step = (-1, 0)  # epoch, step
        self._step_began: float | None = None
        self._busy_s, self._steps, self._tokens = 0.0, 0, 0

    def __repr__(self) -> str:
        s = self._spec
        return f"Stage{s.stage}(layers {s.first_layer} to {s.last_layer - 1}, {s.device})"

    def load(self) -> StageCapacity:
        """Read the weights and allocate the KV pool; not in `__init__`, where Ray would lose the error's type.

        Raises:
            QSAError: the model or the memory is not there.
        """
        spec = self._spec
        torch.set_num_threads(spec.num_threads)
        model = self._build(spec)
        self._model = model
        self._transport = ObjectStoreTransport(model.dtype, torch.device(spec.device))
        summaries = {sparse_id: model.attention.summary_layout(sparse_id) for sparse_id in spec.sparse}
        num_layers = spec.last_layer - spec.first_layer
        return StageCapacity(num_layers, model.cache.pool.num_chunks, model.cache.kv, summaries)

    def forward(self, data: bytes, message: HiddenMessage | None) -> HiddenMessage | StepResult:
        """Run this stage's part of a step.

        Args:
            data:    a StepPlan's bytes.
            message: what the stage before returned for the same plan; None on the first stage.

        Returns:
            The message for the next stage; on the last stage, the step's result.
        """
        model = self._model
        if model is None:
            raise RuntimeError(f"{self!r} has not been loaded, or is closed")
        began = self._step_began = time.perf_counter()
        try:
            plan = StepPlan.from_bytes(data)
            assert (plan.epoch, plan.step) > self._last_step, f"step {plan.step} came after {self._last_step}"
            self._last_step = (plan.epoch, plan.step)
            self._turn_over_slots(plan, model)
            results: tuple[SequenceResult, ...] = ()
            selection = message.selection if message is not None else ()
            packed = None
            if plan.items:
                out = self._compute(plan, message, model)
                if self._spec.is_last:
                    results = _sample(plan.items, out)
                else:
                    packed = self._transport.pack(out)
                selection += self._selection(plan, model)
        finally:
            busy_s = time.perf_counter() - began
            self._step_began = None
            self._busy_s += busy_s
        self._steps += 1
        self._tokens += plan.num_tokens
        times = (*(message.compute_ms if message is not None else ()), busy_s * 1e3)
        if self._spec.is_last:
            return StepResult(plan.epoch, plan.step, plan.lane, results, selection, times)
        return HiddenMessage(plan.epoch, plan.step, plan.lane, packed, times, selection)

    def _turn_over_slots(self, plan: StepPlan, model: Model) -> None:
        for slot in plan.release_slots:
            model.attention.release(slot)
            self._sparse_ids.pop(slot, None)  # a step that failed on an earlier stage never opened it here
        for slot, sparse_id in plan.open_slots:
            model.attention.open(slot, sparse_id)
            self._sparse_ids[slot] = sparse_id

    def _compute(self, plan: StepPlan, message: HiddenMessage | None, model: Model) -> torch.Tensor:
        segments = [Segment(i.slot, i.start, i.end, self._sparse_ids[i.slot], i.is_prefill) for i in plan.items]
        rows: list[int] = []
        if self._spec.is_last:
            end = 0
            for item in plan.items:
                end += len(item.token_ids)
                if item.sampling is not None:
                    rows.append(end - 1)
        if message is None:
            token_ids = torch.tensor([token for item in plan.items for token in item.token_ids])
            return model.forward(segments, token_ids, None, rows)
        assert (message.epoch, message.step) == (plan.epoch, plan.step), "hidden states of another step"
        return model.forward(segments, None, self._transport.unpack(message.hidden), rows)

    def _selection(self, plan: StepPlan, model: Model) -> tuple[SelectionStats, ...]:
        request_ids = {item.slot: item.request_id for item in plan.items}
        return tuple(
            SelectionStats(request_ids[s.slot], s.attended, s.context, s.num_selected, s.newly_hit, s.margin)
            for s in model.attention.take_stats()
            if s.slot in request_ids
        )

    # control: runs beside a step

    def ping(self) -> float:
        """How long the step under way has been running, in seconds; 0 when there is none."""
        began = self._step_began
        return 0.0 if began is None else time.perf_counter() - began

    def stats(self) -> StageStats:
        spec, model = self._spec, self._model
        if model is None:
            raise RuntimeError(f"{self!r} has not been loaded, or is closed")
        return StageStats(
            stage=spec.stage,
            layers=(spec.first_layer, spec.last_layer),
            device=spec.device,
            pid=os.getpid(),
            pool=model.cache.stats(),
            weight_bytes=model.weight_bytes,
            busy_s=self._busy_s,
            steps=self._steps,
            tokens=self._tokens,
            running_s=self.ping(),
        )

    def reset_stats(self) -> None:
        """Begin counting at zero, after a warm-up."""
        self._busy_s, self._steps, self._tokens = 0.0, 0, 0

    def close(self) -> None:
        """Give weights and KV back. Calling it again does nothing."""
        if self._model is not None:
            self._model.close()
            self._model = None


def _sample(items: Sequence[SequenceStep], logits: torch.Tensor) -> tuple[SequenceResult, ...]:
    """Choose the next token of every item that asks for one."""
    asking = [item for item in items if item.sampling is not None]
    rows = [_sample_row(item, item.sampling) for item in asking if item.sampling is not None]
    results = []
    for item, sampled in zip(asking, sample(logits, rows), strict=True):
        if sampled.error is not None:
            results.append(SequenceResult(item.request_id, error=sampled.error))
        else:
            token = TokenOutput(sampled.token_id, sampled.logprob, sampled.top_logprobs)
            results.append(SequenceResult(item.request_id, token))
    return tuple(results)


def _sample_row(item: SequenceStep, sampling: SamplingParams) -> SampleRow:
    return SampleRow(
        position=item.end,
        counts=item.counts,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        logit_bias=sampling.logit_bias,
        logprobs=sampling.logprobs,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
    )
