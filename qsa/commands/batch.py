"""`qsa batch`: answer a file of OpenAI batch requests through a server; one line in, one line out, in the same order."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import uuid
from pathlib import Path
from typing import Any, TextIO

import aiohttp

from qsa.client import Client
from qsa.errors import ConfigError
from qsa.serve_app.batch import read_lines
from qsa.settings import config_unless_url
from qsa.terminal import notes, server_at

MAX_TRIES = 100  # of one request at a busy server, which says how long to wait
Item = dict[str, Any]


def read_batch(path: Path) -> list[Item]:
    """The requests of a JSONL file.

    Raises:
        ConfigError: the file cannot be read, or a line is not a batch request; the message names the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    return list(read_lines(text.splitlines(), str(path)))


async def answer(client: Client, item: Item, sparse_id: int | None) -> Item:
    """One line of the output; a busy server is asked again after the time it names."""
    body = item["body"] if sparse_id is None else {"sparse_id": sparse_id, **item["body"]}
    result: Item = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": item["custom_id"], "response": None, "error": None}
    try:
        for _ in range(MAX_TRIES):
            status, reply, retry_after_s = await client.post(item["url"], body)
            if status != 429:
                break
            await asyncio.sleep(min(max(retry_after_s, 0.1), 30.0))
    except (aiohttp.ClientError, OSError) as error:
        result["error"] = {"code": "connection_error", "message": str(error)}
        return result
    result["response"] = {"status_code": status, "request_id": reply.get("id"), "body": reply}
    return result


def is_success(result: Item) -> bool:
    return bool(result["response"] is not None and result["response"]["status_code"] == 200)


async def answer_all(client: Client, items: list[Item], output: TextIO, concurrency: int, sparse_id: int | None = None) -> int:
    """Answer every line, `concurrency` at a time, writing each as soon as all before it are written.

    Returns:
        How many failed.
    """
    queue = iter(enumerate(items))
    done: dict[int, Item] = {}
    written = failed = 0

    async def work() -> None:
        nonlocal written, failed
        for index, item in queue:
            done[index] = await answer(client, item, sparse_id)
            while written in done:
                result = done.pop(written)
                output.write(json.dumps(result, ensure_ascii=False) + "\n")
                output.flush()
                written += 1
                failed += not is_success(result)

    await asyncio.gather(*(work() for _ in range(min(concurrency, len(items)))))
    return failed


async def _run(url: str, args: argparse.Namespace, items: list[Item], output: TextIO) -> int:
    async with Client(url, args.api_key) as client:
        return await answer_all(client, items, output, args.concurrency, args.sparse)


def run(args: argparse.Namespace) -> int:
    if args.concurrency < 1:
        raise ConfigError(f"--concurrency must be at least 1, got {args.concurrency}")
    if Path(args.output).resolve() == Path(args.input).resolve():
        raise ConfigError(f"the answers would overwrite the requests in {args.input}; name another output file")
    items = read_batch(Path(args.input))
    config = config_unless_url(args)
    with contextlib.ExitStack() as stack:
        try:  # before the engine starts: a wrong path is told at once
            output = stack.enter_context(Path(args.output).open("w", encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot write {args.output}: {error.strerror}") from None
        url = stack.enter_context(server_at(args.url, config))
        failed = asyncio.run(_run(url, args, items, output))
    notes.print(f"{len(items) - failed} of {len(items)} requests answered, in {args.output}", markup=False)
    return 1 if failed else 0
