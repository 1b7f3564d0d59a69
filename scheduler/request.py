"""What a client asked for, and the state of a sequence that answers it. Plain data, no torch, no ray."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, lru_cache

import msgpack


class FinishReason(StrEnum):
    """Why a sequence ended; the first two are OpenAI's words. LOST: it cannot go on for now, and may be sent again."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    LOST = "lost"


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. Depends on `seed` and the token's position alone, never on the batch.

    Attributes:
        temperature:     0 is greedy; values below 1e-5 count as 0.
        top_k:           0 keeps all.
        top_p, min_p:    1 and 0 keep all.
        seed:            64 bits, drawn by the server when the client gave none.
        max_tokens:      generated tokens at most; resolved by the caller, never None.
        stop_token_ids:  end the sequence; the ending token is not part of the text.
        ignore_eos:      the model's own end tokens do not end the sequence.
        logit_bias:      pairs of token id and an amount added to its logit.
        logprobs:        number of alternatives to report; -1: none at all; 0: only the chosen token's.
        presence_penalty, frequency_penalty: of generated tokens, as in OpenAI's API.
        repetition_penalty: of tokens of the prompt and generated ones, as in Hugging Face's.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int = -1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-5

    @cached_property
    def needs_counts(self) -> bool:
        """A penalty needs to know how often every token has occurred."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @cached_property
    def packed(self) -> bytes:
        """As msgpack, made once: it travels with every step of a sequence."""
        packed: bytes = msgpack.packb(tuple(getattr(self, name) for name in self.__dataclass_fields__))
        return packed

    @staticmethod
    @lru_cache(maxsize=1024)
    def unpack(data: bytes) -> SamplingParams:
        """The inverse of `packed`; the same bytes give the same object."""
        return SamplingParams(*msgpack.unpackb(data, use_list=False))

    def finish_reason(self, token_id: int, remaining: int, eos_token_ids: Collection[int]) -> FinishReason | None:
        """Why a sequence ends with this token; None when it goes on. `remaining`: tokens that may still follow it."""
        if token_id in self.stop_token_ids or (token_id in eos_token_ids and not self.ignore_eos):
            return FinishReason.STOP
        return FinishReason.LENGTH if remaining <= 0 else None


@dataclass(frozen=True)
class Request:
    """One sequence to generate. `request_id` is fresh from the server, unique in the engine."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    sparse_id: int = 1
    priority: int = 0  # smaller is more urgent


@dataclass(frozen=True)
class TokenOutput:
    """One generated token with its log-probabilities when asked for; `top_logprobs` pairs (token id, logprob)."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class RequestOutput:
    """What happened to one request since the last report.

    Attributes:
        tokens:         newly generated tokens, in order.
        computed_len:   prompt tokens computed so far, for prefill progress.
        finish_reason:  set once, in the last output.
        error:          message for the client when finish_reason is ERROR or LOST.
        attended_share: attended tokens over context tokens, averaged over layers, in the last step; None while unknown.
    """

    request_id: str
    tokens: tuple[TokenOutput, ...] = ()
    computed_len: int = 0
    prompt_len: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    attended_share: float | None = None
