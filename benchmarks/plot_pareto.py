"""Quality against time: what every way to choose slices costs a layer and decode step, and how far it is from dense attention.

Quality: KL at 8K in the scaled-down geometry (rows `pareto` of quality.csv). Time: a model of one layer at the 7B shape,
8 sequences of 256K tokens and 4096 attended, put together from the operators' own times in kernels.csv.

    python -m benchmarks.plot_pareto      # draws benchmarks/figures/pareto.png and prints the table for the docs
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.drawing import load_pyplot
from benchmarks.plot_quality import FIGURES
from benchmarks.quality_configs import GEOMETRIES, TWO, pareto
from benchmarks.quality_stage import DENSE
from benchmarks.timing import RESULTS, ROOT
from qsa.kernels.registry import SparseConfig
from qsa.kernels.summaries.code import load_calibration

ATTEND_MORE = 17.0  # microseconds of every further 4096 tokens in a list that is not reranked; from a prototype
LIST = 55  # slices of 64 of a list: with window and sink 4096 tokens
BAR = 0.025  # KL that the scaled-down geometry may have
PRESET_OF = {"4": "quality", "4/2": "balanced", "3/1": "fast"}
BESIDE = (6, 4)  # where a point's name stands, in points
LABELS = {"4/2": (-34, -22), "4/2, scan 1/4/32": (-92, -12), "4/1": (-18, -10), "3/2": (-20, -6), "3/1": (-62, -4)}
LABELS |= {"4/2, scan 1/1/16": (4, -14), "6/2": (-4, 7), "4/2, scan 1/1/1": (-20, 9), "3/1, scan 2/4/16": (8, -9)}
UNNAMED = ("4/2, scan 1/2/16", "4/2, scan 1/4/8", "4/2, scan 2/4/16")  # too close to others; the table has them


@dataclass(frozen=True)
class Point:
    """One way to choose: microseconds a layer and step, KL and agreement as means over the texts, the worst perplexity."""

    name: str
    micros: float
    scans: float
    kl: float
    agreement: float
    perplexity: float


@functools.cache
def parts(path: Path = RESULTS / "kernels.csv") -> dict[str, float]:
    """Microseconds of a layer at 8 x 256K, 28 query and 4 KV heads of 128, codes of 64 bytes a token.

    prepare: rotation, K, V and codes of the new tokens. scan: all codes, and the choice of a pool. score: exact keys of one
    slice of the pool. rerank: what a rerank takes beside that. attend: a list of 4096 tokens that is not reranked.
    """
    with path.open(newline="") as file:
        measured = {row["operator"]: float(row["median_us"]) for row in csv.DictReader(file)}
    two, four = (measured[f"rerank_decode_4096_pool_{times}x"] for times in (2, 4))
    score = (four - two) / (2 * LIST)
    return {
        "prepare": measured["decode_prepare"],
        "scan": measured["code_scan"] + measured["select_decode_220"],
        "score": score,
        "rerank": two - 2 * LIST * score,
        "attend": measured["sparse_decode_4096"],
    }


def micros(config: SparseConfig, num_layers: int) -> float:
    """Time of a decode step's attention at the 7B shape, mean over the layers."""
    list_size, part = GEOMETRIES["small"].top_k_fine, parts()
    total = num_layers * part["prepare"]
    for layer in range(num_layers):
        total += part["scan"] / config.scan_interval(layer)
        times, pool = config.top_k_fine / list_size, config.pool_size(layer) / list_size * LIST
        if config.pool_size(layer) == config.top_k_fine:
            total += part["attend"] + ATTEND_MORE * (times - 1)
        else:
            total += part["score"] * pool + part["rerank"] * times
    return total / num_layers


def points(rows: Sequence[dict[str, Any]], scan_every: tuple[int, ...]) -> list[Point]:
    """Every measured way, cheapest first."""
    num_layers, configs = len(scan_every), pareto(scan_every)
    by = {(row["config"], row["text"]): row for row in rows}
    found = []
    for name, config in configs.items():
        picked = [by[name, text] for text in TWO if (name, text) in by]
        if len(picked) < len(TWO):
            continue
        ratio = max(float(row["perplexity"]) / float(by[DENSE, row["text"]]["perplexity"]) for row in picked)
        scans = sum(1 / config.scan_interval(layer) for layer in range(num_layers)) / num_layers
        kl, agreement = (sum(float(row[column]) for row in picked) / len(picked) for column in ("kl", "agreement"))
        found.append(Point(name, micros(config, num_layers), scans, kl, agreement, ratio))
    return sorted(found, key=lambda point: point.micros)


def front(found: Sequence[Point]) -> list[Point]:
    """Points that no cheaper one equals, cheapest first."""
    best: list[Point] = []
    for point in found:
        if not best or point.kl < best[-1].kl:
            best.append(point)
    return best


def read_points(path: Path = RESULTS / "quality.csv") -> list[Point]:
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["geometry"] == "pareto"]
    (calibration,) = (ROOT / "model" / "data").glob("*.code.safetensors")
    return points(rows, load_calibration(calibration, 0, 1).scan_every or ())


def plot_pareto(path: Path = FIGURES / "pareto.png") -> Path:
    """KL over microseconds, the front as a line, presets marked."""
    plt = load_pyplot()

    found = read_points()
    best = front(found)
    figure, axes = plt.subplots(figsize=(8.4, 5.0), layout="constrained")
    axes.plot([p.micros for p in best], [p.kl for p in best], color="#0b5fa5", linewidth=1.5, zorder=1, label="front")
    for point in found:
        preset = PRESET_OF.get(point.name)
        colour = "#c0392b" if preset else "#0b5fa5" if point in best else "#9a9a9a"
        axes.scatter([point.micros], [point.kl], s=58 if preset else 24, color=colour, zorder=3 if preset else 2)
        if point.name not in UNNAMED:
            label, place = f"{point.name}  ({preset})" if preset else point.name, LABELS.get(point.name, BESIDE)
            axes.annotate(label, (point.micros, point.kl), place, textcoords="offset points", fontsize=7.5, color=colour)
    axes.axhline(BAR, color="black", linestyle="--", linewidth=1, label=f"bar: {BAR}")
    axes.set_xlim(right=128)
    axes.set_yscale("log")
    ticks = [0.02, 0.025, 0.03, 0.04, 0.06, 0.08]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("microseconds a layer and step, 8 x 256K, 4096 tokens attended (7B shape, H200, sum of operators)")
    axes.set_ylabel("KL to dense attention, nats a token")
    axes.set_title("Pool of layers that scan often / most rarely, in lists; a pool of 1 is not reranked", fontsize=10)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def table(found: Sequence[Point]) -> str:
    """The table of the docs."""
    best = front(found)
    lines = ["| proposed | scans a step | us a layer | KL | agreement | perplexity |", "| --- | --- | --- | --- | --- | --- |"]
    for point in found:
        name = f"**{point.name}**" if point in best else point.name
        name += f" (`{PRESET_OF[point.name]}`)" if point.name in PRESET_OF else ""
        numbers = (
            f"{point.scans:.2f} | {point.micros:.0f} | {point.kl:.4f} | {point.agreement:.3f} | {point.perplexity - 1:+.1%}"
        )
        lines.append(f"| {name} | {numbers.replace('%', ' %')} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print("written:", plot_pareto())
    print(table(read_points()))
