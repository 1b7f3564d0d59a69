"""SequenceState: what the scheduler knows about one request from its arrival to its end."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property

from qsa.scheduler.growth import HitRate
from qsa.scheduler.plan import BurstItem, SequenceStep
from qsa.scheduler.request import FinishReason, Request, RequestOutput, TokenOutput

MAX_PREEMPTIONS = 3  # after that a sequence is admitted only with room for its final length, and keeps it
MAX_RESTARTS = 2  # that may meet a sequence in the same step, which it did not get through: the next one is its own fault
MAX_SETBACKS = 12  # restarts that may meet it in flight anywhere, until it gets further than ever


@dataclass(eq=False)
class SequenceState:
    """One sequence. Lengths in tokens.

    Attributes:
        arrival:      a running number; smaller came earlier.
        slot:         place in every stage's cache; None while it waits.
        is_open:      a plan has opened the slot, so a plan must release it.
        planned_len:  tokens that chunks so far compute, and decode steps have computed.
        computed_len: tokens whose results have come back.
        in_flight:    plans under way that hold it; more than one only for chunks of its prompt.
        held:         chunks on each stage once every plan so far has run; for a burst, once all of its steps have.
        chunk_ends:   where chunks of its prompt have ended; they end there again whenever it is computed again.
        furthest:     the largest computed_len so far.
        num_restarts: restarts that have found it beyond that, in flight.
        num_setbacks: restarts that have found it in flight since it got that far.
        is_leaving:   preempted as soon as nothing of it is in flight.
        is_stalled:   its last try found no room.
        is_ended:     its last output has been made; only the slot may still be in use.
    """

    request: Request
    arrival: int
    arrival_s: float
    hit_rate: HitRate
    prompt_len: int = field(init=False)
    generated: list[int] = field(default_factory=list)
    slot: int | None = None
    is_open: bool = False
    planned_len: int = 0
    computed_len: int = 0
    in_flight: int = 0
    held: tuple[int, ...] = ()
    chunk_ends: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    furthest: int = 0
    num_restarts: int = 0
    num_setbacks: int = 0
    num_bypassed: int = 0
    must_replay: bool = False
    is_leaving: bool = False
    is_stalled: bool = False
    is_ended: bool = False

    def __post_init__(self) -> None:
        self.prompt_len = len(self.request.prompt_token_ids)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def seq_len(self) -> int:
        return self.prompt_len + len(self.generated)

    @property
    def final_len(self) -> int:
        """Most tokens that will ever be in the cache: the last sampled token is never computed."""
        return self.prompt_len + self.request.sampling.max_tokens - 1

    @property
    def is_prefill(self) -> bool:
        """Part of the prompt is not planned yet."""
        return self.planned_len < self.prompt_len

    @property
    def can_chunk(self) -> bool:
        """The next chunk of the prompt can be planned: chunks follow each other unseen."""
        return self.is_prefill and not (self.is_leaving or self.is_ended)

    @property
    def can_decode(self) -> bool:
        """It can take part in the next burst: what was computed so far has come back, and ends with a known token."""
        is_free = self.in_flight == 0 and not (self.is_leaving or self.is_ended)
        return is_free and self.prompt_len <= self.planned_len < self.seq_len

    @property
    def is_on_trial(self) -> bool:
        """It was in flight when the stages were lost, perhaps by its fault, and has come again to what it did not get
        through. It takes that step alone, so that nobody else is lost with it."""
        return self.num_restarts > 0 and self.planned_len >= self.furthest

    def note_computed(self, end: int) -> None:
        """A result has come back; when it is one that never came before, earlier losses were not this sequence's fault."""
        self.computed_len = end
        if end > self.furthest:
            self.furthest, self.num_restarts, self.num_setbacks = end, 0, 0

    def note_restart(self, end: int) -> bool:
        """The stages were lost while a plan up to `end` was in flight; whether it may try again.

        What it had got through before is nobody's fault: it is computed again, and again until there is no more trouble.
        """
        self.num_setbacks += 1
        self.num_restarts += end > self.furthest
        return self.num_restarts <= MAX_RESTARTS and self.num_setbacks <= MAX_SETBACKS

    @property
    def is_protected(self) -> bool:
        return self.num_preemptions >= MAX_PREEMPTIONS

    @property
    def rank(self) -> tuple[bool, int, int]:
        """Claim on chunks, the strongest first. It never changes while a sequence holds a slot."""
        return (not self.is_protected, self.request.priority, self.arrival)

    def chunk_end(self, chunk_tokens: int) -> int:
        """planned_len after the next chunk: where it ended before, else on a grid of `chunk_tokens` from position 0."""
        known = bisect_right(self.chunk_ends, self.planned_len)
        if known < len(self.chunk_ends):
            return self.chunk_ends[known]
        return min((self.planned_len // chunk_tokens + 1) * chunk_tokens, self.prompt_len)

    def burst_end(self, num_steps: int) -> int:
        """planned_len after so many decode steps, if it does not end before."""
        return min(self.planned_len + num_steps, self.final_len)

    def chunk_step(self, end: int) -> SequenceStep:
        """The chunk up to `end`; the one that ends the prompt samples, unless it is computed again."""
        assert self.slot is not None, f"{self.request_id} has no slot"
        sampling = self.request.sampling if end == self.seq_len else None
        counts = self._counts() if sampling is not None else ()
        token_ids = self.request.prompt_token_ids[self.planned_len : end]
        return SequenceStep(self.request_id, self.slot, self.planned_len, token_ids, True, sampling, counts)

    def take_chunk(self, end: int) -> None:
        """A chunk up to `end` is under way."""
        self.is_open = True
        self.planned_len = end
        if not self.chunk_ends or self.chunk_ends[-1] < end:
            self.chunk_ends.append(end)

    def burst_item(self, num_steps: int) -> BurstItem:
        """Its part of a burst; tokens that are known from an earlier life are fed again, one a step."""
        assert self.slot is not None, f"{self.request_id} has no slot"
        known = self.generated[self.planned_len - self.prompt_len :]
        counts = self._counts() if len(known) <= num_steps else ()
        remaining = self.request.sampling.max_tokens - len(self.generated)
        token_ids = tuple(known[: num_steps + 1])  # one more than the steps feed: then none of them samples
        return BurstItem(self.request_id, self.slot, self.planned_len, token_ids, self.request.sampling, counts, remaining)

    def finish_reason(self, eos_token_ids: Collection[int]) -> FinishReason | None:
        """Why the sequence ends with its newest token; None when it goes on."""
        sampling = self.request.sampling
        return sampling.finish_reason(self.generated[-1], sampling.max_tokens - len(self.generated), eos_token_ids)

    def output(
        self,
        tokens: tuple[TokenOutput, ...] = (),
        reason: FinishReason | None = None,
        error: str | None = None,
        share: float | None = None,
    ) -> RequestOutput:
        """What the client hears: new tokens, progress of the prompt, and how it ended."""
        computed_len = min(self.computed_len, self.prompt_len)
        return RequestOutput(self.request_id, tokens, computed_len, self.prompt_len, reason, error, share)

    def forget_cache(self) -> None:
        """Back to the queue: everything it had computed is computed again."""
        assert self.in_flight == 0, f"{self.request_id} is in flight"
        self.slot = None
        self.is_open = self.is_leaving = self.is_stalled = False
        self.planned_len = self.computed_len = 0
        self.held = ()
        self.must_replay = True

    def _counts(self) -> tuple[tuple[int, int], ...]:
        """What the request's penalties need to know of the text so far: see `SequenceStep.counts`."""
        sampling = self.request.sampling
        if not sampling.needs_counts:
            return ()
        generated = Counter(self.generated)
        counts = generated if sampling.repetition_penalty == 1 else self._prompt_counts | generated
        return tuple(counts.items())

    @cached_property
    def _prompt_counts(self) -> dict[int, int]:
        return dict.fromkeys(self.request.prompt_token_ids, 0)
