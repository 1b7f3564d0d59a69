"""What the way through the actors costs a decode step: plan, stages, result, output, with a model that computes nothing.

    python -m benchmarks.bench_pipeline            # ms a step for one and two lanes, one to three stages

`ms a step` is wall time over steps; `outside stages` is what is left of it after the stages' own time, of which the lanes
overlap; `cpu` is processor time a step of the scheduler's process, and of this one, which reads the outputs.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from typing import Any

import ray
import torch

from benchmarks.timing import timing_of, write_csv
from qsa.actors.engine import Engine
from qsa.actors.placement import NAMESPACE, start_local_ray
from qsa.actors.stage_spec import StageSpec
from qsa.config import make_config
from qsa.memory.kv_cache import KVCache
from qsa.memory.layout import KVLayout, SummaryLayout
from qsa.scheduler.request import SamplingParams

HIDDEN_SIZE = 576
VOCAB_SIZE = 64


class _NoAttention:
    """Opens and releases slots, and does nothing else."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    def summary_layout(self, sparse_id: int) -> SummaryLayout:
        return SummaryLayout(64, 0)

    def open(self, slot: int, sparse_id: int) -> None:
        self._cache.open(slot, self.summary_layout(sparse_id))

    def release(self, slot: int) -> None:
        self._cache.release(slot)

    def take_stats(self) -> list[Any]:
        return []


class EmptyModel:
    """A stage that returns what it must, without computing it."""

    dtype = torch.bfloat16
    weight_bytes = 0

    def __init__(self, spec: StageSpec) -> None:
        self._is_last = spec.is_last
        self.cache = KVCache(
            KVLayout(1, 64, 2),
            self.dtype,
            num_layers=1,
            num_chunks=spec.num_chunks,
            max_sequences=spec.max_sequences,
            max_seq_len=spec.max_model_len,
            device=torch.device("cpu"),
        )
        self.attention = _NoAttention(self.cache)
        self._hidden = torch.zeros(1024, HIDDEN_SIZE, dtype=self.dtype)
        self._logits = torch.zeros(16, VOCAB_SIZE)

    def forward(self, segments: Any, token_ids: Any, hidden: Any, sample_rows: Any) -> torch.Tensor:
        num_tokens = sum(segment.extend_len for segment in segments)
        return self._logits[: len(sample_rows)] if self._is_last else self._hidden[:num_tokens]

    def close(self) -> None:
        self.cache.close()


def cpu_s(pid: int) -> float:
    """Processor time of a process so far, from /proc, in hundredths of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


async def measure(engine: Engine, num_requests: int, num_tokens: int, scheduler_pid: int) -> dict[str, float]:
    async def one(number: int) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        async for _ in engine.generate([number + 1], sampling):
            pass

    before, cpu, own = await engine.stats(), cpu_s(scheduler_pid), time.process_time()
    begin = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(num_requests)))
    wall_ms = (time.perf_counter() - begin) * 1e3
    after = await engine.stats()
    steps = after.scheduler.steps - before.scheduler.steps
    busy_ms = sum(b.busy_s - a.busy_s for a, b in zip(before.stages, after.stages, strict=True)) * 1e3
    return {
        "step_ms": wall_ms / steps,
        "stages_ms": busy_ms / steps,
        "scheduler_cpu_ms": (cpu_s(scheduler_pid) - cpu) * 1e3 / steps,
        "reader_cpu_ms": (time.process_time() - own) * 1e3 / steps,
    }


async def bench(engine: Engine, num_stages: int, num_tokens: int, repeat: int) -> list[dict[str, object]]:
    actor = ray.get_actor(f"qsa/{engine.name}/scheduler", namespace=NAMESPACE)
    pid: int = await actor.__ray_call__.remote(_pid)
    await measure(engine, 1, 200, pid)
    rows: list[dict[str, object]] = []
    for lanes in (1, 2):
        runs = [await measure(engine, lanes, num_tokens, pid) for _ in range(repeat)]
        row: dict[str, object] = {"num_stages": num_stages, "lanes": lanes}
        row |= {name: round(timing_of([run[name] for run in runs]).median, 3) for name in runs[0]}
        row["spread"] = round(timing_of([run["step_ms"] for run in runs]).spread, 3)
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        rows.append(row)
    return rows


def _pid(_: object) -> int:
    import os  # noqa: PLC0415 - runs in the actor's process

    return os.getpid()


def main() -> None:
    parser = argparse.ArgumentParser(description="ms that a decode step takes beside the model")
    parser.add_argument("--tokens", type=int, default=1000, help="decode steps of a run")
    parser.add_argument("--repeat", type=int, default=5, help="runs; the median counts")
    args = parser.parse_args()
    start_local_ray()
    rows: list[dict[str, object]] = []
    for num_stages in (1, 2, 3):
        config = make_config({"model": {"max_model_len": 4096}, "pipeline": {"num_stages": num_stages, "cpus_per_stage": 0.2}})
        with Engine.start(config, build=EmptyModel) as engine:
            rows += asyncio.run(bench(engine, num_stages, args.tokens, args.repeat))
    ray.shutdown()
    print(write_csv("pipeline", rows))


if __name__ == "__main__":
    main()
