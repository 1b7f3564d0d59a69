"""`qsa batch`: answer a file of OpenAI batch requests through a server; one line in, one line out, in the same order."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import aiohttp

from qsa.client import Client
from qsa.errors import ConfigError
from qsa.settings import config_from
from qsa.terminal import notes, server_at

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
MAX_TRIES = 100  # of one request at a busy server; the server says how long to wait


@dataclass(frozen=True)
class BatchLine:
    """One request of the file."""

    custom_id: str
    url: str
    body: dict[str, Any]


def read_batch(path: Path) -> Iterator[BatchLine]:
    """The requests of a JSONL file; empty lines are skipped.

    Raises:
        ConfigError: the file is missing, or a line is not a batch request; the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    seen: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            item = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where} is not JSON: {error}") from None
        custom_id, url, body = (item.get(key) if isinstance(item, dict) else None for key in ("custom_id", "url", "body"))
        if not isinstance(custom_id, str) or custom_id in seen:
            raise ConfigError(f"{where} wants a custom_id of its own, a string, got {custom_id!r}")
        if url not in ENDPOINTS or not isinstance(body, dict):
            raise ConfigError(f"{where} wants a url of {' or '.join(ENDPOINTS)} and a body, got {url!r}")
        if body.get("stream"):
            raise ConfigError(f"{where} asks for a stream, which a batch cannot give")
        seen.add(custom_id)
        yield BatchLine(custom_id, url, body)


async def answer(client: Client, line: BatchLine, sparse_id: int | None) -> dict[str, Any]:
    """One line of the output; a busy server is asked again after the time it names."""
    body = line.body if sparse_id is None else {"sparse_id": sparse_id, **line.body}
    result: dict[str, Any] = {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": line.custom_id,
        "response": None,
        "error": None,
    }
    try:
        for _ in range(MAX_TRIES):
            status, reply, retry_after_s = await client.post(line.url, body)
            if status != 429:
                break
            await asyncio.sleep(min(max(retry_after_s, 0.1), 30.0))
    except (aiohttp.ClientError, OSError) as error:
        result["error"] = {"code": "connection_error", "message": str(error)}
        return result
    result["response"] = {"status_code": status, "request_id": reply.get("id"), "body": reply}
    return result


def is_success(result: dict[str, Any]) -> bool:
    return bool(result["response"] is not None and result["response"]["status_code"] == 200)


async def answer_all(
    client: Client, lines: list[BatchLine], output: TextIO, concurrency: int, sparse_id: int | None = None
) -> int:
    """Answer every line, `concurrency` at a time, writing each as soon as all before it are written.

    Returns:
        How many failed.
    """
    queue = iter(enumerate(lines))
    done: dict[int, dict[str, Any]] = {}
    written = failed = 0

    async def work() -> None:
        nonlocal written, failed
        for index, line in queue:
            done[index] = await answer(client, line, sparse_id)
            while written in done:
                result = done.pop(written)
                output.write(json.dumps(result, ensure_ascii=False) + "\n")
                output.flush()
                written += 1
                failed += not is_success(result)

    await asyncio.gather(*(work() for _ in range(min(concurrency, len(lines)))))
    return failed


async def _run(url: str, args: argparse.Namespace, lines: list[BatchLine], output: TextIO) -> int:
    async with Client(url, args.api_key) as client:
        return await answer_all(client, lines, output, args.concurrency, args.sparse)


def run(args: argparse.Namespace) -> int:
    if args.concurrency < 1:
        raise ConfigError(f"--concurrency must be at least 1, got {args.concurrency}")
    lines = list(read_batch(Path(args.input)))
    config = config_from(args)
    with contextlib.ExitStack() as stack:
        try:  # before the engine starts: a wrong path is told at once
            output = stack.enter_context(Path(args.output).open("w", encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot write {args.output}: {error.strerror}") from None
        url = stack.enter_context(server_at(args.url, config))
        failed = asyncio.run(_run(url, args, lines, output))
    notes.print(f"{len(lines) - failed} of {len(lines)} requests answered, in {args.output}", markup=False)
    return 1 if failed else 0
