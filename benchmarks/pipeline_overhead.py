"""What the way through the actors costs a decode step under every transport, with a model that computes nothing."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from benchmarks.pipeline_models import EmptyModel
from benchmarks.timing import timing_of
from qsa.actors.engine import Engine
from qsa.actors.placed_scheduler import NAMESPACE
from qsa.config import make_config
from qsa.engine_pace import read_all
from qsa.errors import QSAError
from qsa.model.checkpoint.open import open_model

TRANSPORTS = ("object_store", "rdt", "p2p")
BURSTS = (1, 32)
STREAMS = (1, 2)  # one lane, two lanes


@dataclass
class Overhead:
    """Rows of the table, and the figures of the summary."""

    rows: list[dict[str, object]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)


def measure_overhead(device: str, model: str, load_format: str, num_tokens: int, repeat: int) -> Overhead:
    """Engines of one, two and three stages on the CPU, or of one and two on cards.

    Args:
        model:      whose headers the engine reads; its layers are divided and not built.
        num_tokens: decode steps of a run.
        repeat:     runs of which the median counts.
    """
    found = Overhead()
    checkpoint = open_model(model, load_format)
    num_layers = checkpoint.spec.num_layers
    checkpoint.close()
    base = {"model": {"path": model, "load_format": load_format, "max_model_len": 4096}}
    for num_stages in (1, 2, 3) if device == "cpu" else (1, 2):
        for transport in TRANSPORTS if num_stages > 1 else ("object_store",):
            for burst_steps in BURSTS:
                label = {"device": device, "num_stages": num_stages, "transport": transport if num_stages > 1 else "none"}
                try:
                    config = make_config(base | {"pipeline": _pipeline(device, num_layers, num_stages, transport, burst_steps)})
                    with Engine.start(config, build=EmptyModel) as engine:
                        rows = asyncio.run(_table(engine, num_tokens, repeat))
                except QSAError as error:
                    print(f"{label}: {error}", flush=True)
                    continue
                for row in rows:
                    row = {**label, "burst_steps": burst_steps, **row}
                    print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
                    found.rows.append(row)
                    _figure(found.figures, row)
    return found


def _figure(figures: dict[str, float], row: dict[str, Any]) -> None:
    if row["burst_steps"] == max(BURSTS) and row["num_stages"] == 2:
        figures[f"{row['device']}_{row['transport']}_{row['streams']}_streams_round_ms"] = row["round_ms"]


def _pipeline(device: str, num_layers: int, num_stages: int, transport: str, burst_steps: int) -> dict[str, object]:
    share = num_layers // num_stages
    return {
        "num_stages": num_stages,
        "split": [share] * (num_stages - 1) + [num_layers - share * (num_stages - 1)],  # there is nothing to measure
        "device": device,
        "transport": transport,
        "burst_steps": burst_steps,
        "cpus_per_stage": 0.2,
        "threads_per_stage": 1,
    }


async def _table(engine: Engine, num_tokens: int, repeat: int) -> list[dict[str, object]]:
    actor = ray.get_actor(f"qsa/{engine.name}/scheduler", namespace=NAMESPACE)
    pid: int = await actor.__ray_call__.remote(_pid)
    await _run(engine, 1, min(200, num_tokens), pid)
    rows: list[dict[str, object]] = []
    for streams in STREAMS:
        runs = [await _run(engine, streams, num_tokens, pid) for _ in range(repeat)]
        row: dict[str, object] = {"streams": streams}
        row |= {name: round(timing_of([run[name] for run in runs]).median, 3) for name in runs[0]}
        rows.append({**row, "spread": round(timing_of([run["round_ms"] for run in runs]).spread, 3)})
    return rows


async def _run(engine: Engine, num_streams: int, num_tokens: int, scheduler_pid: int) -> dict[str, float]:
    """Milliseconds a round, in which every stream gets a token: wall time, the stages' own work together, processor time of
    the scheduler's process, and of this one, which reads the outputs."""
    before, cpu, own = await engine.stats(), cpu_s(scheduler_pid), time.process_time()
    begin = time.perf_counter()
    await read_all(engine, [[number + 1] for number in range(num_streams)], num_tokens)
    wall_ms = (time.perf_counter() - begin) * 1e3
    after = await engine.stats()
    busy_ms = sum(b.busy_s - a.busy_s for a, b in zip(before.stages, after.stages, strict=True)) * 1e3
    return {
        "round_ms": wall_ms / num_tokens,
        "stages_ms": busy_ms / num_tokens,
        "scheduler_cpu_ms": (cpu_s(scheduler_pid) - cpu) * 1e3 / num_tokens,
        "reader_cpu_ms": (time.process_time() - own) * 1e3 / num_tokens,
    }


def cpu_s(pid: int) -> float:
    """Processor time of a process so far, from /proc, in hundredths of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def _pid(_: object) -> int:
    return os.getpid()
