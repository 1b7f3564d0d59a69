"""Quality of sparse attention on real text, through the engine's own stage, beside dense attention on the same K and V.

Every bar has controls that must miss it in the same run. `make test` runs a part at 4K on the text that ships with the
package; `pytest -m slow` runs all of `benchmarks.bench_quality`, which fetches more texts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import quality_protocols as protocols
from benchmarks.bench_quality import TEXTS, all_tasks, run_task, summarise
from benchmarks.quality_configs import ARTICLE, GEOMETRIES, SINKLESS, WINDOW, controls, window_only
from benchmarks.quality_stage import DENSE, QualityStage, Scores, score
from benchmarks.quality_texts import fetch
from qsa.kernels.registry import SparseConfig
from qsa.kernels.summaries.code import load_calibration
from qsa.model.checkpoint.load import open_checkpoint, resolve_model

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "qsa" / "data" / "alice.txt").read_text(encoding="utf-8")
PREFILLED = "small, prefilled sparsely"

FOUND = [  # name, digits of a lookup at 4K
    (DENSE, 0.85),
    ("default", 0.85),
    ("small", 0.85),
    ("small, scans as calibrated", 0.85),
    ("small, sketch", 0.85),
]


def calibration() -> Path:
    """Of the default model; where that is not installed, other tests are still collected."""
    return ROOT / "model" / "data" / f"{resolve_model('default').name}.code.safetensors"


def configs() -> dict[str, SparseConfig]:
    small = GEOMETRIES["small"]
    scan_every = load_calibration(calibration(), 0, 1).scan_every
    assert scan_every is not None
    return {
        "default": GEOMETRIES["default"],
        "small": small,
        "small, scans as calibrated": replace(small, reselect_every=scan_every),
        "small, sketch": replace(small, summary="sketch"),
        PREFILLED: small,
        ARTICLE: controls("default")[ARTICLE],
        WINDOW: window_only(small),
        SINKLESS: small,
    }


@pytest.fixture(scope="module")
def stage():
    torch.use_deterministic_algorithms(False)  # memory filled with NaN is for operators' tests; this one takes its time
    checkpoint = open_checkpoint("default")
    built = QualityStage(checkpoint, configs(), calibration(), 4096 + 128)
    yield built
    built.close()
    checkpoint.close()


@pytest.fixture(scope="module")
def tokenizer():
    return open_checkpoint("default").tokenizer()


@pytest.fixture(scope="module")
def lookup(stage, tokenizer) -> dict[str, Scores]:
    """Twelve lines `word word word: 12345` in 4096 tokens, six of them asked for."""
    filler = tokenizer.encode(TEXT)[200:]
    document = protocols.lookup("alice", filler, 4096, 12, tokenizer.encode, seed=112)
    names = [name for name in stage.names if name not in (PREFILLED, SINKLESS)]
    return stage.measure(replace(document, probes=document.probes[::2]), names)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "bar"), FOUND)
def test_lookup_finds_what_was_said_far_back(lookup, name, bar):
    assert lookup[name].accuracy >= bar


@pytest.mark.parametrize("control", [ARTICLE, WINDOW])
def test_lookup_fails_with_a_poor_choice(lookup, control):
    assert lookup[control].accuracy < 0.6


@pytest.fixture(scope="module")
def continued(stage, tokenizer) -> dict[str, Scores]:
    """The last 96 of 3072 tokens of a text, on a dense prefill and on a sparse one in chunks of 256 with tiles of 64."""
    document = protocols.continuation("alice", tokenizer.encode(TEXT), 3072, 96)
    names = [PREFILLED, "default", "small", ARTICLE, WINDOW, SINKLESS]
    slots = {name: slot for slot, name in enumerate([DENSE, *names])}
    stage.prefill(document.context)
    stage.prefill(document.context, PREFILLED, slots[PREFILLED], chunk=256)
    for name in names[1:]:
        stage.fork(slots[name], name, len(document.context))
    logits = stage.decode(slots, document.probes[0], len(document.context))
    for slot in slots.values():
        stage.attention.release(slot)
    return {name: score(logits[DENSE], logits[name], document.probes[0]) for name in slots}


@pytest.mark.parametrize(("name", "most"), [("default", 0.010), ("small", 0.025)])
def test_next_tokens_are_those_of_dense_attention(continued, name, most):
    assert continued[name].mean_kl <= most
    assert continued[name].agreement >= 0.90  # of 96 tokens; the bar of 0.95 is for the 1280 of the slow test


def test_perplexity_is_that_of_dense_attention(continued):
    assert continued["default"].perplexity <= 1.04 * continued[DENSE].perplexity


def test_a_sparse_prefill_leaves_the_same_text(continued):
    """What the later tokens read was itself computed with sparse attention."""
    assert 1e-5 < continued[PREFILLED].mean_kl <= 0.025


@pytest.mark.parametrize(("control", "bar"), [(ARTICLE, 0.010), (WINDOW, 0.025), (SINKLESS, 0.025)])
def test_next_tokens_differ_with_a_poor_choice(continued, control, bar):
    assert continued[control].mean_kl > 1.5 * bar


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_every_bar_on_all_texts():
    """All of bench_quality: five texts at 8K, lookup, passkey and copy at 4K and 8K, sparse prefill, both geometries."""
    fetch()
    tasks = [task for task in all_tasks() if task.geometry != "curve"]
    rows = [row for task in tasks for row in run_task((task, TEXTS, calibration(), 2))]
    lines = summarise(rows)
    assert len([line for line in lines if line.bar]) > 30
    missed = [line for line in lines if line.met is False and "copy_8k" not in line.name]
    assert not missed
    # at 8K dense attention itself copies too little on some of the texts: there the bar is on the text where it does
    copied = {line.name: line.value for line in lines if "copy_8k" in line.name}
    assert copied["model.quality_small.copy_8k_handbook"] >= 0.70
    assert copied["model.quality_small.copy_8k"] >= 0.92 * copied["model.quality_small_dense.copy_8k"]
