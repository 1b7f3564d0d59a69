"""The figure of accuracy over attended tokens, from the rows of bench_quality.

python -m benchmarks.plot_quality      # draws it again from benchmarks/results/quality.csv
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.drawing import load_pyplot
from benchmarks.timing import RESULTS

FIGURES = Path(__file__).resolve().parent / "figures"
LOOKS = {
    "code": ("#0b5fa5", "o", "code, exact rerank (QSA)"),
    "minmax": ("#c77700", "s", "min-max bound of a slice (Quest)"),
    "mean": ("#8a8a8a", "^", "mean key of a slice (the article)"),
}


def plot_curve(rows: Sequence[dict[str, Any]], path: Path = FIGURES / "quality.png") -> Path:
    """Two panels over attended tokens at 8K: KL to dense attention, and digits found in a lookup."""
    plt = load_pyplot()

    curve = [row for row in rows if row["geometry"] == "curve"]
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for panel, protocol in zip(panels, ("continuation", "lookup")):
        for name, (colour, marker, label) in LOOKS.items():
            points: dict[int, list[dict[str, Any]]] = {}
            for row in curve:
                if row["protocol"] == protocol and row["config"].split()[0] == name:
                    points.setdefault(row["attended"], []).append(row)
            budgets = sorted(points)
            values = [_value(points[budget], protocol) for budget in budgets]
            panel.plot(budgets, values, color=colour, marker=marker, label=label)
        panel.set_xscale("log", base=2)
        ticks = sorted({row["attended"] for row in curve if row["config"] != "dense"})
        panel.set_xticks(ticks, [str(tick) for tick in ticks])
        panel.minorticks_off()
        panel.set_xlabel("tokens attended of 8192")
        panel.grid(alpha=0.25)
    dense = [row for row in curve if row["protocol"] == "lookup" and row["config"] == "dense"]
    panels[1].axhline(_value(dense, "lookup"), color="black", linestyle="--", linewidth=1, label="dense attention")
    panels[0].set_yscale("log")
    panels[0].set_title("KL to dense attention, nats a token (lower is better)", fontsize=10)
    panels[1].set_title("Key-value lookup, share of digits right", fontsize=10)
    panels[1].set_ylim(0, 1)
    panels[1].legend(fontsize=8, loc="lower right")
    figure.suptitle("SmolLM2-135M, real text of 8K tokens: what the score of a slice decides", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _value(rows: Sequence[dict[str, Any]], protocol: str) -> float:
    if protocol == "continuation":
        return float(sum(row["kl"] for row in rows) / len(rows))
    return float(sum(row["right"] for row in rows) / sum(row["tokens"] for row in rows))


def read_rows(path: Path = RESULTS / "quality.csv") -> list[dict[str, Any]]:
    """Rows of the CSV, with numbers where the figure needs them."""
    with path.open(newline="") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    for row in rows:
        row |= {name: int(row[name]) for name in ("attended", "right", "tokens")} | {"kl": float(row["kl"])}
    return rows


if __name__ == "__main__":
    print("written:", plot_curve(read_rows()))
