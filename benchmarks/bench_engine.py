"""The whole stack (HTTP on Ray Serve, two stage actors, default configuration) beside llama.cpp on the same file.

For each prompt length and repetition both answer the same token ids one after the other, in alternating order, so a ratio
compares neighbours in time; what counts is the median of the ratios. Our prefill is the time to the first streamed text, our
decode the time between tokens as a client sees it; llama.cpp is timed inside its own process, without HTTP.

A third figure is one process that calls the same layers in a loop: the difference is what Ray and HTTP cost per token.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from benchmarks.summary import Line, record, show
from benchmarks.timing import ROOT, timing_of, write_csv
from qsa.client import Client, Timings
from qsa.commands.demo import DOCUMENT
from qsa.config import EngineConfig, load_config
from qsa.measure import time_completion
from qsa.model.checkpoint.load import open_checkpoint
from qsa.server_process import running_server
from qsa.settings import parse_setting

LENGTHS = {"128": 128, "4k": 4096, "8k": 8000}
BARS = {"prefill_4k": ">= 2.0", "decode_128": ">= 0.5", "decode_8k": ">= 0.5"}
NUM_STREAMS = 8
MAX_LOAD = 0.7  # of the last minute, before the start


class Child:
    """A measuring process: one JSON request a line in, one JSON answer a line out."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._read()  # "ready"

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended with code {self._process.wait()}")
        return line

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._read())
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def prompts(config: EngineConfig, names: list[str], repeat: int) -> dict[str, list[list[int]]]:
    """Real text as token ids, a different beginning for every repetition."""
    tokenizer = open_checkpoint(config.model.path).tokenizer()
    ids = tokenizer.encode(DOCUMENT.read_text(encoding="utf-8"))
    ids = ids * (1 + (max(LENGTHS.values()) + 64 * repeat) // len(ids))
    return {name: [ids[64 * run : 64 * run + LENGTHS[name]] for run in range(repeat)] for name in names}


async def measure_ours(client: Client, prompt: list[int], num_tokens: int) -> Timings:
    timings = await time_completion(client, prompt, num_tokens, {})
    if timings.completion_tokens != num_tokens or timings.first_text_s is None or timings.decode_ms_per_token is None:
        raise RuntimeError(f"asked for {num_tokens} tokens, got {timings}")
    return timings


async def compare(
    url: str, peer: Child | None, args: argparse.Namespace, cases: dict[str, list[list[int]]]
) -> list[dict[str, Any]]:
    """One row for each prompt length and repetition."""
    rows = []
    async with Client(url) as client:
        await measure_ours(client, cases["128"][0], 16)  # both warm
        if peer is not None:
            peer.ask(prompt=cases["128"][0], num_tokens=16)
        for run in range(args.repeat):
            for name, variants in cases.items():
                prompt, theirs = variants[run], None
                if peer is not None and run % 2:
                    theirs = peer.ask(prompt=prompt, num_tokens=args.tokens)
                ours = await measure_ours(client, prompt, args.tokens)
                if peer is not None and not run % 2:
                    theirs = peer.ask(prompt=prompt, num_tokens=args.tokens)
                assert ours.first_text_s is not None and ours.decode_ms_per_token is not None
                row = {
                    "context": name,
                    "prompt_tokens": len(prompt),
                    "run": run,
                    "load_before": args.load,
                    "attended_share": ours.attended_share,
                }
                row |= {"prefill_s": ours.first_text_s, "decode_ms": ours.decode_ms_per_token}
                if theirs is not None:
                    row |= {"llamacpp_prefill_s": theirs["prefill_s"], "llamacpp_decode_ms": theirs["decode_ms"]}
                    row["prefill_ratio"] = theirs["prefill_s"] / ours.first_text_s
                    row["decode_ratio"] = theirs["decode_ms"] / ours.decode_ms_per_token
                rows.append(row)
                print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
    return rows


async def measure_streams(url: str, prompt: list[int], num_tokens: int) -> float:
    """Tokens a second of all streams together: the sum of the paces that their clients see."""
    async with Client(url) as client:
        runs = await asyncio.gather(*(measure_ours(client, prompt[i:] + prompt[:i], num_tokens) for i in range(NUM_STREAMS)))
    pace = [run.decode_tokens_per_s for run in runs if run.decode_tokens_per_s is not None]
    return sum(pace)


def median(rows: list[dict[str, Any]], context: str, column: str) -> float:
    return timing_of([row[column] for row in rows if row["context"] == context]).median


def summarise(rows: list[dict[str, Any]], stage: list[float], streams: float) -> list[Line]:
    """The figures of the summary, from the rows of the CSV."""
    contexts = list(dict.fromkeys(row["context"] for row in rows))
    lines = [Line(f"model.decode_{name}", 1e3 / median(rows, name, "decode_ms"), "tokens/s") for name in contexts]
    lines.append(Line(f"model.decode_128_{NUM_STREAMS}_streams", streams, "tokens/s"))
    if "4k" in contexts:
        lines.append(Line("model.prefill_4k", LENGTHS["4k"] / median(rows, "4k", "prefill_s"), "tokens/s"))
    if "prefill_ratio" in rows[0]:
        if "4k" in contexts:
            lines.append(Line("model.prefill_vs_llamacpp", median(rows, "4k", "prefill_ratio"), "ratio", BARS["prefill_4k"]))
        for name in contexts:
            bar = BARS.get(f"decode_{name}")
            lines.append(Line(f"model.decode_{name}_vs_llamacpp", median(rows, name, "decode_ratio"), "ratio", bar))
    in_process = statistics.median(stage)
    lines.append(Line("model.in_process_ms_per_token", in_process, "ms"))
    lines.append(Line("model.ray_and_http_ms_per_token", median(rows, "128", "decode_ms") - in_process, "ms"))
    return lines


def find_peer(config: EngineConfig, threads: int) -> Child | None:
    """llama.cpp, when it is installed and the model is a file it can read."""
    if importlib.util.find_spec("llama_cpp") is None:
        print("llama.cpp is not installed (make peer): only our own figures", file=sys.stderr)
        return None
    path = Path(open_checkpoint(config.model.path).path)
    if path.suffix != ".gguf":
        print(f"llama.cpp cannot read {path}: only our own figures", file=sys.stderr)
        return None
    return Child("benchmarks.llamacpp_peer", str(path), "--threads", str(threads))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="generated after each prompt")
    parser.add_argument("--threads", type=int, default=2, help="threads of llama.cpp")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--context", nargs="+", choices=list(LENGTHS), default=list(LENGTHS), help="128 is always among them")
    parser.add_argument("--no-peer", action="store_true", help="only our own figures")
    parser.add_argument("--label", help="names figures of other settings: model.LABEL.decode_128 and so on")
    parser.add_argument("--dry", action="store_true", help="print, but leave the CSV and the summary as they are")
    args = parser.parse_args()
    if args.settings and not (args.label or args.dry):
        parser.error("figures of other settings need a --label, or --dry: the plain names are the default's")
    args.context = sorted({"128", *args.context}, key=list(LENGTHS).index)

    args.load = os.getloadavg()[0]
    if args.load > MAX_LOAD:
        print(
            f"the load of this machine is {args.load:.1f}: others compute here too, and ratios will not hold", file=sys.stderr
        )
    config = load_config(None, dict(parse_setting(text) for text in args.settings))
    cases = prompts(config, args.context, args.repeat)
    with Child("benchmarks.stage_pace", json.dumps(config.model_dump(mode="json"))) as model:
        stage = [model.ask(prompt=cases["128"][run], num_tokens=args.tokens)["decode_ms"] for run in range(args.repeat)]
    peer = None if args.no_peer else find_peer(config, args.threads)
    try:
        with running_server(config) as url:
            rows = asyncio.run(compare(url, peer, args, cases))
            streams = asyncio.run(measure_streams(url, cases["128"][0], args.tokens))
    finally:
        if peer is not None:
            peer.__exit__()
    lines = summarise(rows, stage, streams)
    if args.label:
        lines = [replace(line, name=line.name.replace("model.", f"model.{args.label}.", 1)) for line in lines]
    show(lines)
    if not args.dry:
        write_csv("_".join(filter(None, ("bench_engine", args.label))), rows)
        record(lines)


if __name__ == "__main__":
    main()
