"""`qsa generate`: answer one prompt, streaming to standard output; a summary line goes to standard error."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

from qsa.client import Client, Timings
from qsa.errors import ConfigError
from qsa.settings import config_unless_url
from qsa.terminal import notes, server_at, show


def read_text(path: str) -> str:
    """A document that the user named.

    Raises:
        ConfigError: it cannot be read as UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def sampling_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The request fields that the sampling options stand for; options not given stay out."""
    names = {
        "max_tokens": "max_tokens",
        "temperature": "temperature",
        "top_p": "top_p",
        "top_k": "top_k",
        "seed": "seed",
        "sparse": "sparse_id",
    }
    values = {field: getattr(args, option) for option, field in names.items()}
    return {field: value for field, value in values.items() if value is not None}


def summary(timings: Timings) -> str:
    """One line: how much, how fast, how sparse."""
    parts = [f"{timings.prompt_tokens} + {timings.completion_tokens} tokens"]
    if timings.first_text_s is not None:
        parts.append(f"first after {timings.first_text_s:.2f} s")
    if timings.decode_tokens_per_s is not None:
        parts.append(f"{timings.decode_tokens_per_s:.1f} tokens/s")
    if timings.attended_share is not None:
        parts.append(f"attended {timings.attended_share:.0%} of the context")
    return ", ".join(parts)


async def _answer(url: str, args: argparse.Namespace, prompt: str) -> None:
    timings = Timings()
    body = sampling_fields(args)
    path = "/v1/completions" if args.raw else "/v1/chat/completions"
    body |= {"prompt": prompt} if args.raw else {"messages": [{"role": "user", "content": prompt}]}
    async with Client(url, args.api_key) as client:
        await show(client.stream(path, body, timings))
    notes.print(summary(timings), style="dim", markup=False)


def run(args: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if args.file is not None:
        prompt = f"{read_text(args.file)}\n\n{prompt}"
    with server_at(args.url, config_unless_url(args)) as url:
        asyncio.run(_answer(url, args, prompt))
    return 0
