"""A model's chat template, rendered in a sandbox so that what a user writes cannot become a control token.

Templates mix two kinds of text: their own, in which `<|im_end|>` means the control token, and the client's, in which it
means ten characters. Before rendering, control-token strings inside the client's strings are broken by a marker, a
Unicode noncharacter that occurs in none of them; after rendering, control tokens are recognised only where no marker
breaks them, and the markers are dropped. Strings are searched with `in` and `replace`, not with regular expressions:
five megabytes of text must not hold the interpreter for half a second.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from qsa.model.tokenizer import Tokenizer
from qsa.serve_app.errors import bad_request

MARKERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


class TemplateRefusal(Exception):
    """A template called raise_exception()."""


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - the base class's own spelling

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def make_environment() -> ImmutableSandboxedEnvironment:
    """The environment that Hugging Face templates are written for."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    return environment


class ChatTemplate:
    """Turns messages into token ids with the model's own template. Holds the compiled template and the control tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        source = tokenizer.chat_template
        self._template = make_environment().from_string(source) if source else None
        self._control = {text: token for token in tokenizer.special_ids if len(text := self._text_of(token)) > 1}
        self._heads = {text[:size] for text in self._control for size in range(1, len(text))}
        self._tails = {text[-size:] for text in self._control for size in range(1, len(text))}
        self._longest = max(map(len, self._control), default=0)
        self._variables = {"bos_token": tokenizer.bos_token or "", "eos_token": tokenizer.eos_token or ""}

    def _text_of(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def encode(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True, variables: dict[str, Any] | None = None
    ) -> list[int]:
        """Render and tokenise.

        Raises:
            ApiError: 400 when the model has no template, or its template refuses or cannot handle these messages.
        """
        if self._template is None:
            raise bad_request("this model has no chat template; use /v1/completions", "messages", "no_chat_template")
        marker = next((mark for mark in MARKERS if not _occurs(mark, [messages, variables])), None)
        if marker is None:
            raise bad_request("messages: holds too many kinds of Unicode noncharacters", "messages", "invalid_value")
        try:
            text = self._template.render(
                **{
                    **self._variables,
                    **self._guard(variables or {}, marker),
                    "messages": self._guard(list(messages), marker),
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except TemplateRefusal as error:
            raise bad_request(f"the model's chat template refused the messages: {error}", "messages", "chat_template") from None
        except Exception as error:
            # whatever a template does with messages it was not written for
            message = f"the model's chat template cannot render the messages: {type(error).__name__}: {str(error)[:200]}"
            raise bad_request(message, "messages", "chat_template") from None
        token_ids = self._tokenise(text, marker)
        while len(token_ids) > 1 and token_ids[0] == token_ids[1] == self._tokenizer.bos_id:
            del token_ids[0]  # a template that writes BOS twice
        return token_ids

    def _guard(self, value: Any, marker: str) -> Any:
        """The same value with every control-token string, whole or cut at an edge, broken by the marker."""
        if isinstance(value, dict):
            return {
                name if name.isidentifier() else self._break(name, marker): self._guard(item, marker)
                for name, item in value.items()
            }
        if isinstance(value, list):
            return [self._guard(item, marker) for item in value]
        return self._break(value, marker) if isinstance(value, str) else value

    def _break(self, text: str, marker: str) -> str:
        for control in self._control:
            if control in text:
                text = text.replace(control, control[0] + marker + control[1:])
        # what begins or ends here could be completed by the text that the template puts beside it
        sizes = range(1, min(self._longest, len(text) + 1))
        if head := max((size for size in sizes if text[-size:] in self._heads), default=0):
            cut = len(text) - head + 1
            text = text[:cut] + marker + text[cut:]
        if tail := max((size for size in sizes if text[:size] in self._tails), default=0):
            text = text[: tail - 1] + marker + text[tail - 1 :]
        return text

    def _tokenise(self, text: str, marker: str) -> list[int]:
        """Control tokens wherever no marker cuts them. A span of no width forbids those that cross its place."""
        parts = text.split(marker)
        cuts = list(accumulate(map(len, parts[:-1])))
        return self._tokenizer.encode("".join(parts), parse_special=True, plain_spans=[(cut, cut) for cut in cuts])


def _occurs(needle: str, value: Any) -> bool:
    if isinstance(value, str):
        return needle in value
    if isinstance(value, dict):
        return any(needle in name or _occurs(needle, item) for name, item in value.items())
    return isinstance(value, list) and any(_occurs(needle, item) for item in value)
