"""Bodies and stream chunks of both endpoints, in OpenAI's form, as plain dicts that are strict JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from qsa.serve_app.generation import Generation, Piece, TokenPiece


def to_json(value: Any) -> str:
    """Compact strict JSON: NaN and infinity are errors here, never in a client's parser."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


@dataclass
class Choice:
    """One sequence of a full answer, collected from its pieces."""

    text: str = ""
    tokens: list[TokenPiece] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.tokens += piece.tokens
        self.finish_reason = piece.finish_reason or self.finish_reason


class Answer:
    """What is the same in all chunks of one answer (`id`, `created`, `model`), and its two forms, chat and completion."""

    def __init__(self, *, is_chat: bool, model: str, seed: int, wants_logprobs: bool, num_top: int) -> None:
        self.is_chat = is_chat
        self.id = ("chatcmpl-" if is_chat else "cmpl-") + uuid4().hex
        self.created = int(time.time())
        self.model = model
        self.seed = seed
        self._wants_logprobs = wants_logprobs
        self._num_top = num_top

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def full(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        kind = "chat.completion" if self.is_chat else "text_completion"
        items = []
        for index, choice in enumerate(choices):
            item: dict[str, Any] = {"index": index, "finish_reason": choice.finish_reason}
            if self.is_chat:
                item["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
            else:
                item["text"] = choice.text
            items.append(item | {"logprobs": self._logprobs(choice.tokens)})
        return self._head(kind) | {"choices": items, "usage": usage, "seed": self.seed}

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        """The chunk with the role; completions have none. It carries the seed."""
        if not self.is_chat:
            return None
        return self._chunk(index, {"role": "assistant", "content": ""}, None, None) | {"seed": self.seed}

    def chunk(self, piece: Piece) -> dict[str, Any]:
        logprobs = self._logprobs(piece.tokens) if piece.tokens else None
        if not self.is_chat:
            return self._chunk(piece.index, {"text": piece.text}, logprobs, piece.finish_reason) | {"seed": self.seed}
        delta = {"content": piece.text} if piece.text or piece.tokens or piece.finish_reason is None else {}
        return self._chunk(piece.index, delta, logprobs, piece.finish_reason)

    def progress_chunk(self, index: int, total: int, processed: int, time_ms: float) -> dict[str, Any]:
        """llama.cpp's `prompt_progress` in a chunk without text."""
        progress = {"total": total, "cache": 0, "processed": processed, "time_ms": round(time_ms, 1)}
        empty: dict[str, Any] = {} if self.is_chat else {"text": ""}
        return self._chunk(index, empty, None, None) | {"prompt_progress": progress}

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        return self._head(self._chunk_kind) | {"choices": [], "usage": usage, "seed": self.seed}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _chunk(self, index: int, content: dict[str, Any], logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
        item: dict[str, Any] = {"index": index}
        item |= {"delta": content} if self.is_chat else content
        item |= {"logprobs": logprobs, "finish_reason": finish_reason}
        return self._head(self._chunk_kind) | {"choices": [item]}

    def _logprobs(self, tokens: Sequence[TokenPiece]) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        if self.is_chat:
            content = [
                _entry(token.data, token.logprob) | {"top_logprobs": [_entry(*top) for top in token.top[: self._num_top]]}
                for token in tokens
            ]
            return {"content": content, "refusal": None}
        return {
            "tokens": [_text(token.data) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{_text(data): p for data, p in token.top[: self._num_top]} for token in tokens],
            "text_offset": [token.text_offset for token in tokens],
        }


def make_usage(generation: Generation, prompt_tokens: int, seed: int) -> dict[str, Any]:
    """Token counts, and under `qsa` how sparse the last step was."""
    completion_tokens = generation.completion_tokens
    share = generation.attended_share
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
        "qsa": {
            "attended_share": None if share is None else round(share, 6),
            "sparse_id": generation.sparse_id,
            "seed": seed,
        },
    }


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _entry(data: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": _text(data), "logprob": logprob, "bytes": list(data)}
