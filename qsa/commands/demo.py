"""`qsa demo`, what `make run` shows: a question about a real document of 6,000 tokens, over HTTP, with the figures after it.

It starts a server of its own (Ray, stage actors, HTTP), streams the answer, and stops everything it started.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qsa.client import Client, Timings
from qsa.commands.generate import read_text
from qsa.config import EngineConfig
from qsa.errors import QSAError
from qsa.settings import config_from
from qsa.terminal import console, notes, server_at, show

DOCUMENT = Path(__file__).resolve().parent.parent / "data" / "alice.txt"  # chapters I and II, public domain
QUESTION = "What does the label say on the bottle that Alice found on the table?"
POLL_S = 0.25


@dataclass
class StageView:
    """What one stage showed while the request ran."""

    layers: str
    num_chunks: int
    most_held: int = 0


@dataclass
class Watch:
    """The most chunks each stage held, by polling /stats beside the request."""

    stages: dict[int, StageView] = field(default_factory=dict)

    async def run(self, client: Client) -> None:
        while True:
            with contextlib.suppress(QSAError):  # one missed poll is no news
                self.note(await client.get("/stats"))
            await asyncio.sleep(POLL_S)

    def note(self, stats: dict[str, Any]) -> None:
        for number, stage in enumerate(stats["stages"]):
            pool, layers = stage["pool"], stage["layers"]
            view = self.stages.setdefault(number, StageView(f"{layers[0]} to {layers[1] - 1}", pool["num_chunks"]))
            view.most_held = max(view.most_held, pool["num_chunks"] - pool["num_free"])


async def ask(url: str, document: str, question: str, max_tokens: int) -> tuple[Timings, Watch]:
    """Send the document with the question, show the answer as it streams."""
    timings, watch = Timings(), Watch()
    messages = [
        {"role": "system", "content": "You answer questions about a document."},
        {"role": "user", "content": f"{document}\n\n{question}"},
    ]
    async with Client(url) as client:
        watching = asyncio.create_task(watch.run(client))
        try:
            body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0}
            await show(client.stream("/v1/chat/completions", body, timings))
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
    return timings, watch


def report(timings: Timings, watch: Watch, started_s: float) -> list[tuple[str, str]]:
    """The figures: name and value of each line."""
    lines = [("engine ready after", f"{started_s:.1f} s")]
    lines.append(("tokens", f"{timings.prompt_tokens:,} read, {timings.completion_tokens} written"))
    if timings.first_text_s is not None:
        lines.append(("time to first token", f"{timings.first_text_s:.2f} s"))
    if timings.prefill_tokens_per_s is not None:
        lines.append(("prefill", f"{timings.prefill_tokens_per_s:,.0f} tokens/s"))
    if timings.decode_tokens_per_s is not None:
        lines.append(("decode", f"{timings.decode_tokens_per_s:.1f} tokens/s"))
    if timings.attended_share is not None:
        lines.append(("attended", f"{timings.attended_share:.0%} of the context, chosen anew for every token and layer"))
    for number, stage in sorted(watch.stages.items()):
        held = f"{stage.most_held} of {stage.num_chunks} chunks of 1 MiB held"
        lines.append((f"stage {number}", f"{held}, layers {stage.layers}"))
    return lines


def describe(config: EngineConfig) -> str:
    stages = config.pipeline.num_stages
    return f"{stages} stage actor{'s' if stages > 1 else ''} on Ray, model {config.model.name or config.model.path}"


def run(args: argparse.Namespace) -> int:
    config = config_from(args)
    document = read_text(args.file) if args.file is not None else DOCUMENT.read_text(encoding="utf-8")
    question = args.question or QUESTION
    title = document.strip().splitlines()[0] if document.strip() else "nothing"
    begin = time.perf_counter()
    console.print(f"[bold]QSA[/bold]  {describe(config)}")
    with server_at(None, config) as url:
        started_s = time.perf_counter() - begin
        console.print("[bold]document[/bold]", end="  ")
        console.print(f"{title} - {len(document):,} characters", markup=False)
        console.print("[bold]question[/bold]", end="  ")
        console.print(question, markup=False)
        console.print(f"[dim]POST {url}/v1/chat/completions, streamed[/dim]\n")
        timings, watch = asyncio.run(ask(url, document, question, args.max_tokens))
        console.print()
        for name, value in report(timings, watch, started_s):
            console.print(f"[bold]{name:22}[/bold]{value}")
        notes.print("stopping", style="dim")
    return 0
