"""The planner on the default model: its figures are the engine's own, and what does not fit is refused before weights."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_models import make_tiny_model

from qsa.cli import main
from qsa.config import make_config
from qsa.errors import BudgetError, ConfigError, UnsupportedModelError
from qsa.kernels.registry import SparseConfig
from qsa.link_needs import NCCL_GROUP_BYTES, link_bytes
from qsa.model import layer_times
from qsa.model.build import build_stage
from qsa.model.checkpoint.load import open_checkpoint
from qsa.model.checkpoint.open import open_model
from qsa.model.layer_times import LayerTimes
from qsa.plan import MemoryPlan, plan_memory, sparse_configs
from qsa.split import plan_split

GIB = 1 << 30
SPARSE = {0: SparseConfig(dense=True), 1: SparseConfig(summary="sketch")}


@pytest.fixture(scope="module")
def checkpoint():
    checkpoint = open_checkpoint("default")
    yield checkpoint
    checkpoint.close()


def plan(checkpoint, available: int = 16 * GIB, times: LayerTimes | None = None, **settings: object) -> MemoryPlan:
    config = make_config({"pipeline": {"device": "cpu"}} | settings)
    return plan_memory(checkpoint, config, sparse=SPARSE, code_dim=None, available=[available], times=times)


def measured(head_ms: float) -> LayerTimes:
    return LayerTimes((1.0,) * 30, head_ms, first_ms=0.0, batch=4, context=4096, device="cpu")


def test_default_model_has_room_for_all_sequences(checkpoint):
    result = plan(checkpoint)
    assert [(s.first_layer, s.last_layer) for s in result.stages] == plan_split(checkpoint.spec, make_config({})).layers
    # 8 pages of 1024 tokens, and 8192 tokens of sketches of 34 bytes a head, power of two slices a chunk: 1 more
    assert [s.sequence_chunks for s in result.stages] == [(s.last_layer - s.first_layer) * 9 for s in result.stages]
    assert all(s.num_chunks == 8 * s.sequence_chunks for s in result.stages)
    assert result.full_sequences == result.max_sequences == 8
    assert result.longest_sequence == 8192
    assert checkpoint.files.bytes_read == {}, "headers are enough"


def test_weights_in_the_plan_are_those_of_the_stage(checkpoint):
    result = plan(checkpoint)
    stage = result.stages[1]
    model = build_stage(
        checkpoint, first_layer=stage.first_layer, last_layer=stage.last_layer, num_chunks=stage.sequence_chunks,
        max_sequences=1, max_model_len=8192, sparse=SPARSE,
    )  # fmt: skip
    try:
        assert model.weight_bytes <= stage.weight_bytes <= 1.25 * model.weight_bytes
    finally:
        model.close()


@pytest.mark.parametrize("name", ["llama", "llama-tied-sharded"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_quantised_while_read_are_planned_as_such(tmp_path, name, quantization):
    small = open_checkpoint(str(make_tiny_model(name, tmp_path)))
    config = make_config({"model": {"quantization": quantization}, "pipeline": {"device": "cpu", "num_stages": 1}})
    stage = plan_memory(small, config, sparse=SPARSE, code_dim=None, available=[16 * GIB]).stages[0]
    sizes = dict(num_chunks=stage.sequence_chunks, max_sequences=1, max_model_len=256, sparse=SPARSE)
    model = build_stage(small, first_layer=0, last_layer=4, quantization=quantization, **sizes)
    assert 0.9 * model.weight_bytes <= stage.weight_bytes <= 1.5 * model.weight_bytes  # narrow rows are filled up
    model.close()


def test_what_only_cards_can_do_is_refused_on_the_cpu(checkpoint):
    for model, words in (
        ({"quantization": "fp8"}, "fp8, which is for cards; use int8"),
        ({"quantization": "int8", "dtype": "float32"}, "does not go with model.dtype float32"),
        ({"quantization": "int4", "dtype": "float16"}, "does not go with model.dtype float16"),
    ):
        with pytest.raises(ConfigError, match=words):
            plan(checkpoint, model=model)


def test_a_small_pool_is_planned_and_said(checkpoint):
    result = plan(checkpoint, cache={"device_bytes": 100 << 20}, pipeline={"split": [15, 15], "device": "cpu"})
    assert result.full_sequences == 0 and result.longest_sequence == 5 * 1024  # 5 pages and a summary chunk in 15 layers: 90
    table = result.table()
    assert "a request may have 5120 tokens at most, not the 8192 of model.max_model_len" in table
    assert "cache.device_bytes of 135 MiB" in table and "135 of 100 chunks" in table
    some = plan(checkpoint, cache={"device_bytes": 300 << 20}, pipeline={"split": [15, 15], "device": "cpu"})
    assert some.full_sequences == 2
    assert "2 of 8 sequences fit at full length" in some.table() and "cache.device_bytes of 1080 MiB" in some.table()
    assert "all 8 sequences fit" in plan(checkpoint).table()


def test_what_cannot_fit_is_refused(checkpoint):
    with pytest.raises(BudgetError, match=r"weights and workspace of 2 stages need 1\.\d GiB, 512 MiB are available"):
        plan(checkpoint, GIB // 2)
    with pytest.raises(BudgetError, match=r"cache\.device_bytes is 10\.0 GiB for each of 2 stages"):
        plan(checkpoint, cache={"device_bytes": 10 * GIB})
    with pytest.raises(BudgetError, match="shortest request takes"):
        plan(checkpoint, cache={"device_bytes": 1 << 20})


def test_settings_that_do_not_go_with_the_model_are_named(checkpoint):
    with pytest.raises(ConfigError, match=r"model\.max_model_len is 9000, but .* reaches 8192 tokens"):
        plan(checkpoint, model={"max_model_len": 9000})
    with pytest.raises(ConfigError, match=r"pipeline\.split is \[20, 20\], 40 layers, but .* has 30"):
        plan(checkpoint, pipeline={"split": [20, 20], "device": "cpu"})
    with pytest.raises(ConfigError, match=r"pipeline\.num_stages is 31, but the model has 30 layers"):
        plan(checkpoint, pipeline={"num_stages": 31, "device": "cpu"})


@pytest.mark.parametrize("name", ["reselect_every", "candidate_factor"])
@pytest.mark.parametrize("count", [2, 29, 31])
def test_settings_of_another_number_of_layers_than_the_model_has(checkpoint, name, count):
    short = {**SPARSE, 1: SparseConfig(summary="sketch", **{name: (1,) * count})}
    with pytest.raises(ConfigError, match=rf"sparse\.1\.{name} has {count} entries, but the model has 30 layers"):
        plan_memory(checkpoint, make_config({"pipeline": {"device": "cpu"}}), sparse=short, code_dim=None, available=[16 * GIB])


def test_what_no_chunk_can_hold_is_refused(checkpoint, tmp_path):
    with pytest.raises(ConfigError, match=r"sparse\.1\.block_size_fine is 1048576: .* lower it"):
        plan_memory(
            checkpoint,
            make_config({"pipeline": {"device": "cpu"}}),
            sparse={**SPARSE, 1: SparseConfig(summary="code", block_size_fine=1 << 20, block_size_coarse=1 << 20)},
            code_dim=24,
            available=[16 * GIB],
        )
    wide = dict(architectures=["LlamaForCausalLM"], hidden_size=1 << 22, intermediate_size=64, num_attention_heads=4)
    sizes = dict(num_hidden_layers=2, max_position_embeddings=512, vocab_size=400)
    (tmp_path / "config.json").write_text(json.dumps(wide | sizes))
    with pytest.raises(UnsupportedModelError, match=r"one token in one layer are \d+ bytes, a chunk has 1048576"):
        plan(open_model(str(tmp_path), "dummy"))


@pytest.mark.parametrize("setting", [{"top_k_fine": 10**9}, {"window_size": 10**20}, {"candidate_factor": 10**9}])
def test_what_is_kept_of_every_sequence_is_planned(checkpoint, setting):
    settings = make_config({"pipeline": {"device": "cpu"}})
    sparse = {**SPARSE, 1: SparseConfig(summary="sketch", **setting)}
    with pytest.raises(BudgetError, match=r"lower limits\.max_sequences, .* the sizes under sparse"):
        plan_memory(checkpoint, settings, sparse=sparse, code_dim=None, available=[16 * GIB])
    with pytest.raises(BudgetError, match=r"lower limits\.max_sequences"):
        plan(checkpoint, limits={"max_sequences": 100_000})


def test_buffers_between_stages_are_planned(checkpoint):
    def workspaces(transport, num_stages):
        pipeline = {"device": "cpu", "transport": transport, "num_stages": num_stages}
        return [stage.workspace_bytes for stage in plan(checkpoint, pipeline=pipeline, limits={"prefill_chunk": 512}).stages]

    assert workspaces("auto", 1) == workspaces("object_store", 1), "one stage hands over nothing"
    pairs = zip(workspaces("object_store", 3), workspaces("p2p", 3), strict=True)
    first, middle, last = (taken - others for others, taken in pairs)
    row = checkpoint.spec.hidden_size * torch.bfloat16.itemsize
    assert first == row * (2 * 512 + 2 * 2 * 8) and last == row * (2 * 512 + 3 * 2 * 8) and middle == first + last
    assert workspaces("auto", 3) == workspaces("p2p", 3)
    card = make_config({"pipeline": {"device": "cuda", "num_stages": 2}, "limits": {"prefill_chunk": 512}})
    options = {"is_first": True, "is_last": False, "lanes": 2, "prefill_chunk": 512, "row_bytes": row}
    assert link_bytes(card, **options) == first + 3 * NCCL_GROUP_BYTES


def test_auto_settings_resolve_without_a_calibration():
    sparse, code_dim = sparse_configs(make_config({}), None)
    assert sparse[0].dense and sparse[1].summary == "sketch" and code_dim is None


def test_measured_times_move_layers_and_their_memory(checkpoint):
    result = plan(checkpoint, times=measured(head_ms=8.0))
    assert [(s.first_layer, s.last_layer) for s in result.stages] == [(0, 19), (19, 30)] == result.split.layers
    assert [s.sequence_chunks for s in result.stages] == [19 * 9, 11 * 9]
    table = result.table()
    assert "19.00 ms" in table and "layers are divided 19 + 11, by measured times" in table
    given = plan(checkpoint, times=measured(head_ms=8.0), pipeline={"split": [15, 15], "device": "cpu"})
    assert "23.00 ms" in given.table() and "15 + 15, as pipeline.split says" in given.table()
    assert "17.0 layers" in plan(checkpoint).table() and "by the sizes of weights" in plan(checkpoint).table()


def test_what_does_not_fit_by_measured_times_is_divided_as_estimated(checkpoint):
    pool = {"device_bytes": 20 << 20}  # a chunk of K and V a layer, one of sketches: 17 layers' shortest request is 34
    with pytest.raises(BudgetError):
        plan(checkpoint, cache=pool, times=measured(head_ms=8.0))
    pool = {"device_bytes": 36 << 20}
    result = plan(checkpoint, cache=pool, times=measured(head_ms=8.0))
    assert result.split.counts == (17, 13) == result.split.estimate and result.split.source == "estimated"
    assert "by measured times it would not fit: cache.device_bytes is 36 MiB" in result.table()
    assert "17.00 ms and 21.00 ms" in result.table()


def test_the_command_measures_when_told_to(capsys, tmp_path, monkeypatch):
    for name, value in dict(WARM_STEPS=1, MIN_ROUNDS=2, MAX_ROUNDS=2, MAX_STEPS=3).items():
        monkeypatch.setattr(layer_times, name, value)
    monkeypatch.setattr("qsa.split.MAX_SPREAD", 1.0)  # so few rounds of so short steps differ
    path = str(make_tiny_model("llama", tmp_path))
    assert main(["plan", path, "--measure", "--set", "pipeline.device=cpu", "--set", "pipeline.split=[2, 2]"]) == 0
    printed = capsys.readouterr().out
    assert "2 + 2, as pipeline.split says; a decode step takes" in printed and "head and sampler" in printed
    assert "(batch 4, 125 tokens of context, cpu)" in printed
    assert main(["plan", path, "--set", "pipeline.device=cpu"]) == 0
    assert "so does `qsa plan --measure`" in capsys.readouterr().out


def test_the_command_prints_the_plan(capsys):
    assert main(["plan", "--set", "cache.device_bytes=209715200", "--set", "pipeline.device=cpu"]) == 0
    printed = capsys.readouterr().out
    assert "200 MiB" in printed and "sequences fit at full length" in printed
    assert main(["plan", "--set", "cache.device_bytes=1048576", "--set", "pipeline.device=cpu"]) != 0
    assert "the shortest request takes" in capsys.readouterr().err
