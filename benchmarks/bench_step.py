"""One decode step of a whole 7B model on one card: 8 sequences of 262144 tokens, random weights, from CUDA graphs.

    python -m benchmarks.bench_step                                # bfloat16 weights, K and V in bfloat16
    python -m benchmarks.bench_step --quantization fp8 --kv fp8    # rows get the suffix _quantized

Every configuration decodes the same number of steps, a whole number of scan intervals, beside dense attention over the same
pages in the same run. `attention` rows time the launches of attention alone, selection and K/V writes included, in a graph of
all layers; `step` rows time whole steps as a stage runs them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks import timing
from benchmarks.gpu_cases import copy_rate
from benchmarks.gpu_inputs import far_slices
from benchmarks.summary import Line, record, show
from qsa.config import SparseSettings
from qsa.kernels.registry import SparseConfig
from qsa.model.batch import Segment
from qsa.model.build import build_stage
from qsa.model.calibrate import scan_intervals
from qsa.model.checkpoint.random import RandomCheckpoint, random_calibration
from qsa.model.decode_graph import DecodeBuffers
from qsa.model.rope import RopeSpec
from qsa.model.spec import ModelSpec

BATCH, SEQ_LEN, CODE_DIM = 8, 262144, 64
NUM_LAYERS, PERIOD, WARM, TIMED = 28, 16, 16, 32  # steps; a whole number of periods is timed
SCANS = scan_intervals([layer * 11 % NUM_LAYERS for layer in range(NUM_LAYERS)])  # as if calibrated: 5 every step, 3 every 4th
BARS = {  # milliseconds a step, by configuration and whether weights are quantised
    ("balanced_4096", False): "<= 5.7",
    ("fast_4096", False): "<= 4.9",
    ("balanced_4096", True): "<= 3.7",
    ("fast_4096", True): "<= 2.9",
}
LAYER_BARS = {"balanced_4096": "<= 75", "fast_4096": "<= 45"}
RATIO_BARS = {"balanced_4096": ">= 5.5", "fast_4096": ">= 6.5"}


def configurations() -> dict[str, SparseConfig]:
    base = SparseConfig(sink_size=64, reselect_every=SCANS, prefill_tile=128)
    found = {"dense": SparseConfig(dense=True)}
    for tokens in (4096, 8192):
        count = far_slices(tokens)
        for name in ("balanced", "fast"):
            preset = SparseSettings(preset=name, sink_size=64, prefill_tile=128, top_k_fine=count)
            found[f"{name}_{tokens}"] = preset.resolve(True, SCANS)
        found[f"no_rerank_{tokens}"] = replace(base, top_k_fine=count, candidate_factor=1, rerank="none")
    return found


def spec_7b() -> ModelSpec:
    """Qwen2.5-7B's shape with room for 262144 tokens."""
    return ModelSpec(
        architecture="Qwen2ForCausalLM",
        name="7b-shape",
        num_layers=NUM_LAYERS,
        hidden_size=3584,
        intermediate_size=18944,
        num_q_heads=28,
        num_kv_heads=4,
        head_dim=128,
        vocab_size=152064,
        max_position_embeddings=SEQ_LEN,
        rms_norm_eps=1e-6,
        rope=RopeSpec(head_dim=128, theta=1e6),
        tie_word_embeddings=False,
        qkv_bias=True,
    )


class Bench:
    """A stage of all layers whose pool is full of random K, V and codes."""

    def __init__(self, options: argparse.Namespace, configs: Mapping[str, SparseConfig]) -> None:
        spec = spec_7b()
        self.names = list(configs)
        kv_bytes = 1 if options.kv == "fp8" else 2
        pages = SEQ_LEN * 2 * spec.num_kv_heads * spec.head_dim * kv_bytes >> 20
        chunks = spec.num_layers * BATCH * (pages + (SEQ_LEN * CODE_DIM >> 20))
        began = time.perf_counter()
        self.stage: Any = build_stage(
            RandomCheckpoint(spec, "cuda"),  # type: ignore[arg-type]
            first_layer=0,
            last_layer=spec.num_layers,
            num_chunks=chunks,
            max_sequences=BATCH,
            max_model_len=SEQ_LEN,
            sparse=dict(enumerate(configs.values())),
            calibration=random_calibration(spec, CODE_DIM),
            kv_dtype=options.kv,
            quantization=options.quantization,
            device="cuda",
        )
        buffer = self.stage.cache.pool.buffer
        print(
            f"built in {time.perf_counter() - began:.0f} s: weights {self.stage.weight_bytes / 1e9:.1f} GB,"
            f" KV {buffer.numel() / 1e9:.1f} GB, free {torch.cuda.mem_get_info()[0] / 1e9:.1f} GB",
            flush=True,
        )

    def open(self, number: int) -> None:
        """All sequences under one configuration, over random K, V and codes."""
        attention, cache = self.stage.attention, self.stage.cache
        for part in cache.pool.buffer.split(1024):
            part.view(cache.dtype).copy_(torch.randn(part.numel() // cache.dtype.itemsize, device="cuda").view(len(part), -1))
        for slot in range(BATCH):
            attention.release(slot)
        for slot in range(BATCH):
            attention.open(slot, number)
            cache.extend(slot, SEQ_LEN - WARM - TIMED - 1)
        chunks = cache.summary_chunks[:, :BATCH].flatten()
        for part in chunks[chunks >= 0].split(512):
            codes = torch.randint(-127, 128, (len(part), 1 << 20), dtype=torch.int8, device="cuda")
            cache.pool.buffer.index_copy_(0, part, codes.view(torch.uint8))

    def segments(self, number: int, step: int) -> list[Segment]:
        at = SEQ_LEN - WARM - TIMED - 1 + step
        return [Segment(slot, at, at + 1, number, False) for slot in range(BATCH)]

    def step_ms(self, number: int) -> tuple[float, float, float]:
        """Milliseconds of a whole step on the device and on the host, and of the host's own work."""
        tokens = torch.randint(0, 152064, (BATCH,), device="cuda")
        rows = range(BATCH)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        host = 0.0
        for step in range(WARM + TIMED):
            if step == WARM:
                torch.cuda.synchronize()
                began = time.perf_counter()
                begin.record()
            before = time.perf_counter()
            logits = self.stage.forward(self.segments(number, step), tokens, None, rows)
            host += time.perf_counter() - before if step >= WARM else 0.0
        end.record()
        torch.cuda.synchronize()
        wall = time.perf_counter() - began
        assert torch.isfinite(logits).all()
        return begin.elapsed_time(end) / TIMED, wall / TIMED * 1e3, host / TIMED * 1e3

    def attention_us(self, number: int) -> float:
        """Microseconds of attention a layer, averaged over layers and a whole number of scan intervals."""
        attention, spec = self.stage.attention, self.stage.spec
        for slot in range(BATCH):
            attention.forget(slot)
        buffers = DecodeBuffers(BATCH, NUM_LAYERS, None, torch.int32, self.stage.device)
        width = (spec.num_q_heads + 2 * spec.num_kv_heads) * spec.head_dim
        qkv = torch.randn(NUM_LAYERS, BATCH, width, device="cuda").to(self.stage.dtype)

        @torch.inference_mode()
        def layers(scans_rare: bool) -> None:
            step = attention.begin(number, buffers, scans_rare)
            for layer in range(NUM_LAYERS):
                attention.decode(layer, qkv[layer], step, None)

        buffers.slots.copy_(torch.arange(BATCH))
        buffers.seq_lens.fill_(SEQ_LEN)
        graphs = {}
        for scans_rare in attention.scan_forms(number):
            layers(scans_rare)
            torch.cuda.synchronize()
            graphs[scans_rare] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[scans_rare]):
                layers(scans_rare)
        runs = []
        method = attention._methods.get(number)
        for _ in range(PERIOD + TIMED):
            graph = graphs[True]
            if method is not None:
                due = method.clock.tick(list(range(BATCH)), [SEQ_LEN] * BATCH)
                buffers.due.copy_(torch.from_numpy(due))
                graph = graph if due[method.is_rare].any() else graphs.get(False, graph)
            qkv.normal_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            runs.append(begin.elapsed_time(end) * 1e3 / NUM_LAYERS)
        return sum(runs[PERIOD:]) / TIMED


def profile(bench: Bench, number: int) -> list[tuple[str, float, int]]:
    """Microseconds and launches of every kernel in a step, averaged over one period, most first."""
    tokens = torch.randint(0, 152064, (BATCH,), device="cuda")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for step in range(PERIOD):
            bench.stage.forward(bench.segments(number, WARM + step), tokens, None, range(BATCH))
        torch.cuda.synchronize()
    events = [event for event in found.key_averages() if event.device_time_total]
    rows = [(event.key[:60], event.device_time_total / PERIOD, event.count // PERIOD) for event in events]
    return sorted(rows, key=lambda row: -row[1])


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quantization", default="auto", help="of the weights: auto (bfloat16), int8, int4 or fp8")
    parser.add_argument("--kv", default="auto", help="type of K and V: auto (bfloat16) or fp8")
    parser.add_argument("--only", nargs="*", help="configurations to measure")
    parser.add_argument("--profile", help="a configuration whose kernels are listed")
    parser.add_argument("--commit", help="of this checkout, where it was copied without its git folder")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    if options.commit:
        timing.copied_from(options.commit)
    configs = {name: c for name, c in configurations().items() if not options.only or name in options.only}
    quantized = options.quantization != "auto"
    suffix = "_quantized" if quantized else ""
    rate = copy_rate()
    bench = Bench(options, configs)
    began = time.perf_counter()
    for number in range(len(configs)):
        for scans_rare in bench.stage.attention.scan_forms(number):
            bench.stage._steps.capture(number, BATCH, scans_rare)
    print(f"captured in {time.perf_counter() - began:.0f} s, copy {rate:.0f} GB/s", flush=True)
    rows: list[dict[str, object]] = []
    lines: list[Line] = []
    dense_ms = float("nan")
    for number, name in enumerate(configs):
        bench.open(number)
        ms, wall_ms, host_ms = bench.step_ms(number)
        if name == options.profile:
            for key, us, count in profile(bench, number):
                print(f"    {us:9.1f} us {count:5} x {key}", flush=True)
        layer_us = bench.attention_us(number)
        dense_ms = ms if name == "dense" else dense_ms
        print(
            f"{name:16} step {ms:7.3f} ms (wall {wall_ms:.3f}, host {host_ms:.3f}), {BATCH / ms * 1e3:6.0f} tokens/s,"
            f" dense / this {dense_ms / ms:5.2f}, attention {layer_us:7.1f} us a layer",
            flush=True,
        )
        row = {"configuration": name, "quantization": options.quantization, "kv": options.kv, "step_ms": ms}
        row.update(wall_ms=wall_ms, host_ms=host_ms, tokens_per_s=BATCH / ms * 1e3, dense_over_this=dense_ms / ms)
        rows.append({**row, "attention_us_a_layer": layer_us, "copy_gb_per_s": rate})
        lines.append(Line(f"operators.step_{name}{suffix}", ms, "ms", BARS.get((name, quantized))))
        lines.append(
            Line(f"operators.attention_{name}{suffix}", layer_us, "us a layer", None if quantized else LAYER_BARS.get(name))
        )
        if name != "dense" and dense_ms == dense_ms:
            bar = None if quantized else RATIO_BARS.get(name)
            lines.append(Line(f"operators.step_{name}_dense_ratio{suffix}", dense_ms / ms, "x", bar))
    print(timing.write_csv(f"step{suffix}", rows))
    record(lines)
    show(lines)


if __name__ == "__main__":
    main()
