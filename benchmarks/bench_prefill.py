"""Prefill of 262144 tokens through a whole 7B model on one card: sparse attention beside dense (cuDNN) in the same run.

    python -m benchmarks.bench_prefill                         # bfloat16
    python -m benchmarks.bench_prefill --quantization fp8      # rows get the suffix _fp8

Random weights, chunks of 8192 tokens, the same model and the same pool for every configuration. With `--profile` the kernels of
one configuration are listed: which share selection takes of attention's time is read from it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks import timing
from benchmarks.bench_step import CODE_DIM, SEQ_LEN, spec_7b
from benchmarks.gpu_inputs import SLICE, WINDOW
from benchmarks.summary import Line, record, show
from qsa.kernels.registry import SparseConfig
from qsa.model.batch import Segment
from qsa.model.build import build_stage
from qsa.model.checkpoint.random import RandomCheckpoint, random_calibration

CHUNK, TILE = 8192, 128
SELECTING = (
    "scan_code_rows",
    "select_tiles",
    "share_tiles",
    "quantise_queries",
    "index_select",
    "indexSelect",
    "_tiles_kernel",
)
ATTENDING = ("sparse_prefill",)


def configurations(samples: int) -> dict[str, SparseConfig]:
    found = {}
    for tokens in (4096, 8192):
        base = SparseConfig(sink_size=SLICE, window_size=WINDOW, prefill_tile=TILE, prefill_samples=samples)
        found[f"sparse_{tokens}"] = replace(base, top_k_fine=(tokens - SLICE - WINDOW) // SLICE, prefill_factor=1)
    return {**found, "dense": SparseConfig(dense=True)}


class Bench:
    """A stage of all layers with room for one sequence."""

    def __init__(self, quantization: str, configs: dict[str, SparseConfig], seq_len: int) -> None:
        spec = spec_7b()
        pages = SEQ_LEN * 2 * spec.num_kv_heads * spec.head_dim * 2 >> 20
        self.seq_len, self.names = seq_len, list(configs)
        self.stage: Any = build_stage(
            RandomCheckpoint(spec, "cuda"),  # type: ignore[arg-type]
            first_layer=0,
            last_layer=spec.num_layers,
            num_chunks=spec.num_layers * (pages + (SEQ_LEN * CODE_DIM >> 20)),
            max_sequences=1,
            max_model_len=SEQ_LEN,
            sparse=dict(enumerate(configs.values())),
            calibration=random_calibration(spec, CODE_DIM),
            quantization=quantization,
            device="cuda",
        )
        self.tokens = torch.randint(0, spec.vocab_size, (seq_len,))

    def run(self, number: int, until: int) -> float:
        """Seconds to prefill [0, until)."""
        attention = self.stage.attention
        attention.release(0)
        attention.open(0, number)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for start in range(0, until, CHUNK):
            end = min(start + CHUNK, until)
            rows = [end - start - 1] if end == until else []
            out = self.stage.forward([Segment(0, start, end, number, True)], self.tokens[start:end], None, rows)
        assert torch.isfinite(out).all()
        torch.cuda.synchronize()
        return time.perf_counter() - began


def profile(bench: Bench, number: int, until: int) -> list[tuple[str, float, int]]:
    """Milliseconds and launches of every kernel of a prefill, most first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as found:
        bench.run(number, until)
    events = [event for event in found.key_averages() if event.device_time_total]
    rows = [(event.key[:70], event.device_time_total / 1e3, event.count) for event in events]
    return sorted(rows, key=lambda row: -row[1])


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quantization", default="auto", help="of the weights: auto (bfloat16), int8 or fp8")
    parser.add_argument("--samples", type=int, default=2, help="queries of a tile that choose its list")
    parser.add_argument("--tokens", type=int, default=SEQ_LEN, help="length of the prompt")
    parser.add_argument("--only", nargs="*", help="configurations to measure")
    parser.add_argument("--profile", nargs="*", default=(), help="configurations whose kernels are listed")
    parser.add_argument("--commit", help="of this checkout, where it was copied without its git folder")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    if options.commit:
        timing.copied_from(options.commit)
    configs = {name: c for name, c in configurations(options.samples).items() if not options.only or name in options.only}
    suffix = "" if options.quantization == "auto" else f"_{options.quantization}"
    bench = Bench(options.quantization, configs, options.tokens)
    seconds: dict[str, float] = {}
    shares: dict[str, float] = {}
    rows: list[dict[str, object]] = []
    for number, name in enumerate(configs):
        bench.run(number, min(4 * CHUNK, options.tokens))  # compiles, and learns the libraries' choices
        runs = [bench.run(number, options.tokens) for _ in range(1 if name == "dense" else 2)]
        seconds[name] = min(runs)
        print(f"{name:14} {seconds[name]:7.3f} s, {options.tokens / seconds[name]:8.0f} tokens/s, runs {runs}", flush=True)
        if name in options.profile:
            kernels = profile(bench, number, options.tokens)
            total = sum(ms for _, ms, _ in kernels)
            selecting = sum(ms for key, ms, _ in kernels if any(part in key for part in SELECTING))
            attending = sum(ms for key, ms, _ in kernels if any(part in key for part in ATTENDING))
            shares[name] = selecting / attending if attending else float("nan")
            print(
                f"    kernels {total:.0f} ms, attention {attending:.0f}, selection {selecting:.0f}: {shares[name]:.1%}",
                flush=True,
            )
            for key, ms, count in kernels[:18]:
                print(f"    {ms:9.1f} ms {count:6} x {key}", flush=True)
    lines = []
    for name, value in seconds.items():
        ratio = seconds.get("dense", float("nan")) / value
        rows.append({"configuration": name, "quantization": options.quantization, "tokens": options.tokens, "seconds": value})
        rows[-1].update(samples=options.samples, dense_over_this=ratio, selection_of_attention=shares.get(name, ""))
        is_bar = name == "sparse_4096" and not suffix and options.tokens == SEQ_LEN
        lines.append(Line(f"operators.prefill_256k_{name}{suffix}", value, "s", "<= 7.0" if is_bar else None))
        if name != "dense" and ratio == ratio:
            lines.append(Line(f"operators.prefill_256k_{name}_dense_ratio{suffix}", ratio, "x", ">= 3.8" if is_bar else None))
        if name in shares:
            lines.append(Line(f"operators.prefill_selection_{name}{suffix}", shares[name], "of attention", "<= 0.1"))
    print(timing.write_csv(f"prefill{suffix}", rows))
    if options.tokens == SEQ_LEN:
        record(lines)
    show(lines)


if __name__ == "__main__":
    main()
