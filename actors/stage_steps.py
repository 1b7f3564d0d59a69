"""StageSteps: computes step plans on one stage's model: slots, segments, hidden states, samples. All of torch is here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from qsa.actors.stage_spec import StageSpec
from qsa.actors.transport import HiddenMessage, ObjectStoreTransport
from qsa.model.batch import Segment
from qsa.model.build import build_stage
from qsa.model.checkpoint.load import open_checkpoint
from qsa.model.sampler import SampleRow, sample
from qsa.scheduler.growth import StageCapacity
from qsa.scheduler.plan import SelectionStats, SequenceResult, SequenceStep, StepPlan, StepResult
from qsa.scheduler.request import SamplingParams, TokenOutput


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


class StageSteps:
    """The model of one stage and which slots are open on it."""

    def __init__(self, spec: StageSpec, build: ModelBuilder) -> None:
        """Read the weights and allocate the KV pool.

        Raises:
            QSAError: the model or the memory is not there.
        """
        torch.set_num_threads(spec.num_threads)
        self._spec = spec
        self.model = build(spec)
        self._transport = ObjectStoreTransport(self.model.dtype, torch.device(spec.device))
        self._sparse_ids: dict[int, int] = {}  # slot -> its sequence's configuration

    def capacity(self) -> StageCapacity:
        """What the scheduler must know about this stage."""
        spec, model = self._spec, self.model
        summaries = {sparse_id: model.attention.summary_layout(sparse_id) for sparse_id in spec.sparse}
        return StageCapacity(spec.last_layer - spec.first_layer, model.cache.pool.num_chunks, model.cache.kv, summaries)

    def run(self, plan: StepPlan, message: HiddenMessage | None, began: float) -> HiddenMessage | StepResult:
        """This stage's part of a step; `began` is when its time began to count."""
        self._turn_over_slots(plan)
        results: tuple[SequenceResult, ...] = ()
        selection = message.selection if message is not None else ()
        packed = None
        if plan.items:
            out = self._compute(plan, message)
            if self._spec.is_last:
                results = _sample(plan.items, out)
            else:
                packed = self._transport.pack(out)
            selection += self._selection(plan)
        times = (*(message.compute_ms if message is not None else ()), (time.perf_counter() - began) * 1e3)
        if self._spec.is_last:
            return StepResult(plan.epoch, plan.step, plan.lane, results, selection, times)
        return HiddenMessage(plan.epoch, plan.step, plan.lane, packed, times, selection)

    def _turn_over_slots(self, plan: StepPlan) -> None:
        for slot in plan.release_slots:
            self.model.attention.release(slot)
            self._sparse_ids.pop(slot, None)  # a step that failed on an earlier stage never opened it here
        for slot, sparse_id in plan.open_slots:
            self.model.attention.open(slot, sparse_id)
            self._sparse_ids[slot] = sparse_id

    def _compute(self, plan: StepPlan, message: HiddenMessage | None) -> torch.Tensor:
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
            return self.model.forward(segments, token_ids, None, rows)
        assert (message.epoch, message.step) == (plan.epoch, plan.step), "hidden states of another step"
        return self.model.forward(segments, None, self._transport.unpack(message.hidden), rows)

    def _selection(self, plan: StepPlan) -> tuple[SelectionStats, ...]:
        request_ids = {item.slot: item.request_id for item in plan.items}
        return tuple(
            SelectionStats(request_ids[s.slot], s.attended, s.context, s.num_selected, s.newly_hit, s.margin)
            for s in self.model.attention.take_stats()
            if s.slot in request_ids
        )


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
