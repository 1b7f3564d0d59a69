"""Scripted stand-ins for tests of HTTP: an engine that says what a test wrote down, over a vocabulary of bytes and words."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tokenizers

from qsa.errors import ContextLengthError, QSAError
from qsa.model.tokenizer import Tokenizer, byte_of_character
from qsa.scheduler.request import FinishReason, RequestOutput, SamplingParams, TokenOutput

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a test<|im_end|>\n' }}{% endif %}"
    "{% if message['role'] == 'tool' %}{{ raise_exception('tools are not spoken here') }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


CONTROL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


def make_tokenizer(words: Sequence[str] = (), *, chat_template: str | None = CHATML, adds_bos: bool = False) -> Tokenizer:
    """A real tokenizer over an easy vocabulary: ids 0 to 255 are the bytes, then CONTROL, then `words`."""
    characters = {byte: character for character, byte in byte_of_character().items()}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({characters[byte]: byte for byte in range(256)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in CONTROL])
    backend.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in words])
    return Tokenizer(
        backend,
        bos_id=256,
        eos_ids=(257, 258),
        adds_bos=adds_bos,
        special_ids=range(256, 256 + len(CONTROL)),
        chat_template=chat_template,
    )


def word_id(tokenizer: Tokenizer, word: str) -> int:
    """The id of one of the `words`."""
    return next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == word.encode())


@dataclass(frozen=True)
class Script:
    """What the engine does with a request.

    Attributes:
        tokens:     generated, one a step; then the sequence ends with `finish`.
        step_s:     pause before every token.
        prefill:    values of computed_len reported before the first token, `prefill_s` apart.
        fail_at:    the step at which the engine reports an error for the sequence.
        raise_at:   the step at which the iterator raises `error`; 0 is before anything was accepted.
        logprob:    of every token; `top` are its alternatives.
    """

    tokens: Sequence[int] = ()
    finish: FinishReason = FinishReason.STOP
    step_s: float = 0.0
    prefill: Sequence[int] = ()
    prefill_s: float = 0.0
    fail_at: int | None = None
    raise_at: int | None = None
    error: Exception = field(default_factory=lambda: QSAError("scripted"))
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class FakeStats:
    num_running: int
    aborted: int
    stages: tuple[dict[str, int], ...] = ({"chunks": 3}, {"chunks": 4})


@dataclass(frozen=True)
class FakeHealth:
    ok: bool = True
    reason: str | None = None
    heartbeat_age_s: float = 0.1
    is_dead: bool = False


@dataclass(frozen=True)
class Call:
    """A request as the engine saw it."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    sparse_id: int | None
    priority: int
    request_id: str


class FakeEngine:
    """Engine's interface; `script(call)` says what happens. `calls`, `running` and `aborted` say what happened."""

    def __init__(
        self,
        script: Script | Callable[[Call], Script],
        *,
        tokenizer: Any = None,
        max_model_len: int = 8192,
        longest_sequence: int | None = None,
        model_name: str = "fake-model",
    ) -> None:
        self.tokenizer = tokenizer or make_tokenizer()
        self.max_model_len = max_model_len
        self.longest_sequence = longest_sequence or max_model_len
        self.model_name = model_name
        self.eos_token_ids = tuple(self.tokenizer.eos_ids)
        self.health_now = FakeHealth()
        self.calls: list[Call] = []
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self._script = script if callable(script) else lambda _: script

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        sparse_id: int | None = None,
        priority: int = 0,
        request_id: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        assert request_id is not None and request_id not in self.running, "the server's own ids are fresh"
        call = Call(tuple(prompt_token_ids), sampling, sparse_id, priority, request_id)
        self.calls.append(call)
        script = self._script(call)
        if len(call.prompt) + sampling.max_tokens > self.max_model_len:
            raise ContextLengthError("the API let a request pass that is too long")
        if script.raise_at == 0:
            raise script.error
        self.running.add(request_id)
        ended = False
        try:
            prompt_len = len(call.prompt)
            output = RequestOutput(request_id, prompt_len=prompt_len)
            yield output
            for computed_len in script.prefill:
                await asyncio.sleep(script.prefill_s)
                yield replace(output, computed_len=computed_len)
            output = replace(output, computed_len=prompt_len, attended_share=0.25)
            ended_by_length = len(script.tokens) > sampling.max_tokens
            tokens = script.tokens[: sampling.max_tokens]
            for step, token_id in enumerate(tokens):
                await asyncio.sleep(script.step_s)
                if step == script.fail_at:
                    ended = True
                    yield replace(output, finish_reason=FinishReason.ERROR, error=f"scripted failure at step {step}")
                    return
                if step == script.raise_at:
                    raise script.error
                token = TokenOutput(token_id, script.logprob, script.top)
                last = step == len(tokens) - 1
                ended = last
                finish = (FinishReason.LENGTH if ended_by_length else script.finish) if last else None
                yield replace(output, tokens=(token,), finish_reason=finish)
            if not tokens:
                ended = True
                yield replace(output, finish_reason=script.finish)
        finally:
            self.running.discard(request_id)
            if not ended:
                self.aborted.append(request_id)

    async def abort(self, request_id: str) -> None:
        if request_id in self.running:
            self.running.discard(request_id)
            self.aborted.append(request_id)

    async def stats(self) -> FakeStats:
        return FakeStats(len(self.running), len(self.aborted))

    async def health(self) -> FakeHealth:
        return self.health_now

    def close(self) -> None:
        self.running.clear()


def text_script(text: str, **options: Any) -> Script:
    """A script that says `text`, a byte a step, then ends as models do."""
    return Script(tokens=[*text.encode(), 257], **options)


def wait_until(condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
    """Poll a condition; fail when it does not come true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
