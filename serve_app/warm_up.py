"""A replica between loaded and ready: what /ready says, who waits, and the first requests, which are the server's own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Message

from qsa.actors.warm_up import NUM_TOKENS, TEXT, first_prompts
from qsa.errors import EngineDeadError

POLL_S = 0.05


class WarmUp:
    """The state of a warm-up. Reported to from any thread.

    Attributes:
        reason: why requests are not answered yet, in words; None when they are.
        failed: why they never will be; None while all is well.
        numbers: steps done and steps in all.
    """

    def __init__(self) -> None:
        self.reason: str | None = "the engine is loading"
        self.failed: str | None = None
        self.numbers = (0, 0)

    def report(self, done: int, total: int, text: str) -> None:
        self.numbers, self.reason = (done, total), text

    def finish(self) -> None:
        self.reason = None

    def fail(self, error: BaseException) -> None:
        self.failed = self.reason = str(error)

    async def wait(self, timeout_s: float) -> None:
        """Wait until requests are answered.

        Raises:
            EngineDeadError: not so soon; the message is the state.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self.reason is not None:
            if self.failed is not None or asyncio.get_running_loop().time() >= deadline:
                raise EngineDeadError(self.reason)
            await asyncio.sleep(POLL_S)


async def send_first_requests(app: ASGIApp, engine: Any, num_tokens: int, api_keys: Sequence[str]) -> None:
    """Through the whole of HTTP: completions of a long and a short prompt, streamed and not, and a chat where the model knows
    how. What they are told does not matter; that they are answered does.

    Raises:
        EngineDeadError: one was not.
    """
    long, short = first_prompts(engine.tokenizer, num_tokens)
    fields = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    requests: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": long, "stream": True, **fields}),
        ("/v1/completions", {"prompt": TEXT, "stream": True, **fields}),
        ("/v1/completions", {"prompt": short, **fields}),
    ]
    if engine.tokenizer.chat_template is not None:
        chat = {"messages": [{"role": "user", "content": TEXT}], "stream": True, **fields}
        requests.append(("/v1/chat/completions", chat))
    for path, body in requests:
        status, answer = await call(app, path, json.dumps(body).encode(), api_keys)
        if status >= 500 or b'data: {"error"' in answer:  # 400: the context is too short for it
            raise EngineDeadError(f"a first request to {path} was answered {status}: {answer[:300].decode(errors='replace')}")


async def call(app: ASGIApp, path: str, body: bytes, api_keys: Sequence[str] = ()) -> tuple[int, bytes]:
    """POST to an application in this process; status and body of its answer."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if api_keys:
        headers.append((b"authorization", f"Bearer {api_keys[0]}".encode()))
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0),
    }
    was_read, status, parts = False, 0, []

    async def receive() -> Message:
        nonlocal was_read
        if was_read:
            await asyncio.Event().wait()  # the client stays
        was_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = int(message["status"])
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, b"".join(parts)
