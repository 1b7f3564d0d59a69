"""StageSteps: computes step plans on one stage's model: slots, segments, hidden states, samples. All of torch is here."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from qsa.actors.stage_clock import StageClock
from qsa.actors.stage_spec import StageSpec
from qsa.actors.stage_timer import make_timer
from qsa.actors.telemetry import StageStart
from qsa.actors.transport import HiddenMessage, Transport, TransportSpec, make_transport
from qsa.device import why_not_cards
from qsa.errors import BudgetError, ConfigError
from qsa.memory.budget import CardMemory, gib
from qsa.model.batch import Segment
from qsa.model.build import build_stage
from qsa.model.checkpoint.open import dummy_calibration, open_model
from qsa.model.sampler import Choices, SampleRow, begin_sample
from qsa.model.selection import add_selections
from qsa.scheduler.growth import StageCapacity
from qsa.scheduler.plan import SelectionStats, SequenceResult, SequenceStep, StepPlan, StepResult
from qsa.scheduler.request import SamplingParams, TokenOutput


class Model(Protocol):
    """The part of `StageModel` that a stage uses; a test may bring a scripted one.

    A model may also have `warm_up(report)`, which does everything that happens once (kernels compiled, graphs captured),
    calls `report(done, total, what)` on the way and leaves no slot open; and for the log `backend` and `num_graphs`, and its
    attention `operator_names`. One that can do a part of a decode step ahead of its tokens has `prepare_decode(segments)`,
    which returns something for `run_prepared(ready, token_ids or hidden)` or `drop_prepared(ready)`, or None.
    """

    dtype: torch.dtype
    attention: Any
    cache: Any

    @property
    def hidden_size(self) -> int: ...
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
ReportWarmUp = Callable[[int, int, str], None]


def build_model(spec: StageSpec) -> Model:
    """The product's ModelBuilder: read the stage's layers from the checkpoint."""
    checkpoint = open_model(spec.model_path, spec.load_format, spec.device)
    is_random = spec.calibration_path is None and spec.load_format == "dummy"
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
            calibration=dummy_calibration(checkpoint.spec, spec.first_layer, spec.last_layer) if is_random else None,
            dtype=spec.dtype,
            kv_dtype=spec.kv_dtype,
            quantization=spec.quantization,
            device=spec.device,
            prefill_chunk=spec.prefill_chunk,
        )
    finally:
        checkpoint.close()


def look_at_card(spec: StageSpec) -> CardMemory:
    """The card of this process and what is free on it, this process's own context taken off already.

    Raises:
        ConfigError: there is none that stages can compute on.
    """
    reason = why_not_cards()
    if reason is not None:
        raise ConfigError(f"pipeline.device is cuda, but where stage {spec.stage} runs {reason}; set pipeline.device to cpu")
    card = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    return CardMemory(str(card.uuid), card.name, free, total)


class StageSteps:
    """The model of one stage, which slots are open on it, and its transport."""

    def __init__(self, spec: StageSpec, build: ModelBuilder, clock: StageClock) -> None:
        """Read the weights and allocate the KV pool.

        Raises:
            QSAError: the model or the memory is not there.
        """
        torch.set_num_threads(spec.num_threads)
        self._spec = spec
        self._device = torch.device(spec.device)
        with _memory_named(spec, "loading"):
            self.model = build(spec)
        self.clock, self.timer = clock, make_timer(clock, self._device)
        self.transport: Transport | None = None
        self._sent_before = 0  # bytes, of earlier transports
        self._sparse_ids: dict[int, int] = {}  # slot -> its sequence's configuration
        self._selection: dict[int, Any] = {}  # by slot: figures that no result has told of yet
        self._ahead: dict[int, tuple[list[Segment], Any]] = {}  # by lane: a prepared step, and what the model has of it

    def capacity(self) -> StageCapacity:
        """What the scheduler must know about this stage."""
        spec, model = self._spec, self.model
        summaries = {sparse_id: model.attention.summary_layout(sparse_id) for sparse_id in spec.sparse}
        return StageCapacity(spec.last_layer - spec.first_layer, model.cache.pool.num_chunks, model.cache.kv, summaries)

    def warm_up(self, report: ReportWarmUp) -> StageStart:
        """Let the model do what happens once.

        Raises:
            BudgetError: the card's memory was not enough for it.
        """
        began, model, spec = time.monotonic(), self.model, self._spec
        warm_up = getattr(model, "warm_up", None)
        if warm_up is not None:
            with _memory_named(spec, "warming up"):
                warm_up(report)
        return StageStart(
            stage=spec.stage,
            layers=(spec.first_layer, spec.last_layer),
            device=torch.cuda.get_device_name(0) if self._device.type == "cuda" else spec.device,
            backend=str(getattr(model, "backend", getattr(model.attention, "backend", "torch"))),
            operators=tuple(getattr(model.attention, "operator_names", ())),
            num_graphs=int(getattr(model, "num_graphs", 0)),
            warm_up_s=time.monotonic() - began,
        )

    def run(self, plan: StepPlan, message: HiddenMessage | None) -> HiddenMessage | StepResult:
        """This stage's part of a plan whose hidden states travel as object references."""
        began = time.perf_counter()
        hidden = None
        if message is not None:
            assert (message.epoch, message.step) == (plan.epoch, plan.step), "hidden states of another step"
            with self.clock.span("receive", plan.lane, plan.step):
                hidden = self.linked.unpack(message.hidden)
        with self.clock.span("chunk" if plan.items[0].is_prefill else "compute", plan.lane, plan.step):
            out = self.compute(plan, hidden)
            results = self.sample(plan, out) if self._spec.is_last else ()
            self.note_selection()
            selection = (*(message.selection if message is not None else ()), *self.selection(plan))
            if self._device.type == "cuda":
                torch.cuda.current_stream().synchronize()  # a step has ended, and its time is true, when its work has
                self.timer.anchor()
        times = (*(message.compute_ms if message is not None else ()), (time.perf_counter() - began) * 1e3)
        if self._spec.is_last:
            return StepResult(plan.epoch, plan.step, plan.lane, results, selection, times)
        with self.clock.span("send", plan.lane, plan.step):
            packed = self.linked.pack(out)
        return HiddenMessage(plan.epoch, plan.step, plan.lane, packed, times, selection)

    def compute(self, plan: StepPlan, hidden: torch.Tensor | None) -> torch.Tensor:
        """Open the plan's new slots and run the stage's layers; on a card what is returned may not be there yet.

        Args:
            hidden: [num_tokens, hidden_size] of the stage before; None on the first stage.

        Returns:
            [num_tokens, hidden_size]; on the last stage, logits of the rows that are to be sampled.
        """
        for slot, sparse_id in plan.open_slots:
            self.model.attention.open(slot, sparse_id)
            self._sparse_ids[slot] = sparse_id
            self._selection.pop(slot, None)  # of another sequence, whose last figures came late
        segments = [Segment(i.slot, i.start, i.end, self._sparse_ids[i.slot], i.is_prefill) for i in plan.items]
        rows: list[int] = []
        if self._spec.is_last:
            end = 0
            for item in plan.items:
                end += len(item.token_ids)
                if item.sampling is not None:
                    rows.append(end - 1)
        token_ids = None
        if self._spec.stage == 0:
            token_ids = torch.tensor([token for item in plan.items for token in item.token_ids])
        ahead = self._ahead.get(plan.lane)
        if ahead is not None and ahead[0] == segments and (not self._spec.is_last or len(rows) == len(segments)):
            del self._ahead[plan.lane]
            given = token_ids if hidden is None else hidden
            out: torch.Tensor = self.model.run_prepared(ahead[1], given)  # type: ignore[attr-defined]
            return out
        self.drop_ahead(plan.lane)
        return self.model.forward(segments, token_ids, hidden, rows)

    def prepare(self, lane: int, places: Sequence[tuple[int, int]]) -> None:
        """Before a decode step's tokens or hidden states are there: do what can be done of it without them.

        `compute` goes on from there if it is asked for that step, and else begins anew.

        Args:
            places: slot and position of each row that the lane's next step is expected to have.
        """
        self.drop_ahead(lane)
        prepare = getattr(self.model, "prepare_decode", None)
        if prepare is None or not places:
            return
        segments = [Segment(slot, at, at + 1, self._sparse_ids[slot], False) for slot, at in places]
        ready = prepare(segments)
        if ready is not None:
            self._ahead[lane] = segments, ready

    def drop_ahead(self, lane: int | None = None) -> None:
        """What was prepared for a lane, or for all of them, is not wanted."""
        for one in [*self._ahead] if lane is None else [lane]:
            ahead = self._ahead.pop(one, None)
            if ahead is not None:
                self.model.drop_prepared(ahead[1])  # type: ignore[attr-defined]

    def sample(self, plan: StepPlan, logits: torch.Tensor) -> tuple[SequenceResult, ...]:
        """The next token of every item that asks for one; the others have an entry without."""
        return self.begin_sample(plan, logits).wait()

    def begin_sample(self, plan: StepPlan, logits: torch.Tensor) -> StepChoices:
        """As `sample`, but without waiting for a card."""
        items = plan.items
        return StepChoices(items, begin_sample(logits, [_sample_row(i, i.sampling) for i in items if i.sampling is not None]))

    def selection(self, plan: StepPlan) -> tuple[SelectionStats, ...]:
        """What selection did since the last call, as far as it is known and of the plan's sequences.

        On a card that is as far as `note_selection` has been told.
        """
        if self._device.type != "cuda":
            self.note_selection()
        noted = [(item.request_id, self._selection.pop(item.slot, None)) for item in plan.items]
        return tuple(
            SelectionStats(request_id, s.attended, s.context, s.num_selected, s.newly_hit, s.margin)
            for request_id, s in noted
            if s is not None
        )

    def note_selection(self) -> None:
        """Hear from the model what selection did, for `selection`: when no card waits for a launch."""
        for found in self.model.attention.take_stats():
            before = self._selection.get(found.slot)
            self._selection[found.slot] = found if before is None else add_selections(before, found)

    def settle(self) -> None:
        """Wait for the card. One that has met a fault raises here and in all that follows, until its process ends."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def release(self, slots: Sequence[int]) -> None:
        """Give slots back; those that are not open are left alone."""
        self.drop_ahead()
        for slot in slots:
            self.model.attention.release(slot)
            self._sparse_ids.pop(slot, None)
            self._selection.pop(slot, None)

    # transport

    def link(self, number: int, name: str, secret: bytes, host: str) -> str:
        """Prepare to exchange hidden states with the other stages, as `StageActor.open_link` says."""
        spec = self._spec
        self.unlink()
        self.transport = make_transport(
            TransportSpec(
                name=name,
                stage=spec.stage,
                num_stages=spec.num_stages,
                dtype=str(self.model.dtype).removeprefix("torch."),
                device=self._device.type,
                hidden_size=self.model.hidden_size,
                lanes=spec.lanes,
                max_rows=spec.max_sequences,
                prefill_chunk=spec.prefill_chunk,
                epoch=number,
                secret=secret,
            ),
            host,
        )
        return self.transport.address()

    def unlink(self) -> None:
        """Let go of the transport. Calling it again does nothing."""
        transport, self.transport = self.transport, None
        if transport is not None:
            self._sent_before += transport.stats.sent_bytes
            transport.close()

    @property
    def sent_bytes(self) -> int:
        """Bytes of hidden states that have left the stage since it was loaded, or since `forget_sent`. Any thread."""
        transport = self.transport
        return self._sent_before + (0 if transport is None else transport.stats.sent_bytes)

    def forget_sent(self) -> None:
        """Count them from zero."""
        self._sent_before -= self.sent_bytes

    @property
    def is_last(self) -> bool:
        return self._spec.is_last

    @property
    def linked(self) -> Transport:
        """The transport that links this stage to the others."""
        if self.transport is None:
            raise RuntimeError(f"stage {self._spec.stage} has no transport: it was not linked, or has been reset")
        return self.transport

    def close(self) -> None:
        """Give weights and KV back. Calling it again does nothing."""
        self.unlink()
        self.model.close()


@contextlib.contextmanager
def _memory_named(spec: StageSpec, doing: str) -> Iterator[None]:
    """A card that is full becomes an error that says what to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(0)
        raise BudgetError(
            f"stage {spec.stage} ran out of memory on {torch.cuda.get_device_name(0)} while {doing}, with {gib(free)} of"
            f" {gib(total)} left and {spec.num_chunks} MiB of KV; set cache.device_bytes to less than that, or lower"
            f" limits.prefill_chunk ({spec.prefill_chunk}): {str(error).splitlines()[0]}"
        ) from None


@dataclass(frozen=True)
class StepChoices:
    """The tokens of a step that are being chosen."""

    items: Sequence[SequenceStep]
    choices: Choices

    @property
    def are_made(self) -> bool:
        """Whether `wait` returns at once."""
        return self.choices.are_made

    def wait(self) -> tuple[SequenceResult, ...]:
        """An entry of every item; without a token where none was asked for."""
        sampled = iter(self.choices.wait())
        results = []
        for item in self.items:
            if item.sampling is None:
                results.append(SequenceResult(item.request_id))
            elif (one := next(sampled)).error is not None:
                results.append(SequenceResult(item.request_id, error=one.error))
            else:
                results.append(SequenceResult(item.request_id, TokenOutput(one.token_id, one.logprob, one.top_logprobs)))
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
