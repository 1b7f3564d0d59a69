"""Prompts of a request as token ids: the chat template or the completion prompt in its four forms, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pydantic_core import from_json

from qsa.model.tokenizer import Tokenizer
from qsa.serve_app.api_types import ChatRequest, CompletionRequest, check_token_ids
from qsa.serve_app.chat_template import ChatTemplate
from qsa.serve_app.errors import bad_request

INLINE_BYTES = 16 << 10  # a body up to here costs the event loop less than a millisecond or two
Result = TypeVar("Result")


class Workers:
    """Two threads for long inputs, so that one of them never holds up the event loop, nor both the short ones."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="qsa-prompt")

    async def run(self, size: int, call: Callable[..., Result], *args: Any) -> Result:
        """Call at once when the input is small, else in a thread."""
        if size <= INLINE_BYTES:
            return call(*args)
        return await asyncio.get_running_loop().run_in_executor(self._pool, call, *args)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def decode_json(body: bytes) -> Any:
    """Raises: ApiError 400 for what is not JSON in UTF-8."""
    try:
        return from_json(body, allow_inf_nan=True)
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None


class PromptEncoder:
    """Token ids of both kinds of request. Exactly one BOS where the model wants one."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._template = ChatTemplate(tokenizer)

    def encode_chat(self, body: ChatRequest) -> list[list[int]]:
        return [
            self._template.encode(
                [message.to_template() for message in body.messages],
                add_generation_prompt=body.add_generation_prompt is not False,
                variables=body.chat_template_kwargs,
            )
        ]

    def encode_completion(self, body: CompletionRequest) -> list[list[int]]:
        """A string, token ids, or a list of either.

        Raises:
            ApiError: 400, an empty prompt, a wrong type, an id outside the vocabulary.
        """
        prompt = body.prompt
        if isinstance(prompt, str):
            return [self._encode_text(prompt, body)]
        if not isinstance(prompt, list) or not prompt:
            found = "an empty list" if prompt == [] else "nothing" if prompt is None else type(prompt).__name__
            raise bad_request(f"prompt must be a string, token ids, or a list of either; got {found}", "prompt")
        if all(isinstance(item, str) for item in prompt):
            return [self._encode_text(text, body) for text in prompt]
        if all(isinstance(item, list) for item in prompt):
            return [self._check_ids(ids) for ids in prompt]
        return [self._check_ids(prompt)]

    def _encode_text(self, text: str, body: CompletionRequest) -> list[int]:
        if not text:
            raise bad_request("prompt must not be empty", "prompt", "empty_prompt")
        add_bos = False if body.add_special_tokens is False else None
        token_ids = self._tokenizer.encode(text, parse_special=True, add_bos=add_bos)
        if not token_ids:
            raise bad_request("prompt has no tokens", "prompt", "empty_prompt")
        return token_ids

    def _check_ids(self, token_ids: list[Any]) -> list[int]:
        if not token_ids:
            raise bad_request("prompt must not be empty", "prompt", "empty_prompt")
        if set(map(type, token_ids)) != {int}:
            raise bad_request("prompt must not mix token ids with other things", "prompt")
        check_token_ids("prompt", token_ids, self._vocab_size)
        return token_ids
