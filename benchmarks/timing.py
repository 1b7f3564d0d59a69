"""What every benchmark says about itself: medians and spread, the machine, the commit, and the CSV they go into."""

from __future__ import annotations

import csv
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Timing:
    """Repeated measurements of one thing; `spread` is (largest - smallest) / median."""

    median: float
    spread: float
    runs: tuple[float, ...]


def timing_of(runs: Sequence[float]) -> Timing:
    """Median and spread of values that were measured already."""
    median = statistics.median(runs)
    return Timing(median, (max(runs) - min(runs)) / median if median else 0.0, tuple(runs))


def time_call(call: Callable[[], object], repeat: int = 5, warmup: int = 1) -> Timing:
    """Seconds that a call takes on this thread."""
    for _ in range(warmup):
        call()
    runs = []
    for _ in range(repeat):
        begin = time.perf_counter()
        call()
        runs.append(time.perf_counter() - begin)
    return timing_of(runs)


def machine() -> str:
    """Processor, cores, memory, and the GPUs where `nvidia-smi` lists any."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        name = names[0] if names else name
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    parts = [name, f"{os.cpu_count()} cores", f"{memory} GiB"]
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        cards = subprocess.run(query, capture_output=True, text=True, check=True, timeout=10).stdout.split("\n")
        parts += sorted({f"{cards.count(card)} x {card}" for card in cards if card})
    except (OSError, subprocess.SubprocessError):
        pass
    return ", ".join(parts)


_copied_from: list[str] = []


def copied_from(hash: str) -> None:
    """Say which commit this tree is a copy of, where the git folder did not come along."""
    _copied_from[:] = [hash]


def commit() -> str:
    """Short hash of the checkout; a `+` says that tracked files differ from it."""
    if _copied_from:
        return _copied_from[0]
    try:
        options = {"capture_output": True, "text": True, "check": True, "cwd": ROOT, "timeout": 10}
        head = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], **options).stdout.strip()  # type: ignore[call-overload]
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], **options).stdout.strip()  # type: ignore[call-overload]
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    lines = [line for line in changed.splitlines() if "benchmarks/results/" not in line]
    return f"{head}+" if lines else head


def write_csv(name: str, rows: Sequence[Mapping[str, object]]) -> Path:
    """Write `benchmarks/results/NAME.csv`, each row with the machine and the commit at its end."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.csv"
    tail = {"machine": machine(), "commit": commit()}
    columns = [*dict.fromkeys(column for row in rows for column in row), *tail]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows({**{key: _short(value) for key, value in row.items()}, **tail} for row in rows)
    return path


def _short(value: object) -> object:
    return float(f"{value:.6g}") if isinstance(value, float) else value
