"""What the scheduler and the stages tell each other, as msgpack: StepPlan and BurstPlan to them, StepResult and BurstEnd back.

There are two kinds of plans, in one numbering. A chunk of one prompt is a StepPlan of its own. All decodes are a BurstPlan:
several steps, unrolled to StepPlans where it is driven (see `burst.py`), without a word from the scheduler.
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
    """One step: a chunk of a prompt, or one decode step of a burst's lane.

    `open_slots`: pairs (slot, sparse id), opened before anything is computed; only in a chunk.
    """

    epoch: int
    step: int
    lane: int
    items: tuple[SequenceStep, ...] = ()
    open_slots: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(item.token_ids) for item in self.items)

    def to_bytes(self) -> bytes:
        items = [
            (i.request_id, i.slot, i.start, i.token_ids, i.is_prefill, i.sampling and i.sampling.packed, i.counts)
            for i in self.items
        ]
        packed: bytes = msgpack.packb((self.epoch, self.step, self.lane, items, self.open_slots))
        return packed

    @classmethod
    def from_bytes(cls, data: bytes) -> StepPlan:
        epoch, step, lane, items, opened = msgpack.unpackb(data, use_list=False)
        steps = tuple(
            SequenceStep(request_id, slot, start, token_ids, is_prefill, sampling and SamplingParams.unpack(sampling), counts)
            for request_id, slot, start, token_ids, is_prefill, sampling, counts in items
        )
        return cls(epoch, step, lane, steps, opened)


@dataclass(frozen=True)
class BurstItem:
    """The part of a sequence that a burst computes, one token a step.

    Attributes:
        start:     computed_len before the burst.
        token_ids: known tokens from position `start` on, at least one; several only where tokens are replayed. The step that
            feeds the last one samples the next. When there are more of them than the burst has steps, none is sampled.
        sampling:  how tokens are chosen.
        counts:    as in SequenceStep, for the first token that is sampled.
        remaining: tokens that it may still generate, at least one.
    """

    request_id: str
    slot: int
    start: int
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    counts: tuple[tuple[int, int], ...]
    remaining: int


@dataclass(frozen=True)
class BurstPlan:
    """Decode steps of all running sequences, split into lanes.

    The n-th step of each lane has the number `step + n`, n < max_steps: the next plan's number is `end_step`.
    `lanes`: none of them is empty.
    """

    epoch: int
    step: int
    lanes: tuple[tuple[BurstItem, ...], ...]
    max_steps: int
    eos_token_ids: tuple[int, ...] = ()

    @property
    def end_step(self) -> int:
        return self.step + self.max_steps

    @property
    def num_items(self) -> int:
        return sum(map(len, self.lanes))

    def to_bytes(self) -> bytes:
        lanes = [
            [(i.request_id, i.slot, i.start, i.token_ids, i.sampling.packed, i.counts, i.remaining) for i in items]
            for items in self.lanes
        ]
        packed: bytes = msgpack.packb((self.epoch, self.step, lanes, self.max_steps, self.eos_token_ids))
        return packed

    @classmethod
    def from_bytes(cls, data: bytes) -> BurstPlan:
        epoch, step, lanes, max_steps, eos_token_ids = msgpack.unpackb(data, use_list=False)
        unpacked = tuple(
            tuple(
                BurstItem(request_id, slot, start, token_ids, SamplingParams.unpack(sampling), counts, remaining)
                for request_id, slot, start, token_ids, sampling, counts, remaining in items
            )
            for items in lanes
        )
        return cls(epoch, step, unpacked, max_steps, eos_token_ids)


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
    """The last stage's answer to a step.

    Attributes:
        results:    one entry an item of the plan, in the plan's order.
        compute_ms: one entry a stage.
        error:      the step failed on some stage; it holds for every item, and `results` is empty.
    """

    epoch: int
    step: int
    lane: int
    results: tuple[SequenceResult, ...] = ()
    selection: tuple[SelectionStats, ...] = ()
    compute_ms: tuple[float, ...] = ()
    error: str | None = None

    def to_bytes(self) -> bytes:
        results = [
            (r.request_id, None if (t := r.token) is None else (t.token_id, t.logprob, t.top_logprobs), r.error)
            for r in self.results
        ]
        selection = [(s.request_id, s.attended, s.context, s.num_selected, s.newly_hit, s.margin) for s in self.selection]
        packed: bytes = msgpack.packb((self.epoch, self.step, self.lane, results, selection, self.compute_ms, self.error))
        return packed

    @classmethod
    def from_bytes(cls, data: bytes) -> StepResult:
        epoch, step, lane, results, selection, compute_ms, error = msgpack.unpackb(data, use_list=False)
        entries = tuple(
            SequenceResult(request_id, None if token is None else TokenOutput(*token), failure)
            for request_id, token, failure in results
        )
        return cls(epoch, step, lane, entries, tuple(SelectionStats(*stats) for stats in selection), compute_ms, error)


@dataclass(frozen=True)
class BurstEnd:
    """A burst is over.

    `num_steps`: steps that were answered, one number a lane. `wall_ms`: from its first step to its last answer.
    """

    epoch: int
    step: int
    num_steps: tuple[int, ...]
    wall_ms: float
