"""How often scores kept in half precision would choose other slices than float32 ones, on real text.

    python -m benchmarks.bench_half_scores [--texts FOLDER] [--tokens N]

The default model reads 8K of a text and decodes the next tokens of it; every score that selection is given is rounded to
float16 and to bfloat16 as well, and the lists that follow are compared. Nothing but the rounding of the scores differs.
Writes benchmarks/results/half_scores.csv and the rows `operators.half_scores_*`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import quality_protocols as protocols
from benchmarks.quality_configs import GEOMETRIES
from benchmarks.quality_stage import QualityStage
from benchmarks.quality_texts import TEXTS, read_text
from benchmarks.summary import Line, record, show
from benchmarks.timing import write_csv
from qsa.kernels.registry import SparseConfig
from qsa.model.checkpoint.load import open_checkpoint, resolve_model

USED = ("rcu", "alice29")
TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
CONTEXT, STEPS = 8192, 64  # tokens of a text, the last of them decoded
Select = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def configurations() -> dict[str, SparseConfig]:
    """Scans at every step whose lists are compared; the lists of the last one are pools for the rerank."""
    base = replace(GEOMETRIES["default"], rerank="none")
    return {
        "code": base,
        "sketch": replace(base, summary="sketch"),
        "minmax": replace(base, summary="minmax"),
        "mean": replace(base, summary="mean"),
        "mean, blocks (the article)": replace(base, summary="mean", propose="blocks", top_k_coarse=4),
        "code, pool": GEOMETRIES["default"],
    }


@dataclass
class Counts:
    """Lists compared, those that changed, slices in them, and slices that changed, by half type."""

    lists: int = 0
    slices: int = 0
    changed_lists: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TYPES, 0))
    changed_slices: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TYPES, 0))


class Comparer:
    """Stands before block_select and compares what rounded scores would choose. The state: its counts."""

    def __init__(self, select: Select) -> None:
        self._select, self.counts = select, Counts()

    def __call__(
        self, scores: torch.Tensor, num_selected: int, *, block_scores: torch.Tensor | None = None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        chosen, edge = self._select(scores, num_selected, block_scores=block_scores, **options)
        lists = chosen.flatten(0, -2)
        self.counts.lists += len(lists)
        self.counts.slices += int((lists >= 0).sum())
        for name, dtype in TYPES.items():
            blocks = None if block_scores is None else block_scores.to(dtype).float()
            other, _ = self._select(scores.to(dtype).float(), num_selected, block_scores=blocks, **options)
            kept = (lists.unsqueeze(-1) == other.flatten(0, -2).unsqueeze(-2)).any(-1) | (lists < 0)
            self.counts.changed_lists[name] += int((~kept).any(-1).sum())
            self.counts.changed_slices[name] += int((~kept).sum())
        return chosen, edge


def compare(text: str, texts: Path, steps: int) -> dict[str, Counts]:
    """Counts of every configuration on one text."""
    checkpoint = open_checkpoint("default")
    model = resolve_model("default")
    calibration = Path(__file__).resolve().parent.parent / "model" / "data" / f"{model.name}.code.safetensors"
    token_ids = checkpoint.tokenizer().encode(read_text(text, texts))
    document = protocols.continuation(text, token_ids, CONTEXT, steps)
    stage = QualityStage(checkpoint, configurations(), calibration, CONTEXT)
    stage.prefill(document.context)
    attention: Any = stage.attention
    plain, found = attention._block_select, {}
    for slot, name in enumerate(stage.names, 1):
        stage.fork(slot, name, len(document.context))
        comparer = Comparer(plain)
        attention._block_select = comparer
        stage.decode({name: slot}, document.probes[0], len(document.context))
        attention._block_select = plain
        attention.release(slot)
        found[name] = comparer.counts
        print(f"{text}, {name}: {comparer.counts}", flush=True)
    stage.close()
    checkpoint.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, default=TEXTS, help="where the texts are kept")
    parser.add_argument("--tokens", type=int, default=STEPS, help=f"decode steps ({STEPS})")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for text in USED:
        for name, counts in compare(text, args.texts, args.tokens).items():
            row: dict[str, Any] = {"text": text, "config": name, "lists": counts.lists, "slices": counts.slices}
            for half in TYPES:
                row[f"{half}_lists_changed"] = counts.changed_lists[half]
                row[f"{half}_slices_changed"] = counts.changed_slices[half]
            rows.append(row)
    print("written:", write_csv("half_scores", rows))
    lines = []
    for name, short in (("code", "code"), ("mean, blocks (the article)", "article")):
        picked = [row for row in rows if row["config"] == name]
        for half in TYPES:
            share = sum(row[f"{half}_lists_changed"] for row in picked) / sum(row["lists"] for row in picked)
            lines.append(Line(f"operators.half_scores_{short}_{half}", share, "of lists"))
    show(lines)
    record(lines)


if __name__ == "__main__":
    main()
