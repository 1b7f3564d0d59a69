"""An HTTP client of the OpenAI-style API: one request, streamed or not, with what a terminal or a measurement wants to know."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp

from qsa.errors import EngineDeadError, OverloadedError, QSAError, RequestError


@dataclass(frozen=True)
class Progress:
    """How far the prefill of a streamed request has come, in tokens."""

    processed: int
    total: int


@dataclass(frozen=True)
class Delta:
    """A piece of the answer, as it arrived."""

    text: str


@dataclass
class Timings:
    """When things arrived, in seconds after the request was sent; filled while a stream is read."""

    first_text_s: float | None = None
    last_text_s: float | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None

    @property
    def prompt_tokens(self) -> int:
        return int(self.usage.get("prompt_tokens", 0))

    @property
    def completion_tokens(self) -> int:
        return int(self.usage.get("completion_tokens", 0))

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Prompt tokens over the time to the first token, everything on the way included."""
        return self.prompt_tokens / self.first_text_s if self.first_text_s and self.prompt_tokens else None

    @property
    def decode_ms_per_token(self) -> float | None:
        """Time between tokens after the first one, in milliseconds."""
        if self.first_text_s is None or self.last_text_s is None or self.completion_tokens < 2:
            return None
        return (self.last_text_s - self.first_text_s) * 1e3 / (self.completion_tokens - 1)

    @property
    def decode_tokens_per_s(self) -> float | None:
        pace = self.decode_ms_per_token
        return 1e3 / pace if pace else None

    @property
    def attended_share(self) -> float | None:
        """Attended tokens over context tokens, as the server reports it in `usage.qsa`."""
        share = (self.usage.get("qsa") or {}).get("attended_share")
        return None if share is None else float(share)


def _raise_for(status: int, body: str, retry_after: str | None = None) -> None:
    """Turn an error reply into the exception a caller is meant to catch."""
    try:
        error = json.loads(body)["error"]
        message, param, code = str(error["message"]), error.get("param"), error.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, param, code = f"HTTP {status}: {body[:200]}", None, None
    if status == 429:
        raise OverloadedError(message, float(retry_after or 1))
    if status == 503:
        raise EngineDeadError(message)
    raise RequestError(message, param, code) if 400 <= status < 500 else QSAError(message)


def server_url(url: str) -> str:
    """The server's root, from the root itself, its OpenAI base URL (`.../v1`), or either without the scheme."""
    root = url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    return root if "://" in root else f"http://{root}"


class Client:
    """A connection to one server. Use as an async context manager."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._url = server_url(url)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)  # a long prefill is silent but for comments
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        assert self._session is not None, "use `async with Client(...)`"
        return self._session

    async def get(self, path: str) -> Any:
        """The JSON body of a GET.

        Raises:
            QSAError: the server is not there, or answered with an error.
        """
        try:
            async with self.session.get(self._url + path) as reply:
                body = await reply.text()
        except (aiohttp.ClientError, OSError) as error:
            raise EngineDeadError(f"no answer from {self._url}: {error}") from None
        if reply.status != 200:
            _raise_for(reply.status, body)
        return json.loads(body)

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any, float]:
        """POST without streaming: status, JSON body (an error's too), and the seconds of `Retry-After`, 0 when absent."""
        async with self.session.post(self._url + path, json=body) as reply:
            text = await reply.text()
            try:
                content = json.loads(text)
            except ValueError:
                content = {"error": {"message": f"HTTP {reply.status}: {text[:200]}", "type": "server_error"}}
            return reply.status, content, float(reply.headers.get("Retry-After", 0))

    async def stream(self, path: str, body: dict[str, Any], timings: Timings) -> AsyncIterator[Progress | Delta]:
        """POST with streaming; yields prefill progress and text, and leaves times, usage and finish reason in `timings`.

        Raises:
            RequestError, OverloadedError, EngineDeadError, QSAError: as the reply's status or its error event says.
        """
        body = {**body, "stream": True, "return_progress": True, "stream_options": {"include_usage": True}}
        begin = time.perf_counter()
        try:
            async with self.session.post(self._url + path, json=body) as reply:
                if reply.status != 200:
                    _raise_for(reply.status, await reply.text(), reply.headers.get("Retry-After"))
                async for event in _events(reply.content):
                    for item in _read_event(event, timings):
                        if isinstance(item, Delta):
                            timings.last_text_s = time.perf_counter() - begin
                            if timings.first_text_s is None:
                                timings.first_text_s = timings.last_text_s
                        yield item
        except aiohttp.ClientConnectorError:
            raise EngineDeadError(f"no server answers at {self._url}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineDeadError(f"the connection to {self._url} failed: {error}") from None
        if timings.finish_reason is None:
            raise EngineDeadError("the stream ended without a finish reason: the server went away")


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream, up to `[DONE]`; comments are skipped. Every event is one line."""
    buffer = b""
    async for block in content.iter_any():
        *lines, buffer = (buffer + block).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield json.loads(data)


def _read_event(event: dict[str, Any], timings: Timings) -> list[Progress | Delta]:
    if "error" in event:
        _raise_for(int(event["error"].get("status") or 500), json.dumps(event))
    if event.get("usage"):
        timings.usage = event["usage"]
    items: list[Progress | Delta] = []
    if progress := event.get("prompt_progress"):
        items.append(Progress(int(progress["processed"]), int(progress["total"])))
    for choice in event.get("choices", []):
        text = (choice.get("delta") or {}).get("content") or choice.get("text") or ""
        if choice.get("finish_reason"):
            timings.finish_reason = choice["finish_reason"]
        if text:
            items.append(Delta(text))
    return items
