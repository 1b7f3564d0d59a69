"""Server-sent events, and leaving together with the client: a stream always ends, and nothing runs on for nobody."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from qsa.serve_app.errors import as_api_error, is_foreseen
from qsa.serve_app.responses import to_json

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

KEEP_ALIVE = ": keep-alive\n\n"
DONE = "data: [DONE]\n\n"


class ClientGone(Exception):
    """The client closed its connection, or the proxy between is gone."""


def event(value: dict[str, Any]) -> str:
    return f"data: {to_json(value)}\n\n"


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has left. A proxy that cannot be asked any more counts as a client that left."""
    with contextlib.suppress(Exception):
        while (await receive())["type"] != "http.disconnect":
            pass


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled when the client leaves first.

    Raises:
        ClientGone: the client left; `work` has ended.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for item in (task, gone):
            item.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class EventStream(Response):
    """Sends events as they come. It ends with [DONE] in every case in which the client is still there.

    `on_end` is called once, with the exception that ended the stream, also one that the client was told of, or None.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[str, None], on_end: Callable[[BaseException | None], Awaitable[None] | None] | None = None
    ) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self._events = events
        self._on_end = on_end
        self._told: Exception | None = None
        # X-Accel-Buffering: reverse proxies must not collect what is meant to be seen at once
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self.raw_headers = [item for item in self.raw_headers if item[0] != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error: BaseException | None = None
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await run_until_disconnect(receive, self._send_events(send))
        except ClientGone as gone:
            error = gone
        except BaseException as other:
            error = other
            raise
        finally:
            await self._events.aclose()
            if self._on_end is not None:
                result = self._on_end(error or self._told)
                if result is not None:
                    await result

    async def _send_events(self, send: Send) -> None:
        async def write(text: str) -> None:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})

        try:
            async for text in self._events:
                await write(text)
        except Exception as error:
            self._told = error
            if not is_foreseen(error):
                logger.exception("a stream failed")
            await write(event(as_api_error(error).body))
        await write(DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
