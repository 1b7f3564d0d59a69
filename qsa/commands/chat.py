"""`qsa chat`: a conversation in the terminal. `/quit` or Ctrl-D ends it, `/new` forgets it, Ctrl-C cuts an answer short."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from qsa.client import Client, Timings
from qsa.commands.generate import read_text, sampling_fields, summary
from qsa.errors import RequestError
from qsa.settings import config_unless_url
from qsa.terminal import console, notes, server_at, show

HELP = "/quit ends (or Ctrl-D), /new starts over, /help says this, Ctrl-C cuts an answer short"
Messages = list[dict[str, Any]]


def opening(args: argparse.Namespace) -> Messages:
    """What stands before the first question: the system message, with the document in it when one was named."""
    parts = [args.system] if args.system else []
    if args.file is not None:
        parts.append(f"Answer from this document.\n\n{read_text(args.file)}")
    return [{"role": "system", "content": "\n\n".join(parts)}] if parts else []


async def _answer(url: str, args: argparse.Namespace, messages: Messages) -> str:
    timings = Timings()
    async with Client(url, args.api_key) as client:
        text = await show(client.stream("/v1/chat/completions", {"messages": messages, **sampling_fields(args)}, timings))
    notes.print(summary(timings), style="dim", markup=False)
    return text


def converse(url: str, args: argparse.Namespace) -> None:
    """Read questions until the end of input."""
    messages = opening(args)
    while True:
        try:
            question = console.input("[bold]> [/bold]" if console.is_terminal else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            console.print()
            return
        if question in ("/quit", "/exit"):
            return
        if question == "/help":
            notes.print(HELP, style="dim", markup=False)
            continue
        if question == "/new":
            messages = opening(args)
            continue
        if not question:
            continue
        messages.append({"role": "user", "content": question})
        try:
            answer = asyncio.run(_answer(url, args, messages))
        except KeyboardInterrupt:  # leaving the stream cancels the request
            notes.print("(cut short)", style="dim")
            messages.pop()
            continue
        except RequestError as error:  # such as a conversation that has grown too long; it may go on after /new
            notes.print(str(error), style="red", markup=False)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})


def run(args: argparse.Namespace) -> int:
    config = config_unless_url(args)
    with server_at(args.url, config) as url:
        notes.print(HELP, style="dim", markup=False)
        converse(url, args)
    return 0
