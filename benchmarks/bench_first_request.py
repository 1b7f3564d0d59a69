"""The first request after /ready beside the tenth: what a warm-up left for a user to pay.

    python -m benchmarks.bench_first_request                                            the default model
    python -m benchmarks.bench_first_request --dummy --stages 1                         random weights, 7B shape, one card
    python -m benchmarks.bench_first_request --dummy --set pipeline.gpus_per_stage=0.5  two stages on one card

Each start is a whole stack of its own, as `qsa serve` makes it: Ray, the engine, HTTP on Ray Serve. When /ready says 200 the
requests follow one by one, streamed, each with another prompt of the same length; nothing is sent before the first. A ratio
compares the first and the tenth of one start; the median over the starts counts.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from typing import Any

from benchmarks.summary import Line, record, show
from benchmarks.timing import ROOT, write_csv
from qsa.client import Client
from qsa.commands.demo import DOCUMENT
from qsa.config import EngineConfig, load_config
from qsa.measure import time_completion
from qsa.model.checkpoint.open import open_model
from qsa.server_process import running_server
from qsa.settings import parse_setting

DUMMY = ROOT / "benchmarks" / "models" / "qwen2.5-7b-shape"
NUM_REQUESTS = 10
BAR = "<= 1.2"


def prompts(config: EngineConfig, num_tokens: int) -> list[list[int]]:
    """Real text as token ids, another beginning for every request."""
    checkpoint = open_model(config.model.path, config.model.load_format)
    ids = checkpoint.tokenizer().encode(DOCUMENT.read_text(encoding="utf-8"))
    checkpoint.close()
    step = 37
    ids = ids * (1 + (num_tokens + step * NUM_REQUESTS) // len(ids))
    return [ids[step * place : step * place + num_tokens] for place in range(NUM_REQUESTS)]


async def measure(url: str, cases: list[list[int]], num_tokens: int) -> list[dict[str, Any]]:
    """One row a request, in order."""
    rows = []
    async with Client(url) as client:
        for number, prompt in enumerate(cases, 1):
            began = time.perf_counter()
            timings = await time_completion(client, prompt, num_tokens, {})
            total_s = time.perf_counter() - began
            if timings.completion_tokens != num_tokens or timings.first_text_s is None:
                raise RuntimeError(f"asked for {num_tokens} tokens, got {timings}")
            rows.append(
                {
                    "request": number,
                    "prompt_tokens": timings.prompt_tokens,
                    "tokens": num_tokens,
                    "first_token_s": timings.first_text_s,
                    "total_s": total_s,
                }
            )
            print({name: round(value, 4) for name, value in rows[-1].items()}, flush=True)
    return rows


def ratio(rows: list[dict[str, Any]], column: str) -> float:
    """The first request over the tenth, the median over the starts."""
    starts = sorted({row["start"] for row in rows})
    value = {(row["start"], row["request"]): row[column] for row in rows}
    return statistics.median(value[start, 1] / value[start, NUM_REQUESTS] for start in starts)


def summarise(rows: list[dict[str, Any]], label: str | None) -> list[Line]:
    prefix = ".".join(filter(None, ("operators", label)))
    return [
        Line(f"{prefix}.first_request_over_tenth", ratio(rows, "total_s"), "ratio", BAR),
        Line(f"{prefix}.first_token_over_tenth", ratio(rows, "first_token_s"), "ratio", BAR),
        Line(f"{prefix}.seconds_to_ready", statistics.median({row["ready_s"] for row in rows}), "s"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model; default: the default one")
    parser.add_argument("--dummy", action="store_true", help=f"random weights; of {DUMMY.name} unless there is a --model")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=32, help="generated after each prompt")
    parser.add_argument("--starts", type=int, default=3, help="whole stacks to start, one after the other")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--label", help="names figures of other settings: operators.LABEL.first_request_over_tenth and so on")
    parser.add_argument("--dry", action="store_true", help="print, but leave the CSV and the summary as they are")
    args = parser.parse_args()

    values = dict(parse_setting(text) for text in args.settings)
    values |= {"pipeline.num_stages": args.stages, "model.load_format": "dummy" if args.dummy else "auto"}
    if args.model or args.dummy:
        values["model.path"] = args.model or str(DUMMY)
    config = load_config(None, values)
    cases = prompts(config, args.prompt_tokens)
    rows: list[dict[str, Any]] = []
    for start in range(args.starts):
        load, began = os.getloadavg()[0], time.perf_counter()
        with running_server(config, on_progress=_Changes().show) as url:
            ready_s = time.perf_counter() - began
            print(f"ready after {ready_s:.1f} s", flush=True)
            found = asyncio.run(measure(url, cases, args.tokens))
        rows += [{"start": start, "ready_s": ready_s, "load_before": load, "stages": args.stages, **row} for row in found]
    lines = summarise(rows, args.label)
    show(lines)
    if not args.dry:
        write_csv("_".join(filter(None, ("first_request", args.label))), rows)
        record(lines)


class _Changes:
    """Prints what a starting server says, each line once."""

    def __init__(self) -> None:
        self._last = ""

    def show(self, line: str) -> None:
        if line != self._last:
            self._last = line
            print(f"  {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
