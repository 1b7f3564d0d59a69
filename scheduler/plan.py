"""StepPlan: the message from the scheduler to every stage, StepResult: the last stage's answer; both as msgpack.

The same plan goes to every stage. Slots are opened and released in plan order, which is the order in which a stage
runs its calls, so a slot's pages are never given back while a step still reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgpack

from qsa.scheduler.request import SamplingParams, TokenOutput


@dataclass(frozen=True)
class SequenceStep:
    """The part of a sequence that a step computes.

    Attributes:
        slot:      the sequence's place in every stage's KV cache.
        start:     computed_len before the step: position of the first token.
        token_ids: the tokens to compute; its length is extend_len.
        sampling:  set when the step shall sample the token after the last one; None otherwise.
        counts:    generated tokens so far as pairs (token id, count), only when a penalty needs them; for a repetition
                   penalty also the prompt's other tokens, with count 0.
    """

    request_id: str
    slot: int
    start: int
    token_ids: tuple[int, ...]
    is_prefill: bool
    sampling: SamplingParams | None = None
    counts: tuple[tuple[int, int], ...] = ()

    @property
    def end(self) -> int:
        """computed_len after the step."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class StepPlan:
    """One step of one lane. `open_slots` pairs (slot, sparse id) before, `release_slots` before those."""

    epoch: int
    step: int
    lane: int
    items: tuple[SequenceStep, ...] = ()
    open_slots: tuple[tuple[int, int], ...] = ()
    release_slots: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(item.token_ids) for item in self.items)

    def to_bytes(self) -> bytes:
        items = [
            (i.request_id, i.slot, i.start, i.token_ids, i.is_prefill, _sampling_tuple(i.sampling), i.counts)
            for i in self.items
        ]
        packed: bytes = msgpack.packb(
            (self.epoch, self.step, self.lane, items, self.open_slots, self.release_slots), use_bin_type=True
        )
        return packed

    @classmethod
    def from_bytes(cls, data: bytes) -> StepPlan:
        epoch, step, lane, items, opened, released = msgpack.unpackb(data, use_list=False, strict_map_key=False)
        steps = tuple(
            SequenceStep(request_id, slot, start, token_ids, is_prefill, _sampling(sampling), counts)
            for request_id, slot, start, token_ids, is_prefill, sampling, counts in items
        )
        return cls(epoch, step, lane, steps, opened, released)


@dataclass(frozen=True)
class SelectionStats:
    """What selection did for one sequence in a step, summed over a stage's layers and lists.

    Attributes:
        attended:     tokens attended, summed over layers (mean over heads).
        context:      tokens of context, summed over the same layers.
        num_selected: slices in the lists.
        newly_hit:    of these, slices that the sequence's previous step had not selected.
        margin:       mean gap between the last kept and the first dropped score of the scan, in nats.
    """

    request_id: str
    attended: float = 0.0
    context: float = 0.0
    num_selected: int = 0
    newly_hit: int = 0
    margin: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the selected slices that were not selected in the step before."""
        return self.newly_hit / self.num_selected if self.num_selected else 0.0


@dataclass(frozen=True)
class SequenceResult:
    """What a step gave one sequence: a sampled token, or an error, or neither (a prefill chunk that goes on)."""

    request_id: str
    token: TokenOutput | None = None
    error: str | None = None


@dataclass(frozen=True)
class StepResult:
    """The last stage's answer to a plan. `compute_ms`: one entry a stage."""

    epoch: int
    step: int
    lane: int
    results: tuple[SequenceResult, ...] = ()
    selection: tuple[SelectionStats, ...] = ()
    compute_ms: tuple[float, ...] = ()


_SAMPLING_FIELDS = tuple(SamplingParams.__dataclass_fields__)


def _sampling_tuple(sampling: SamplingParams | None) -> tuple[object, ...] | None:
    return None if sampling is None else tuple(getattr(sampling, name) for name in _SAMPLING_FIELDS)


def _sampling(values: tuple[object, ...] | None) -> SamplingParams | None:
    return None if values is None else SamplingParams(**dict(zip(_SAMPLING_FIELDS, values, strict=True)))  # type: ignore[arg-type]
