"""A real HTTP server around a scripted engine: `serve_api(engine)` gives a base URL, on a free port of 127.0.0.1."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests
import uvicorn
from fakes import FakeEngine, text_script, wait_until
from ray_cluster import free_ports

from qsa.config import EngineConfig, make_config
from qsa.serve_app.api import make_api
from qsa.serve_app.warm_up import WarmUp


class LiveServer:
    """uvicorn in a thread. `post` and `get` return `requests` responses, `stream` the events of a stream."""

    def __init__(self, engine: Any, config: EngineConfig, warm_up: WarmUp | None = None) -> None:
        self.engine = engine
        self.app = make_api(engine, config, warm_up)
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        settings = uvicorn.Config(self.app, host="127.0.0.1", port=self.port, log_level="warning", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(settings)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        wait_until(lambda: self._server.started, 10)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self._server.serve())
        self.loop.close()

    def get(self, path: str, **options: Any) -> requests.Response:
        return requests.get(self.url + path, timeout=20, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> requests.Response:
        if body is not None:
            options["json"] = body
        return requests.post(self.url + path, timeout=20, **options)

    def chat(self, text: str = "hi", **fields: Any) -> requests.Response:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields})

    def complete(self, prompt: Any = "hi", **fields: Any) -> requests.Response:
        return self.post("/v1/completions", {"prompt": prompt, **fields})

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """All events: dicts, the string [DONE], and comments as strings that begin with a colon."""
        with requests.post(self.url + path, json={**body, "stream": True}, stream=True, timeout=20) as response:
            assert response.status_code == 200, response.text
            assert response.headers["content-type"].startswith("text/event-stream")
            return [read_event(line) for line in response.iter_lines() if line]

    def stream_chat(self, **fields: Any) -> list[Any]:
        return self.stream("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **fields})

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)


def read_event(line: bytes) -> Any:
    text = line.decode()
    if text.startswith(":"):
        return text
    assert text.startswith("data: "), text
    data = text.removeprefix("data: ")
    return data if data == "[DONE]" else json.loads(data, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def _servers() -> Iterator[Callable[..., LiveServer]]:
    with contextlib.ExitStack() as stack:

        def start(engine: Any, settings: dict[str, Any] | None = None, warm_up: WarmUp | None = None) -> LiveServer:
            if not hasattr(engine, "generate"):
                engine = FakeEngine(engine)
            server = LiveServer(engine, make_config(settings or {}), warm_up)
            stack.callback(server.close)
            return server

        yield start


@pytest.fixture
def serve_api() -> Iterator[Callable[..., LiveServer]]:
    """`serve_api(engine_or_script, {"limits": {...}})` starts a server; all end with the test."""
    yield from _servers()


@pytest.fixture(scope="module")
def shared_server() -> Iterator[LiveServer]:
    """One server that says "ok", for all tests of a file that need no more."""
    for start in _servers():
        yield start(text_script("ok"))
