"""What a client may ask for: the fields of both endpoints, their ranges, and what is refused by name.

Documented choices: `max_tokens` left out or null means the rest of the context (or server.default_max_tokens), 0 and
negative numbers are refused; `temperature` is finite and at least 0, below 1e-5 greedy; `top_p` lies in [0, 1], 0 keeps the
most likely token alone; `top_k` 0 and -1 keep all; `n` counts children, child i samples with `seed + i`.
"""

from __future__ import annotations

import logging
import math
import secrets
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from qsa.errors import ContextLengthError
from qsa.scheduler.request import SamplingParams
from qsa.serve_app.errors import ApiError, bad_request

logger = logging.getLogger(__name__)

SEED_RANGE = 1 << 64
MAX_STOP = 16
MAX_TOP_LOGPROBS = 20
MAX_DIGITS = 20  # of a token id; Python refuses to read thousands

# What would change the answer and this server cannot do: refused unless the value asks for nothing.
REFUSED = (
    "tools", "tool_choice", "functions", "function_call", "audio", "prediction", "web_search_options", "modalities",
    "response_format", "echo", "best_of", "suffix", "min_tokens", "prompt_logprobs", "use_beam_search", "bad_words",
    "logits_processors", "grammar", "json_schema", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar", "truncate_prompt_tokens", "prompt_embeds", "continue_final_message", "allowed_token_ids",
)  # fmt: skip
ASKS_FOR_NOTHING: dict[str, tuple[Any, ...]] = {
    "tool_choice": ("none",),
    "function_call": ("none",),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
}
# Known to the API, without an effect on the text: accepted in silence.
HARMLESS = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls", "verbosity", "reasoning_effort",
}  # fmt: skip


class StreamOptions(BaseModel):
    """Options of a stream; others than these are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    include_usage: bool | None = None


class GenerationFields(BaseModel):
    """Fields that both endpoints share; null is the same as leaving the field out."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", allow_inf_nan=False)

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    seed: int | None = Field(None, ge=-(1 << 63), lt=SEED_RANGE)
    n: int | None = Field(None, ge=1, le=128)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = Field(None, max_length=256)
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=1024)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    sparse_id: int | None = None
    priority: int | None = Field(None, ge=-1000, le=1000)

    @field_validator("stop")
    @classmethod
    def _stop_strings(cls, value: str | list[str] | None) -> str | list[str] | None:
        strings = [value] if isinstance(value, str) else value or []
        if len(strings) > MAX_STOP:
            raise ValueError(f"at most {MAX_STOP} stop strings are allowed, got {len(strings)}")
        if value != "" and any(not text for text in strings):
            raise ValueError("a stop string must not be empty")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _bias(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for token, bias in (value or {}).items():
            if not (token.isascii() and token.isdigit() and len(token) <= MAX_DIGITS):
                raise ValueError(f"keys must be token ids, got {token[:40]!r}")
            if not -100 <= bias <= 100:
                raise ValueError(f"values must lie in [-100, 100], got {bias} for token {token[:40]}")
        return value

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) and self.stop else tuple(self.stop or ())


class ChatMessage(BaseModel):
    """One message; fields beyond these are handed to the chat template."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a {self.role} message needs content")
        for part in self.content if isinstance(self.content, list) else ():
            if part.get("type") != "text":
                raise ValueError(f"content parts must be of type text, got {str(part.get('type'))[:40]!r}")
            if not isinstance(part.get("text"), str):
                raise ValueError("a content part of type text needs a text")
        return self

    def to_template(self) -> dict[str, Any]:
        """What the template sees: content as one string, `developer` under its older name."""
        content = self.content or ""
        if isinstance(content, list):
            content = "".join(part["text"] for part in content)
        role = "system" if self.role == "developer" else self.role
        return {**(self.model_extra or {}), "role": role, "content": content}


class ChatRequest(GenerationFields):
    """Body of /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None

    @model_validator(mode="after")
    def _logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ApiErrorInField("top_logprobs", "needs logprobs to be true")
        return self

    @property
    def num_logprobs(self) -> int:
        return (self.top_logprobs or 0) if self.logprobs else -1

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class CompletionRequest(GenerationFields):
    """Body of /v1/completions; `prompt` is checked by `qsa.serve_app.prompts`."""

    prompt: Any = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    add_special_tokens: bool | None = None

    @property
    def num_logprobs(self) -> int:
        return -1 if self.logprobs is None else self.logprobs

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens


class ApiErrorInField(ValueError):
    """A rule between fields that blames one of them."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


Body = TypeVar("Body", ChatRequest, CompletionRequest)


def parse_body(kind: type[Body], values: Any) -> Body:
    """Validate the decoded JSON of a request.

    Raises:
        ApiError: 400 naming the first wrong field.
    """
    if not isinstance(values, dict):
        raise bad_request(f"the body must be a JSON object, got {_json_type(values)}")
    for name in REFUSED:
        value = values.get(name)
        if value and not any(value == harmless for harmless in ASKS_FOR_NOTHING.get(name, ())):
            raise bad_request(f"{name} is not supported by this server; leave it out", name, "unsupported_parameter")
    try:
        body = kind.model_validate(values)
    except ValidationError as error:
        raise _explain(error) from None
    known = {*HARMLESS, *REFUSED}
    unknown = sorted(name for name in body.model_extra or {} if name not in known)
    if unknown:
        logger.warning("ignored unknown request fields: %s", ", ".join(repr(name[:40]) for name in unknown[:20]))
    return body


def _explain(error: ValidationError) -> ApiError:
    item = error.errors(include_url=False)[0]
    cause = item.get("ctx", {}).get("error")
    path = [str(part) for part in item["loc"]]
    if path and path[0] != "messages":  # elsewhere what follows is a union's branch or a list's index
        path = path[:1]
    param = cause.param if isinstance(cause, ApiErrorInField) else ".".join(path)
    message = item["msg"].removeprefix("Value error, ")
    found = item["input"]
    if item["type"] == "missing":
        return bad_request(f"{param} is required", param, "missing_required_parameter")
    if isinstance(found, (int, float, bool)) or found is None:
        message += f", got {found}"  # strings may be somebody's text
    return bad_request(f"{param}: {message[:300]}", param, "invalid_value")


def _json_type(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")


@dataclass(frozen=True)
class ModelLimits:
    """The numbers of the served model that requests are checked against."""

    max_model_len: int
    longest_sequence: int  # tokens that the pools hold of a request that is alone
    vocab_size: int
    sparse_ids: frozenset[int]
    default_sparse_id: int
    max_sequences_waiting: int  # sequences that may run and wait together
    default_max_tokens: int | None


@dataclass(frozen=True)
class GenerationOptions:
    """A validated request without its prompts; `sampling.max_tokens` is settled by `for_prompt`."""

    sampling: SamplingParams
    token_limit: int | None
    n: int
    stop: tuple[str, ...]
    sparse_id: int
    priority: int
    stream: bool
    include_usage: bool
    return_progress: bool

    def for_prompt(self, prompt_len: int, limits: ModelLimits, what: str) -> SamplingParams:
        """Sampling parameters with `max_tokens` settled.

        Raises:
            ContextLengthError: prompt and tokens to generate exceed the context; the message has the three numbers.
        """
        rest = limits.max_model_len - prompt_len
        wanted = self.token_limit
        if wanted is None:
            fits = min(rest, limits.longest_sequence - prompt_len)
            wanted = max(1, fits if limits.default_max_tokens is None else min(fits, limits.default_max_tokens))
        if wanted > rest:
            part = "messages" if what == "messages" else "prompt"
            raise ContextLengthError(
                f"This model's maximum context length is {limits.max_model_len} tokens. However, you requested"
                f" {prompt_len + wanted} tokens ({prompt_len} in the {part}, {wanted} in the completion)."
                f" Please reduce the length of the {part} or completion.",
                param=what,
                code="context_length_exceeded",
            )
        return replace(self.sampling, max_tokens=wanted)


def resolve_options(body: ChatRequest | CompletionRequest, limits: ModelLimits) -> GenerationOptions:
    """Check the fields that depend on the model, draw the seed if there is none.

    Raises:
        ApiError: 400 naming the field.
    """
    bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
    check_token_ids("logit_bias", list(bias), limits.vocab_size)
    check_token_ids("stop_token_ids", body.stop_token_ids or [], limits.vocab_size)
    sparse_id = limits.default_sparse_id if body.sparse_id is None else body.sparse_id
    if sparse_id not in limits.sparse_ids:
        raise bad_request(f"sparse_id {sparse_id} is not registered; there are {sorted(limits.sparse_ids)}", "sparse_id")
    # beyond the vocabulary top_k keeps everything, and a number of any size could not travel to the stages
    top_k, top_p = min(max(body.top_k or 0, 0), limits.vocab_size), 1.0 if body.top_p is None else float(body.top_p)
    if top_p == 0:
        top_k, top_p = 1, 1.0
    sampling = SamplingParams(
        temperature=1.0 if body.temperature is None else float(body.temperature),
        top_k=top_k,
        top_p=top_p,
        min_p=float(body.min_p or 0),
        # 53 bits survive every JSON reader
        seed=secrets.randbits(53) if body.seed is None else body.seed % SEED_RANGE,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        logit_bias=tuple(sorted(bias.items())),
        logprobs=body.num_logprobs,
        presence_penalty=float(body.presence_penalty or 0),
        frequency_penalty=float(body.frequency_penalty or 0),
        repetition_penalty=1.0 if body.repetition_penalty is None else float(body.repetition_penalty),
    )
    return GenerationOptions(
        sampling=sampling,
        token_limit=body.token_limit,
        n=body.n or 1,
        stop=body.stop_strings,
        sparse_id=sparse_id,
        priority=body.priority or 0,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        return_progress=bool(body.return_progress),
    )


def child_sampling(sampling: SamplingParams, child: int) -> SamplingParams:
    """Parameters of a prompt's child of that number: seed + child."""
    return replace(sampling, seed=(sampling.seed + child) % SEED_RANGE) if child else sampling


def check_token_ids(param: str, token_ids: list[int], vocab_size: int) -> None:
    """Refuse ids outside the model's vocabulary."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise bad_request(f"{param}: token id {wrong} is outside the vocabulary [0, {vocab_size})", param, "invalid_value")


def finite(value: float | None) -> float | None:
    """A log-probability that strict JSON can hold: impossible is -9999, unknown is null."""
    if value is None or math.isnan(value):
        return None
    return max(value, -9999.0) if value < 0 else min(value, 0.0)
