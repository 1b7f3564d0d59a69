"""SequenceState: what the scheduler knows about one request from its arrival to its end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

from qsa.scheduler.growth import HitRate
from qsa.scheduler.plan import SequenceStep
from qsa.scheduler.request import FinishReason, Request, RequestOutput, TokenOutput

MAX_PREEMPTIONS = 3  # after that a sequence is admitted only with room for its final length, and keeps it


@dataclass(eq=False)
class SequenceState:
    """One sequence. Lengths in tokens.

    Attributes:
        arrival:      a running number; smaller came earlier.
        slot:         place in every stage's cache; None while it waits.
        is_open:      a plan has opened the slot, so a plan must release it.
        lane:         the lane that decodes it; None until its prompt is planned.
        planned_len:  tokens that plans so far compute; computed_len: tokens whose results have come back.
        in_flight:    plans under way that hold it; more than one only for chunks of its prompt.
        held:         chunks on each stage once every plan so far has run.
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
    lane: int | None = None
    planned_len: int = 0
    computed_len: int = 0
    in_flight: int = 0
    held: tuple[int, ...] = ()
    num_preemptions: int = 0
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
    def can_step(self) -> bool:
        """The next step can be planned: chunks of a prompt follow each other, a decode step needs the token before."""
        if self.is_leaving or self.is_ended:
            return False
        return self.is_prefill or (self.in_flight == 0 and self.planned_len < self.seq_len)

    @property
    def is_protected(self) -> bool:
        return self.num_preemptions >= MAX_PREEMPTIONS

    @property
    def rank(self) -> tuple[bool, int, int]:
        """Claim on chunks, the strongest first. It never changes while a sequence holds a slot."""
        return (not self.is_protected, self.request.priority, self.arrival)

    def next_end(self, prefill_chunk: int) -> int:
        """planned_len after the next step; chunks of a prompt lie on a fixed grid from position 0."""
        if not self.is_prefill:
            return self.planned_len + 1
        return min((self.planned_len // prefill_chunk + 1) * prefill_chunk, self.prompt_len)

    def next_step(self, prefill_chunk: int) -> SequenceStep:
        """The next step. After a preemption known tokens are replayed in the same steps, without sampling."""
        assert self.slot is not None, f"{self.request_id} has no slot"
        start, end = self.planned_len, self.next_end(prefill_chunk)
        if self.is_prefill:
            token_ids = self.request.prompt_token_ids[start:end]
        else:
            token_ids = (self.generated[start - self.prompt_len],)
        sampling = self.request.sampling if end == self.seq_len else None
        counts = self._counts() if sampling is not None else ()
        return SequenceStep(self.request_id, self.slot, start, token_ids, self.is_prefill, sampling, counts)

    def finish_reason(self, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Why the sequence ends with its newest token; None when it goes on."""
        sampling, token = self.request.sampling, self.generated[-1]
        if token in sampling.stop_token_ids or (token in eos_token_ids and not sampling.ignore_eos):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.generated) >= sampling.max_tokens else None

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
        self.slot = self.lane = None
        self.is_open = self.is_leaving = self.is_stalled = False
        self.planned_len = self.computed_len = 0
        self.held = ()
        self.must_replay = True

    def _counts(self) -> tuple[tuple[int, int], ...]:
        """What the request's penalties need to know of the text so far: see `SequenceStep.counts`."""
        s = self.request.sampling
        if s.repetition_penalty != 1:
            return tuple((self._prompt_counts | Counter(self.generated)).items())
        if s.presence_penalty != 0 or s.frequency_penalty != 0:
            return tuple(Counter(self.generated).items())
        return ()

    @cached_property
    def _prompt_counts(self) -> dict[int, int]:
        return dict.fromkeys(self.request.prompt_token_ids, 0)
