"""OpenAI batch files on a Ray cluster, without HTTP: one worker actor owns an engine and answers line by line.

The same code serves a Ray job, whose driver runs in the cluster, and a Ray client, whose driver runs elsewhere and needs
neither the model nor a GPU: only lines of text travel. Requests pass through the HTTP API's own code, in-process.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from uuid import uuid4

import ray
from starlette.types import ASGIApp, Message

from qsa.actors.engine import Engine
from qsa.config import EngineConfig
from qsa.errors import ConfigError
from qsa.serve_app.api import make_api

URLS = ("/v1/chat/completions", "/v1/completions")
WORKER_CPUS = 0.25
PROGRESS_S = 1.0  # a worker that starts is asked this often how far it is


def read_lines(lines: Iterable[str], source: str = "the input") -> Iterator[dict[str, Any]]:
    """The requests of a batch file: objects with custom_id, url and body, a line each; empty lines are skipped.

    Raises:
        ConfigError: a line that is not such a request, by number.
    """
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{source}, line {number}: not JSON: {error}") from None
        if not isinstance(item, dict) or not isinstance(item.get("body"), dict):
            raise ConfigError(f"{source}, line {number}: wanted an object with custom_id, url and body")
        custom_id, url = item.get("custom_id"), item.get("url")
        if not isinstance(custom_id, str) or custom_id in seen:
            raise ConfigError(f"{source}, line {number}: custom_id must be a string that no other line has, got {custom_id!r}")
        if url not in URLS:
            raise ConfigError(f"{source}, line {number}: url must be one of {', '.join(URLS)}, got {url!r}")
        if item["body"].get("stream"):
            raise ConfigError(f"{source}, line {number}: body.stream is not possible in a batch")
        seen.add(custom_id)
        yield item


async def post(app: ASGIApp, path: str, body: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
    """Call an ASGI app without a network. Returns status, headers and the decoded JSON."""
    request = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    status, headers, parts = 500, {}, []
    disconnected = asyncio.Event()  # never set

    async def receive() -> Message:
        if not request:
            await disconnected.wait()
        return request.pop()

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status = message["status"]
            headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            parts.append(message.get("body", b""))

    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": [],
        "client": None,
        "server": None,
    }
    await app(scope, receive, send)
    return status, headers, json.loads(b"".join(parts))


async def answer_line(app: ASGIApp, item: dict[str, Any]) -> dict[str, Any]:
    """The output line of one request; waits and tries again while the engine is busy."""
    while True:
        status, headers, body = await post(app, item["url"], item["body"])
        if status != 429:
            break
        await asyncio.sleep(float(headers.get("retry-after", 1)))
    return {
        "id": f"batch_req_{uuid4().hex}",
        "custom_id": item["custom_id"],
        "response": {"status_code": status, "request_id": body.get("id"), "body": body},
        "error": None,
    }


class BatchWorker:
    """Owns an engine in the cluster and answers requests with it. Ends with its driver."""

    def __init__(self, settings: dict[str, Any], name: str) -> None:
        self._config = EngineConfig.model_validate(settings)
        self._name = name
        self._engine: Engine | None = None
        self._app: ASGIApp | None = None
        self._progress = "starting the engine"

    def __repr__(self) -> str:
        return f"BatchWorker({self._config.model.path})"

    async def start(self) -> str:
        """Start the engine; returns the model's name.

        Raises:
            QSAError: it cannot start.
        """
        self._engine = await asyncio.to_thread(Engine.start, self._config, name=self._name, on_progress=self._note)
        # keys are for networks; whoever can call this actor has the cluster
        server = self._config.server.model_copy(update={"api_keys": ()})
        self._app = make_api(self._engine, self._config.model_copy(update={"server": server}))
        return self._engine.model_name

    def _note(self, text: str) -> None:
        self._progress = text

    async def progress(self) -> str:
        """What `start` is doing, in a few words."""
        return self._progress

    async def answer(self, item: dict[str, Any]) -> dict[str, Any]:
        assert self._app is not None, "start comes first"
        return await answer_line(self._app, item)

    async def close(self) -> None:
        """End the engine. Calling it again does nothing."""
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)


def run_batch(
    items: Iterable[dict[str, Any]],
    config: EngineConfig,
    *,
    concurrency: int = 16,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Iterator[dict[str, Any]]:
    """Answer requests on the Ray cluster this process is attached to, as a driver, a job or a client.

    on_progress: told what is going on until the engine is ready.

    Yields:
        Output lines in the input's order, each as soon as it and all before it are answered.

    Raises:
        QSAError: the engine cannot start; nothing is left running.
    """
    name = f"batch/{uuid4().hex[:8]}"
    actor: Any = ray.remote(num_cpus=WORKER_CPUS, max_restarts=0)(BatchWorker)
    free = ray.available_resources().get("CPU", 0.0)  # type: ignore[no-untyped-call]
    on_progress(f"starting a worker: it reserves {WORKER_CPUS:g} CPU, the cluster has {free:g} free")
    worker = actor.remote(config.model_dump(mode="json"), name)
    try:
        _wait_for_start(worker, on_progress)
        pending: list[Any] = []
        for item in items:
            if len(pending) >= concurrency:
                yield _get(pending.pop(0))
            pending.append(worker.answer.remote(item))
        while pending:
            yield _get(pending.pop(0))
        _get(worker.close.remote())
    finally:
        ray.kill(worker)


def _wait_for_start(worker: Any, on_progress: Callable[[str], None]) -> None:
    started, asked, said = worker.start.remote(), worker.progress.remote(), ""
    while not ray.wait([started], timeout=PROGRESS_S)[0]:
        if ray.wait([asked], timeout=0)[0]:
            text = _get(asked)
            if text != said:
                on_progress(said := text)
            asked = worker.progress.remote()
    _get(started)


def _get(ref: Any) -> Any:
    """A call's result, or the exception it raised, without Ray's wrapping."""
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, Exception) else error) from None
