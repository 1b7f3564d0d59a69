"""Quality of the presets under every bar, and of cheaper and dearer choices beside them for the Pareto front.

    python -m benchmarks.bench_presets [--texts FOLDER] [--only presets|pareto|prefill] [--threads N]

Rows go into benchmarks/results/quality.csv beside those of bench_quality, which stay; bars into the summary's rows
`operators.quality_*`; the figure is benchmarks/figures/pareto.png. One core: about an hour.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_quality import (
    CONTINUED,
    COPIED,
    DONE,
    FULL,
    KEYS,
    PREFILL_CHUNK,
    ROOM,
    Table,
    Task,
    bars,
    documents,
    fingerprint,
)
from benchmarks.plot_pareto import plot_pareto
from benchmarks.quality_configs import CALIBRATED, GEOMETRIES, TWO, pareto, prefills, presets, scans_share
from benchmarks.quality_protocols import Document
from benchmarks.quality_stage import DENSE, SOURCE, QualityStage, Scores, score
from benchmarks.quality_texts import TEXTS, read_text
from benchmarks.summary import Line, record, show
from benchmarks.timing import RESULTS, commit, machine
from qsa.kernels.registry import SparseConfig
from qsa.kernels.summaries.code import load_calibration
from qsa.kernels.summaries.make import summary_slice_bytes
from qsa.model.checkpoint.load import open_checkpoint, resolve_model

KEYS_OF_ROW = ("protocol", "text", "context", "keys", "geometry", "config")
PREFILL_BAR = 0.02
THEN_DENSE = ", decoded densely"
# of the presets balanced and fast, and as bench_prefill times it with 4096 tokens a tile
CARD_TILES = {"": "tile 128, 2 samples, 2 lists", "_as_timed": "tile 128, 1 samples, 1 lists"}


def preset_tasks() -> list[Task]:
    """Every protocol that a bar is about; both geometries run in one task, on the same K and V."""
    tasks = [Task("continuation", text, "8k", "both") for text in CONTINUED]
    for context in FULL:
        tasks += [Task("lookup", "alice29", context, "both", keys) for keys in KEYS]
        tasks += [Task("lookup", "handbook", context, "both", KEYS[1])]
        tasks += [Task("copy", text, context, "both") for text in COPIED]
    return [*tasks, Task("passkey", "alice29", "4k", "both")]


def configurations(task: Task, scan_every: tuple[int, ...]) -> dict[tuple[str, str], SparseConfig]:
    """By geometry and name."""
    if task.geometry == "pareto":
        return {("pareto", name): config for name, config in pareto(scan_every).items()}
    if task.protocol == "prefill":
        return {(task.geometry, name): config for name, config in prefills(task.geometry, scan_every).items()}
    return {(geometry, name): config for geometry in GEOMETRIES for name, config in presets(geometry, scan_every).items()}


def run_task(task: Task, texts: Path, calibration: Path) -> list[dict[str, Any]]:
    """Rows of the CSV; kept in a file, so that a run that was stopped goes on where it was."""
    checkpoint = open_checkpoint("default")
    spec, tokenizer = checkpoint.spec, checkpoint.tokenizer()
    configs = configurations(task, load_calibration(calibration, 0, 1).scan_every or (1,) * spec.num_layers)
    wanted = hashlib.sha256(f"{fingerprint()} {configs}".encode()).hexdigest()[:12]
    kept = DONE / f"presets-{'-'.join(map(str, astuple(task)))}-{wanted}.json"
    if kept.is_file():
        return list(json.loads(kept.read_text()))
    begin = time.perf_counter()
    token_ids = tokenizer.encode(read_text(task.text, texts))
    names = {f"{geometry} {name}": (geometry, name) for geometry, name in configs}
    joined = {name: configs[key] for name, key in names.items()}
    stage = QualityStage(checkpoint, joined, calibration, min(FULL[task.context] + ROOM, spec.max_model_len))
    totals: dict[str, Scores] = {}
    for document in documents(task, token_ids, tokenizer.encode):
        found = measure_tiles(stage, document) if task.protocol == "prefill" else stage.measure(document)
        totals = {name: totals.get(name, Scores()) + scores for name, scores in found.items()}
    stage.close()
    rows = []
    for name, scores in totals.items():
        decoded_densely = name.endswith(THEN_DENSE)
        name = name.removesuffix(THEN_DENSE)
        geometries = (names[name][0],) if name != DENSE else tuple(dict.fromkeys(geometry for geometry, _ in configs))
        for geometry in geometries:
            protocol = f"{task.protocol}{THEN_DENSE}" if decoded_densely else task.protocol
            row: dict[str, Any] = {"protocol": protocol, "text": task.text, "context": task.context, "keys": task.keys}
            row |= {"geometry": geometry, "config": DENSE, "attended": FULL[task.context], "scans": 0.0, "summary_bytes": 0.0}
            if name != DENSE:
                config = joined[name]
                size, row["config"] = config.block_size_fine, names[name][1]
                taken = summary_slice_bytes(config.summary, spec.num_kv_heads, spec.head_dim, size, spec.num_kv_heads * 8)
                row["attended"], row["scans"] = config.token_budget, round(scans_share(config, spec.num_layers), 3)
                row["summary_bytes"] = round(taken / size / spec.num_kv_heads, 2)
            row |= {"tokens": scores.count, "right": scores.right, "same": scores.same, "accuracy": scores.accuracy}
            rows.append(row | {"kl": scores.mean_kl, "agreement": scores.agreement, "perplexity": scores.perplexity})
    DONE.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(rows))
    print(f"{' '.join(map(str, astuple(task)))}: {time.perf_counter() - begin:.0f} s", flush=True)
    return rows


def measure_tiles(stage: QualityStage, document: Document) -> dict[str, Scores]:
    """The context wholly prefilled under every configuration, then its probe: under the same one, and with dense attention."""
    (probe,), seq_len, found = document.probes, len(document.context), {}
    stage.prefill(document.context, DENSE, SOURCE, PREFILL_CHUNK)
    dense = stage.decode({DENSE: SOURCE}, probe, seq_len)[DENSE]
    found[DENSE] = score(dense, dense, probe)
    for name in stage.names:
        stage.prefill(document.context, name, SOURCE + 1, PREFILL_CHUNK)
        for decoded, stored in ((name, name), (DENSE, f"{name}{THEN_DENSE}")):
            found[stored] = score(dense, stage.decode({decoded: SOURCE + 1}, probe, seq_len)[decoded], probe)
    for slot in (SOURCE, SOURCE + 1):
        stage.attention.release(slot)
    return found


def update_csv(rows: Sequence[Mapping[str, Any]], path: Path = RESULTS / "quality.csv") -> Path:
    """Lay rows over those of the CSV: the same protocol, text, geometry and configuration is replaced, others stay."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        columns, kept = list(reader.fieldnames or ()), list(reader)
    tail = {"machine": machine(), "commit": commit()}
    short = [{key: float(f"{v:.6g}") if isinstance(v, float) else v for key, v in row.items()} | tail for row in rows]
    new = {tuple(str(row[key]) for key in KEYS_OF_ROW): row for row in short}
    old = {tuple(str(row[key]) for key in KEYS_OF_ROW): row for row in kept}
    # dense attention is measured by every run; one row of it is enough
    merged = old | {key: row for key, row in new.items() if key[-1] != DENSE or key not in old}
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(merged.values())
    return path


def preset_lines(rows: Sequence[dict[str, Any]]) -> list[Line]:
    """Bars of every preset, in both geometries; what the default keeps to stands under the names of bench_quality."""
    table, lines = Table(rows), []
    for name in dict.fromkeys(row["config"] for row in rows if row["config"] != DENSE):
        for geometry in GEOMETRIES:
            tail = "" if geometry == "default" else f"_{geometry}"
            if name == CALIBRATED:
                lines += bars(table, name, geometry, f"model.quality{tail}_calibrated_scans")
                continue
            for line in bars(table, name, geometry, f"operators.quality_{name.replace(' ', '_')}{tail}"):
                is_bar = name == "balanced" and not (geometry == "small" and line.name.endswith("copy_8k"))
                lines.append(Line("_".join(line.name.rsplit(".", 1)), line.value, line.unit, line.bar if is_bar else None))
    return lines


def prefill_lines(rows: Sequence[dict[str, Any]]) -> list[Line]:
    """KL on the worst text with the tiles of CARD_TILES."""
    lines = []
    for which, name in CARD_TILES.items():
        for geometry, tail in (("prefill", ""), ("prefill_small", "_small")):
            picked = [row for row in rows if row["geometry"] == geometry and row["config"] == name]
            for protocol, what in (("prefill", ""), (f"prefill{THEN_DENSE}", "_then_dense")):
                kl = max(row["kl"] for row in picked if row["protocol"] == protocol)
                bar = f"<= {PREFILL_BAR}" if protocol == "prefill" and not tail else None
                lines.append(Line(f"operators.quality_prefill{which}{tail}{what}_kl", kl, "nats", bar))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, default=TEXTS, help="where the texts are kept")
    parser.add_argument("--only", choices=("presets", "pareto", "prefill"), help="one part")
    parser.add_argument("--threads", type=int, default=1, help="threads (1)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = resolve_model("default")
    calibration = Path(__file__).resolve().parent.parent / "model" / "data" / f"{model.name}.code.safetensors"
    parts = {
        "pareto": [Task("continuation", text, "8k", "pareto") for text in TWO],
        "prefill": [Task("prefill", text, "4k", "prefill") for text in TWO]
        + [Task("prefill", text, "8k", "prefill_small") for text in TWO],
        "presets": preset_tasks(),
    }
    lines: list[Line] = []
    for part, tasks in parts.items():
        if args.only in (None, part):
            rows = [row for task in tasks for row in run_task(task, args.texts, calibration)]
            print("written:", update_csv(rows))
            if part == "presets":
                lines += preset_lines(rows)
            elif part == "prefill":
                lines += prefill_lines(rows)
    show(lines)
    record(lines)
    print("written:", plot_pareto())


if __name__ == "__main__":
    main()
