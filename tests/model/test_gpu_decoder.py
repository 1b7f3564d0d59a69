"""GpuStageModel against StageModel: the same logits and figures in every configuration, whatever the stages and the company."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from paged_batch import DEVICES
from tiny_models import TinyModel, make_tiny_model

from qsa.errors import ConfigError
from qsa.kernels.registry import SparseConfig
from qsa.model.batch import Segment
from qsa.model.build import build_stage
from qsa.model.checkpoint.load import Checkpoint, open_checkpoint
from qsa.model.checkpoint.random import random_calibration

SMALL = dict(window_size=32, sink_size=8, block_size_coarse=32, block_size_fine=16, top_k_fine=3, candidate_factor=2)
SMALL |= dict(prefill_tile=16, prefill_factor=1)
SPARSE = {
    0: SparseConfig(dense=True),
    1: SparseConfig(**SMALL, summary="code"),
    2: SparseConfig(**SMALL, summary="sketch", rerank="none", reselect_every=(3, 1)),
    3: SparseConfig(**SMALL, summary="mean", list_per="layer"),
    4: SparseConfig(**SMALL, summary="minmax", propose="blocks", top_k_coarse=4),
    5: SparseConfig(**{**SMALL, "top_k_fine": 10}, summary="sketch"),  # everything
}
PROMPT, CHUNKS = 150, (103, 150)  # a cut in a slice and a tile
MAX_LEN = 192


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Iterator[Checkpoint]:
    options = dict(head_dim=64, num_hidden_layers=2)
    checkpoint = open_checkpoint(str(make_tiny_model(TinyModel("qwen3", options=options), tmp_path_factory.mktemp("tiny"))))
    yield checkpoint
    checkpoint.close()


class Model:
    """One or two stages, and the sequences in their slots: token i of slot s is always the same."""

    def __init__(self, checkpoint: Checkpoint, device: str, cuts: Sequence[int] = (), **options: Any) -> None:
        spec = checkpoint.spec
        bounds = [0, *cuts, spec.num_layers]
        settings: dict[str, Any] = dict(num_chunks=160, max_sequences=6, max_model_len=MAX_LEN, sparse=SPARSE, dtype="float32")
        settings |= dict(device=device, backend="triton") | options
        self.stages = [
            build_stage(
                checkpoint,
                first_layer=first,
                last_layer=last,
                calibration=random_calibration(spec, 32, first_layer=first, last_layer=last),
                **settings,
            )
            for first, last in pairwise(bounds)
        ]
        rng = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(4, spec.vocab_size, (6, MAX_LEN), generator=rng)

    def forward(self, segments: Sequence[Segment], sample_rows: Sequence[int] | None = None) -> torch.Tensor:
        ids = torch.cat([self.tokens[s.slot, s.start : s.end] for s in segments])
        rows = range(len(ids)) if sample_rows is None else sample_rows
        hidden = None
        for stage in self.stages:
            hidden = stage.forward(segments, ids if stage.is_first else None, hidden, list(rows))
        return hidden.cpu()

    def open(self, slot: int, sparse_id: int) -> None:
        for stage in self.stages:
            stage.attention.release(slot)
            stage.attention.open(slot, sparse_id)

    def prefill(self, slot: int, sparse_id: int, chunks: Sequence[int] = CHUNKS) -> torch.Tensor:
        """A prompt in chunks; the logits of the last token of each."""
        self.open(slot, sparse_id)
        outs = []
        for start, end in zip((0, *chunks), chunks):
            outs.append(self.forward([Segment(slot, start, end, sparse_id, True)], [end - start - 1]))
        return torch.cat(outs)

    def decode(self, slots: Sequence[int], position: int, sparse_ids: Sequence[int]) -> torch.Tensor:
        return self.forward([Segment(s, position, position + 1, i, False) for s, i in zip(slots, sparse_ids)])

    def figures(self) -> list[Any]:
        if self.stages[0].device.type == "cuda":
            torch.cuda.synchronize()
        return [figures for stage in self.stages for figures in stage.attention.take_stats()]

    def run(self, sparse_id: int, slot: int = 1, steps: int = 4) -> torch.Tensor:
        outs = [self.prefill(slot, sparse_id)]
        outs += [self.decode([slot], PROMPT + step, [sparse_id]) for step in range(steps)]
        return torch.cat(outs)


@pytest.fixture(scope="module", params=DEVICES)
def gpu(request, checkpoint) -> Model:
    return Model(checkpoint, request.param)


@pytest.fixture(scope="module")
def reference(checkpoint) -> Model:
    return Model(checkpoint, "cpu", backend="torch")


# the interpreter is slow: other kinds of summaries are for `-m slow`
@pytest.mark.parametrize("sparse_id", [pytest.param(one, marks=pytest.mark.slow) if one > 2 else one for one in SPARSE])
def test_logits_and_figures_are_those_of_the_cpu(sparse_id, gpu, reference):
    got, want = gpu.prefill(1, sparse_id), reference.prefill(1, sparse_id)
    assert (got - want).abs().max() <= 2e-5 * want.abs().max()
    attended = compare_figures(gpu, reference)
    assert (attended < 2 * PROMPT * (PROMPT + 1) / 2) == (sparse_id not in (0, 5)), "tiles must select"
    for position in range(PROMPT, PROMPT + 3):
        got, want = (model.decode([1], position, [sparse_id]) for model in (gpu, reference))
        assert (got - want).abs().max() <= 2e-5 * want.abs().max()
        compare_figures(gpu, reference)


def compare_figures(gpu: Model, reference: Model) -> float:
    """Both models' figures of one slot agree; the tokens attended."""
    for got, want in zip(gpu.figures(), reference.figures(), strict=True):
        for name in ("slot", "attended", "context", "num_selected", "newly_hit", "margin"):
            assert getattr(got, name) == pytest.approx(getattr(want, name), rel=1e-3, abs=1e-4), name
    return got.attended


def test_rows_do_not_change_with_their_company(gpu):
    """Sequences of all configurations in one step, alone, and beside a prompt: bit for bit."""
    slots, sparse_ids = [4, 0, 2, 1], [1, 0, 1, 2]
    alone = []
    for slot, sparse_id in zip(slots, sparse_ids):
        gpu.prefill(slot, sparse_id, (PROMPT,))
        alone.append(gpu.decode([slot], PROMPT, [sparse_id]))
    for slot in slots:
        for stage in gpu.stages:
            stage.attention.forget(slot)
    gpu.open(5, 3)
    segments = [Segment(s, PROMPT, PROMPT + 1, i, False) for s, i in zip(slots, sparse_ids)]
    together = gpu.forward([*segments, Segment(5, 0, 20, 3, True)], [1, 2, 3, 23])
    assert torch.equal(together[:3], torch.cat(alone[1:]))
    assert torch.equal(together[3], gpu.prefill(5, 3, (20,))[0])
    gpu.figures()


@pytest.mark.slow
def test_a_slot_begins_anew(gpu):
    """A sequence in a slot that another one left, and a sequence whose selection is forgotten, are as fresh ones."""
    first = torch.cat((gpu.prefill(3, 2), gpu.decode([3], PROMPT, [2]), gpu.decode([3], PROMPT + 1, [2])))
    gpu.prefill(3, 1, (60,))
    gpu.decode([3], 60, [1])
    again = torch.cat((gpu.prefill(3, 2), gpu.decode([3], PROMPT, [2])))
    assert torch.equal(first[:-1], again)
    attention = gpu.stages[0].attention
    attention.forget(3)
    segment = [Segment(3, PROMPT + 1, PROMPT + 2, 2, False)]
    for due in ([[1], [1]], [[0], [1]], [[0], [1]], [[1], [1]]):  # layer 0 scans every third step
        assert attention.plan_decode(2, segment, None).due.tolist() == due
    gpu.figures()
    attention.release(3)
    assert attention.cache.seq_len(3) == 0 and gpu.figures() == []


def test_a_prepared_step_is_the_step_itself(gpu):
    """Prepared, dropped and prepared again, with another one's step in between: the same bits and figures."""
    sparse_id = 2
    want = gpu.run(sparse_id, steps=4)
    figures = gpu.figures()
    gpu.prefill(1, sparse_id)
    gpu.prefill(2, sparse_id)
    gpu.figures()
    stage, got = gpu.stages[0], []
    for position in range(PROMPT, PROMPT + 4):
        segments = [Segment(1, position, position + 1, sparse_id, False)]
        stage.drop_prepared(stage.prepare_decode(segments))
        ready = stage.prepare_decode(segments)
        gpu.decode([2], position, [sparse_id])
        got.append(stage.run_prepared(ready, gpu.tokens[1, position : position + 1]).cpu())
    assert torch.equal(torch.cat(got), want[len(want) - 4 :])
    assert [one.attended > 0 for one in gpu.figures()] == [True, True] and figures
    mixed = [Segment(1, PROMPT + 4, PROMPT + 5, sparse_id, False), Segment(2, PROMPT + 4, PROMPT + 5, 1, False)]
    assert stage.prepare_decode(mixed) is None
    gpu.open(3, sparse_id)
    for slot in (1, 2):
        stage.attention.release(slot)


def test_a_step_that_needs_chunks_is_not_prepared(gpu):
    """They are taken when it runs: one that is dropped leaves the pool as it was."""
    stage = gpu.stages[0]
    gpu.open(0, 0)
    free = stage.cache.pool.num_free
    assert stage.prepare_decode([Segment(0, 0, 1, 0, False)]) is None
    gpu.prefill(0, 0, (20,))
    used = free - stage.cache.pool.num_free
    ready = stage.prepare_decode([Segment(0, 20, 21, 0, False)])
    assert ready is not None and used == free - stage.cache.pool.num_free > 0
    stage.drop_prepared(ready)
    stage.attention.release(0)


@pytest.mark.parametrize("device", DEVICES)
def test_two_stages_equal_one(checkpoint, device, gpu):
    two = Model(checkpoint, device, cuts=[1])
    assert torch.equal(two.run(1, steps=2), gpu.run(1, steps=2))
    mixed = [Segment(1, PROMPT + 2, PROMPT + 3, 1, False), Segment(2, 0, 1, 0, False)]
    for model in (two, gpu):
        model.open(2, 0)
    assert torch.equal(two.forward(mixed), gpu.forward(mixed))
    for stage in two.stages:
        stage.close()
        stage.close()
        assert stage.weight_bytes == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [dict(), dict(kv_dtype="fp8"), dict(quantization="int8")], ids=str)
def test_half_precision_is_near(options, checkpoint, device, reference):
    """Logits of some tens; K, V or weights in eight bits cost more than activations in sixteen."""
    model = Model(checkpoint, device, dtype="float16", **options)
    assert model.stages[0].cache.kv.page_size == (4096 if "kv_dtype" in options else 2048)
    got, want = model.run(0, steps=2), reference.run(0, steps=2)
    assert (got - want).abs().mean() <= (0.1 if options else 0.01) * want.abs().mean()
    model.stages[0].close()


@pytest.mark.parametrize("device", DEVICES)
def test_biases_and_a_tied_table(tmp_path, device):
    options = dict(head_dim=64, num_hidden_layers=1, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    checkpoint = open_checkpoint(str(make_tiny_model(TinyModel("llama", options=options), tmp_path)))
    one, other = Model(checkpoint, device), Model(checkpoint, "cpu", backend="torch")
    got, want = (torch.cat((m.prefill(0, 0, (20,)), m.decode([0], 20, [0]))) for m in (one, other))
    assert (got - want).abs().max() <= 2e-5 * want.abs().max()


def test_tokens_may_lie_on_the_device(gpu):
    stage = gpu.stages[0]
    gpu.prefill(0, 0, (40,))
    gpu.prefill(2, 1, (40,))
    segments = [Segment(0, 40, 41, 0, False), Segment(2, 40, 41, 1, False)]
    want = gpu.forward(segments, [1])
    got = stage.forward(segments, gpu.tokens[[0, 2], 40].to(stage.device), None, [1])
    assert got.shape == (1, stage.spec.vocab_size) and torch.equal(got.cpu(), want)
    assert stage.forward([Segment(0, 41, 45, 0, True)], torch.arange(4), None, []).shape == (0, stage.spec.vocab_size)
    with pytest.raises(ValueError, match="2 tokens, so token_ids"):
        stage.forward(segments, gpu.tokens[0, :3], None, [])
    with pytest.raises(ValueError, match="decode segments must come before"):
        stage.forward([Segment(1, 0, 2, 0, True), segments[0]], gpu.tokens[0, :3], None, [])
    gpu.figures()


@pytest.mark.parametrize("device", DEVICES)
def test_warm_up_changes_nothing_and_captures_all(checkpoint, device):
    """Of a stage that is not the first: a decode step from its graph is what it was launch by launch."""
    spec = checkpoint.spec
    stage = build_stage(
        checkpoint, first_layer=1, last_layer=2, num_chunks=16, max_sequences=3, max_model_len=80, prefill_chunk=20,
        sparse={1: SPARSE[1]}, calibration=random_calibration(spec, 32, first_layer=1), dtype="float32", device=device,
        backend="triton",
    )  # fmt: skip
    hidden = torch.randn(77, spec.hidden_size, generator=torch.Generator().manual_seed(3)).to(stage.device)

    def run() -> torch.Tensor:
        stage.attention.open(2, 1)
        outs = [stage.forward([Segment(2, 0, 75, 1, True)], None, hidden[:75], [74])]
        outs += [stage.forward([Segment(2, p, p + 1, 1, False)], None, hidden[p : p + 1], [0]) for p in (75, 76)]
        return torch.cat(outs)

    want = run()
    with pytest.raises(RuntimeError, match="slots are open"):
        stage.warm_up()
    stage.attention.release(2)
    stage.attention.take_stats()
    reports: list[tuple[int, int, str]] = []
    stage.warm_up(lambda *report: reports.append(report))
    assert stage.num_graphs == (3 if device == "cuda" else 0)  # batches of 1, 2 and 3
    assert stage.cache.stats().num_sequences == 0 and stage.attention.take_stats() == []
    assert [report[:2] for report in reports] == [(step, len(reports)) for step in range(1, len(reports) + 1)]
    assert torch.equal(run(), want)


def test_what_is_impossible_is_named(checkpoint):
    with pytest.raises(ConfigError, match="fp8, which only cards can do"):
        Model(checkpoint, "cpu", backend="torch", kv_dtype="fp8")
    with pytest.raises(ConfigError, match="fp8"):
        Model(checkpoint, "cpu", dtype="fp8")
    with pytest.raises(ValueError, match=r"sparse\.3\.window_size is 8"):
        Model(checkpoint, "cpu", sparse={3: SparseConfig(**{**SMALL, "window_size": 8}, summary="code")})
    for tile in (8, 48):
        with pytest.raises(ValueError, match=rf"sparse\.3\.prefill_tile is {tile}; on a card"):
            Model(checkpoint, "cpu", sparse={3: SparseConfig(**{**SMALL, "prefill_tile": tile}, summary="code")})
