"""The pipeline of stages through the whole engine: rounds of decode, prefill, gaps between tokens beside a prompt, transports.

    python -m benchmarks.bench_pipeline                                  # small, with the default model, on the CPU
    python -m benchmarks.bench_pipeline --device cuda --model benchmarks/models/qwen2.5-7b-shape --load-format dummy
    python -m benchmarks.bench_pipeline --parts overhead   # every transport, with a model that computes nothing

Parts: decode, prefill and gaps share an engine with weights, K and V as they are; quantized has another one of float8 weights
and float8 K and V; overhead starts one for each transport. Dense attention runs through the same pipeline in the same run.
Contexts that are only decoded after are filled with random K and V in place of a prefill, on every stage. Figures count for
the summary at full size alone (two cards, 8 sequences of 262,144 tokens); others need a --label.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from contextlib import asynccontextmanager
from typing import Any

import ray

from benchmarks import timing
from benchmarks.gpu_inputs import far_slices
from benchmarks.pipeline_models import FILLED, build_filling, with_filled
from benchmarks.pipeline_overhead import measure_overhead
from benchmarks.summary import Line, record, show
from benchmarks.timeline import Rounds, percentile, rounds_in, wait_share_of_prefill
from qsa.actors.engine import Engine
from qsa.actors.placement import start_local_ray
from qsa.commands.bench_pipeline import wall
from qsa.config import EngineConfig, load_config
from qsa.engine_pace import Streams, decoding, read_all
from qsa.kernels.registry import DEFAULT_SPARSE_ID, DENSE_ID
from qsa.model.calibrate import scan_intervals
from qsa.model.checkpoint.open import open_model
from qsa.settings import parse_setting
from qsa.trace import Trace, work_window, write_trace

PARTS = ("decode", "prefill", "gaps", "quantized", "overhead")
FULL_CONTEXT, FULL_STREAMS, FULL_STAGES = 262144, 8, 2
ATTENDED = 4096  # tokens a query attends to, at full size
BARS = {
    "step_over_compute": "<= 1.15",
    "decode_tokens_per_s": ">= 1400",
    "decode_tokens_per_s_quantized": ">= 2200",
    "decode_dense_ratio": ">= 4",
    "transfer_share": "<= 0.03",
    "prefill_s": "<= 3.8",
    "prefill_s_quantized": "<= 3.1",
    "prefill_dense_ratio": ">= 3.5",
    "prefill_wait_share": "<= 0.05",
    "gap_p50_over_quiet": "<= 2",
    "gap_p99_ms": "<= 45",
}
UNITS = {"_ms": "ms", "_s": "s", "_ratio": "x", "_share": "of the time", "_quiet": "x", "_compute": "x"}

Rows = list[dict[str, object]]


def unit_of(name: str) -> str:
    """The unit of a figure, from its name."""
    name = name.removesuffix("_quantized")
    if name.endswith("tokens_per_s"):
        return "tokens/s"
    return next((unit for suffix, unit in UNITS.items() if name.endswith(suffix)), "")


class Bench:
    """Measures one engine. The state: what was found so far, as figures by name and rows of the CSV."""

    def __init__(self, engine: Engine, args: argparse.Namespace, suffix: str) -> None:
        """suffix: of the figures' names."""
        self._engine, self._args, self._suffix = engine, args, suffix
        self._room = min(4096, args.context // 4)  # tokens that streams may generate
        self.figures: dict[str, float] = {}
        self.rows: Rows = []

    def note(self, part: str, configuration: str, **values: float) -> None:
        text = "  ".join(f"{name} {value:.5g}" for name, value in values.items())
        print(f"{part:8} {configuration:7} {text}", flush=True)
        self.rows.append({"part": part + self._suffix, "configuration": configuration, **values})

    def figure(self, name: str, value: float) -> None:
        self.figures[name + self._suffix] = value

    def prompt(self, number: int, length: int) -> list[int]:
        """Token ids that no other number's prompt begins with."""
        return [(number * 7919 + place * 31) % 251 + 1 for place in range(length)]

    @asynccontextmanager
    async def streams(self, count: int, sparse_id: int) -> Any:
        """So many sequences that decode after a long context that was filled in."""
        prompts = [self.prompt(number, self._args.context - self._room) for number in range(count)]
        async with decoding(self._engine, prompts, self._room - 1, sparse_id + FILLED) as streams:
            yield streams

    async def traced(self, streams: Streams, seconds: float) -> tuple[Trace, tuple[float, float]]:
        """What the stages do for so long."""
        await self._engine.start_trace()
        begin = time.perf_counter()
        await streams.pause(seconds)
        window = begin, time.perf_counter()
        trace: Trace = await self._engine.take_trace()
        return trace, window

    # parts

    async def decode(self, sparse_id: int, name: str) -> tuple[float, Rounds]:
        """Tokens a second of all streams, and their rounds."""
        args = self._args
        began = time.perf_counter()
        async with self.streams(args.streams, sparse_id) as streams:
            filled_s = time.perf_counter() - began
            await streams.pause(args.seconds / 4)
            trace, window = await self.traced(streams, args.seconds)
        rounds = rounds_in(trace, wall(*window))
        num_tokens = sum(window[0] <= at < window[1] for stream in streams.arrivals for at in stream.tokens_at)
        rate = num_tokens / (window[1] - window[0])
        found = {f"compute_ms_{stage}": ms for stage, ms in enumerate(rounds.compute_ms)}
        found |= {"round_ms": rounds.round_ms, "lanes": rounds.lanes, "transfer_ms": rounds.transfer_ms}
        self.note("decode", name, tokens_per_s=rate, answer_ms=rounds.answer_ms, filled_s=filled_s, **found)
        self._keep(f"decode_{name}", trace)
        return rate, rounds

    async def prefill(self, sparse_id: int, name: str, runs: int) -> tuple[float, float]:
        """Seconds of one prompt, and the share in which the last stage waits for chunks; the best of some runs."""
        found = []
        for number in range(runs):
            await self._engine.start_trace()
            prompt = self.prompt(number + 100, self._args.context - 2)
            (arrivals,) = await read_all(self._engine, [prompt], 1, sparse_id)
            trace = await self._engine.take_trace()
            window = work_window(trace, "chunk")
            assert window is not None, "a prefill without chunks"
            share = wait_share_of_prefill(trace, window)
            found.append((arrivals.first_token_s, share))
            self.note("prefill", name, first_token_s=arrivals.first_token_s, chunks_s=window[1] - window[0], wait_share=share)
        self._keep(f"prefill_{name}", trace)
        return min(found)

    async def gaps(self, sparse_id: int) -> None:
        """Gaps between tokens of all streams but one, quiet and while the last one's prompt is really read."""
        args = self._args
        async with self.streams(args.streams - 1, sparse_id) as streams:
            await streams.pause(args.seconds / 4)
            quiet_from = time.perf_counter()
            await streams.pause(args.seconds)
            await self._engine.start_trace()
            (prompt,) = await read_all(self._engine, [self.prompt(200, args.context - 2)], 1, sparse_id)
            self._keep("gaps", await self._engine.take_trace())
        quiet = streams.gaps_ms(quiet_from, prompt.sent_at)
        busy = streams.gaps_ms(prompt.sent_at, prompt.tokens_at[0])
        quiet_p50, p50, p99 = percentile(quiet, 50), percentile(busy, 50), percentile(busy, 99)
        self.note(
            "gaps",
            "sparse",
            quiet_p50_ms=quiet_p50,
            p50_ms=p50,
            p99_ms=p99,
            most_ms=max(busy),
            num_gaps=len(busy),
            first_token_s=prompt.first_token_s,
        )
        self.figure("gap_p50_over_quiet", p50 / quiet_p50)
        self.figure("gap_p99_ms", p99)

    async def run(self, parts: Sequence[str]) -> None:
        if "decode" in parts:
            rate, rounds = await self.decode(DEFAULT_SPARSE_ID, "sparse")
            self.figure("decode_tokens_per_s", rate)
            self.figure("step_over_compute", rounds.over_compute)
            self.figure("transfer_share", rounds.transfer_share)
            dense, _ = await self.decode(DENSE_ID, "dense")
            self.figure("decode_dense_ratio", rate / dense)
        if "prefill" in parts:
            seconds, share = await self.prefill(DEFAULT_SPARSE_ID, "sparse", 2)
            self.figure("prefill_s", seconds)
            self.figure("prefill_wait_share", share)
            dense_s, _ = await self.prefill(DENSE_ID, "dense", 1)
            self.figure("prefill_dense_ratio", dense_s / seconds)
        if "gaps" in parts:
            await self.gaps(DEFAULT_SPARSE_ID)

    def _keep(self, name: str, trace: Trace) -> None:
        if self._args.traces is not None:
            write_trace(f"{self._args.traces}_{name}{self._suffix}.json", trace)


def make_engine_config(args: argparse.Namespace, **more: object) -> EngineConfig:
    """The settings of a measured engine: at full size the configuration that bench_step and bench_prefill measure too."""
    values: dict[str, Any] = {
        "model.path": args.model,
        "model.load_format": args.load_format,
        "model.max_model_len": args.context,
        "limits.max_sequences": args.streams,
        "pipeline.device": args.device,
        "pipeline.num_stages": args.stages,
        "pipeline.transport": args.transport,
        "pipeline.start_timeout_s": 300.0,
    }
    if args.context >= FULL_CONTEXT // 4:
        checkpoint = open_model(args.model, args.load_format)
        num_layers = checkpoint.spec.num_layers
        checkpoint.close()
        scans = scan_intervals([layer * 11 % num_layers for layer in range(num_layers)])  # as if calibrated
        sparse = {"preset": args.preset, "sink_size": 64, "prefill_tile": 128, "prefill_factor": 1}
        values["sparse"] = {DEFAULT_SPARSE_ID: {**sparse, "top_k_fine": far_slices(ATTENDED), "reselect_every": scans}}
    values |= {**more, **dict(parse_setting(text) for text in args.settings)}
    return with_filled(load_config(None, values))


def measure_engine(args: argparse.Namespace, parts: Sequence[str], suffix: str = "", **more: object) -> Bench:
    """Start an engine, measure the parts, stop it."""
    config = make_engine_config(args, **more)
    began = time.perf_counter()
    with Engine.start(config, build=build_filling, on_progress=_Changes().show) as engine:
        print(f"ready after {time.perf_counter() - began:.0f} s", flush=True)
        for line in engine.start_lines():
            print(f"  {line}", flush=True)
        bench = Bench(engine, args, suffix)
        asyncio.run(bench.run(parts))
    return bench


class _Changes:
    """Prints what a starting engine says, each line once."""

    def __init__(self) -> None:
        self._last = ""

    def show(self, line: str) -> None:
        if line.split(":")[0] != self._last:
            self._last = line.split(":")[0]
            print(f"  {line}", flush=True)


def keep(args: argparse.Namespace, rows: Rows, figures: dict[str, float], name: str) -> None:
    """Print figures, and write CSV and summary where these are of full size or have a label."""
    full = (args.device, args.context, args.streams, args.stages) == ("cuda", FULL_CONTEXT, FULL_STREAMS, FULL_STAGES)
    prefix = ".".join(filter(None, ("pipeline", args.label)))
    lines = [Line(f"{prefix}.{key}", value, unit_of(key), BARS.get(key) if full else None) for key, value in figures.items()]
    show(lines)
    if args.dry or not (full or args.label):
        return
    print(timing.write_csv("_".join(filter(None, (name, args.label))), rows))
    record(lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS[:4]), help="what to measure")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", default="default")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto")
    parser.add_argument("--stages", type=int, default=FULL_STAGES)
    parser.add_argument("--context", type=int, help=f"tokens of a sequence at most; {FULL_CONTEXT} on cards, else 2048")
    parser.add_argument("--streams", type=int, help=f"sequences; {FULL_STREAMS} on cards, else 4")
    parser.add_argument("--seconds", type=float, default=2.0, help="of decoding that are measured")
    parser.add_argument("--preset", default="balanced", help="of the sparse configuration, at full size")
    parser.add_argument("--transport", default="auto", choices=("auto", "object_store", "rdt", "p2p"))
    parser.add_argument("--quantization", default="fp8", help="weights of the part quantized")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--tokens", type=int, default=600, help="decode steps of a run of overhead")
    parser.add_argument("--repeat", type=int, default=3, help="runs of overhead; the median counts")
    parser.add_argument("--traces", metavar="PREFIX", help="write traces to PREFIX_decode_sparse.json and so on")
    parser.add_argument("--label", help="names figures of other sizes: pipeline.LABEL.prefill_s and so on")
    parser.add_argument("--dry", action="store_true", help="print, but leave the CSV and the summary as they are")
    parser.add_argument("--commit", help="of this checkout, where it was copied without its git folder")
    args = parser.parse_args(arguments)
    args.context = args.context or (FULL_CONTEXT if args.device == "cuda" else 2048)
    args.streams = args.streams or (FULL_STREAMS if args.device == "cuda" else 4)
    return args


def main() -> None:
    args = parse()
    if args.commit:
        timing.copied_from(args.commit)
    start_local_ray()
    rows: Rows = []
    figures: dict[str, float] = {}
    shared = [part for part in args.parts if part in ("decode", "prefill", "gaps")]
    try:
        if shared:
            bench = measure_engine(args, shared)
            rows, figures = rows + bench.rows, figures | bench.figures
            keep(args, rows, figures, "pipeline")  # what has been measured stays, whatever the next engine does
        if "quantized" in args.parts:
            more = {"model.quantization": args.quantization}
            more |= {"model.kv_dtype": "fp8"} if args.device == "cuda" else {}
            bench = measure_engine(args, ["decode", "prefill"], "_quantized", **more)
            rows, figures = rows + bench.rows, figures | bench.figures
            keep(args, rows, figures, "pipeline")
        if "overhead" in args.parts:
            found = measure_overhead(args.device, args.model, args.load_format, args.tokens, args.repeat)
            keep(args, found.rows, found.figures, "pipeline_overhead")
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
