"""Facts planted at depths of 0 to 100 % in steps of 5, asked for behind a context as long as wanted: which are found?

    python -m benchmarks.bench_retrieval --tokens 262144 --device cuda

The model is benchmarks.retrieval_model: dense attention answers everything right, sparse attention what its selection
finds, so the mean key of a slice must fail where the code and the sketch do not. The whole request runs under each
configuration, prefill included. Writes benchmarks/results/retrieval.csv and the rows `operators.retrieval_*`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.retrieval_model import Facts, RetrievalCheckpoint, calibration_text, plant, write_folder
from benchmarks.summary import Line, record, show
from benchmarks.timing import write_csv
from qsa.kernels.registry import DENSE_ID, SparseConfig
from qsa.kernels.summaries.code import CodeCalibration, load_calibration
from qsa.kernels.summaries.make import summary_slice_bytes
from qsa.memory.layout import SummaryLayout, sequence_chunks
from qsa.model.batch import Segment
from qsa.model.build import build_stage, kv_layout, resolve_dtype
from qsa.model.calibrate import calibrate

DEPTHS = tuple(step / 20 for step in range(21))
ASKED = 256  # tokens that the questions and answers take at most
CALIBRATED = 4096  # tokens of the calibration text
SLOT = 0
# 64 + 55 x 64 + 512 = 4096 tokens attended, of 262144
LONG = SparseConfig(sink_size=64, top_k_fine=55, prefill_tile=128, prefill_factor=1)


@dataclass(frozen=True)
class Found:
    """What was answered at one depth. tokens: of the value, how many were right until the first wrong one."""

    depth: float
    tokens: int
    is_right: bool


def configurations(base: SparseConfig, scan_every: tuple[int, ...] | None) -> dict[str, SparseConfig]:
    """What is compared, dense left out, the control last."""
    base = replace(base, reselect_every=scan_every or 1)
    return {
        "code": base,
        "code, no rerank": replace(base, rerank="none"),
        "sketch": replace(base, summary="sketch"),
        "mean, no rerank (control)": replace(base, summary="mean", rerank="none"),
    }


def calibrate_model(folder: Path, max_tokens: int = CALIBRATED) -> Path:
    """Write the model and its calibration into a folder; returns the calibration file."""
    write_folder(folder)
    out = folder / "code.safetensors"
    calibrate(folder, calibration_text(max_tokens), out=out, max_tokens=max_tokens)
    return out


class Asker:
    """The whole model as one stage that reads a context and answers questions. The state: what its slot holds."""

    def __init__(
        self, configs: Mapping[str, SparseConfig], calibration_path: Path, max_len: int, device: str, dtype: str = "auto"
    ) -> None:
        checkpoint = RetrievalCheckpoint()
        spec = checkpoint.spec
        self._ids = {"dense": DENSE_ID} | {name: number for number, name in enumerate(configs, DENSE_ID + 1)}
        calibration: CodeCalibration = load_calibration(calibration_path, 0, spec.num_layers)
        kv = kv_layout(checkpoint, resolve_dtype(dtype))
        layouts = [
            SummaryLayout(
                config.block_size_fine,
                summary_slice_bytes(
                    config.summary, spec.num_kv_heads, spec.head_dim, config.block_size_fine, calibration.code_dim
                ),
            )
            for config in configs.values()
        ]
        self._model = build_stage(
            checkpoint,
            first_layer=0,
            last_layer=spec.num_layers,
            num_chunks=max(sequence_chunks(kv, layout, spec.num_layers, max_len) for layout in layouts),
            max_sequences=1,
            max_model_len=max_len,
            sparse={DENSE_ID: SparseConfig(dense=True)} | {self._ids[name]: config for name, config in configs.items()},
            calibration_path=calibration_path,
            dtype=dtype,
            device=device,
        )

    def ask(self, name: str, facts: Facts, chunk: int) -> list[Found]:
        """Read the context under a configuration, then ask for every fact; answers are generated, not given."""
        sparse_id, model = self._ids[name], self._model
        model.attention.open(SLOT, sparse_id)
        length = len(facts.context)
        for start in range(0, length, chunk):
            end = min(start + chunk, length)
            model.forward([Segment(SLOT, start, end, sparse_id, True)], torch.tensor(facts.context[start:end]), None, [])
        found = []
        for depth, key, value in facts.facts:
            said, token = [], key
            for _ in value:
                segment = Segment(SLOT, length, length + 1, sparse_id, False)
                token = int(model.forward([segment], torch.tensor([token]), None, [0])[0].argmax())
                said.append(token)
                length += 1
            right = [got == wanted for got, wanted in zip(said, value)]
            found.append(Found(depth, right.index(False) if False in right else len(right), all(right)))
        model.attention.release(SLOT)
        return found

    def close(self) -> None:
        self._model.close()


def measure(
    base: SparseConfig,
    tokens: int,
    device: str,
    calibration_path: Path,
    chunk: int,
    dtype: str = "auto",
    depths: Sequence[float] = DEPTHS,
) -> dict[str, tuple[list[Found], float]]:
    """By configuration, dense included: what was found, and the seconds it took."""
    scan_every = load_calibration(calibration_path, 0, 1).scan_every
    configs = configurations(base, scan_every)
    asker = Asker(configs, calibration_path, tokens + ASKED, device, dtype)
    facts = plant(tokens, depths)
    results = {}
    for name in ("dense", *configs):
        begin = time.perf_counter()
        results[name] = asker.ask(name, facts, chunk), time.perf_counter() - begin
        right = sum(one.is_right for one in results[name][0])
        print(f"{name:28} {right:2} of {len(depths)} depths, {results[name][1]:.1f} s", flush=True)
    asker.close()
    return results


def lines(results: Mapping[str, tuple[Sequence[Found], float]], size: str) -> list[Line]:
    """Rows of the summary; all must be right but the control, which must not."""
    names = {"dense": "dense", "code": "sparse", "code, no rerank": "sparse_no_rerank", "sketch": "sketch"}
    made = []
    for name, (found, _) in results.items():
        right = sum(one.is_right for one in found)
        if name in names:
            made.append(Line(f"operators.retrieval_{size}_{names[name]}", right, f"of {len(DEPTHS)}", f">= {len(DEPTHS)}"))
        else:
            made.append(Line(f"operators.retrieval_{size}_control_mean", right, f"of {len(DEPTHS)}", f"<= {len(DEPTHS) - 1}"))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384, help="length of the context (16384)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", default="auto", help="bfloat16 (auto), float16 or float32")
    parser.add_argument("--slices", type=int, default=LONG.top_k_fine, help="slices of 64 tokens in a list (55)")
    parser.add_argument("--chunk", type=int, default=0, help="tokens of a prefill step (cpu 512, cuda 8192)")
    args = parser.parse_args()
    base = replace(LONG, top_k_fine=args.slices)
    chunk = args.chunk or (8192 if args.device.startswith("cuda") else 512)
    with tempfile.TemporaryDirectory() as folder:
        calibration = calibrate_model(Path(folder))
        results = measure(base, args.tokens, args.device, calibration, chunk, args.dtype)
    rows: list[dict[str, Any]] = [
        {"tokens": args.tokens, "attended": args.tokens if name == "dense" else base.token_budget, "device": args.device}
        | {"config": name, "depth": one.depth, "tokens_right": one.tokens, "right": int(one.is_right)}
        | {"seconds": round(seconds, 2)}
        for name, (found, seconds) in results.items()
        for one in found
    ]
    size = f"{args.tokens >> 10}k"
    print("written:", write_csv(f"retrieval_{size}", rows))
    made = lines(results, size)
    show(made)
    record(made)


if __name__ == "__main__":
    main()
