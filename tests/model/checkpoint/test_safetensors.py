"""Safetensors folders, one file or several: equal to transformers' own weights; what is wrong is named by file and tensor."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import TINY_MODELS, load_reference, make_tiny_model

from qsa.errors import CheckpointError, UnsupportedModelError
from qsa.model.checkpoint.load import open_checkpoint
from qsa.model.checkpoint.safetensors import INDEX, SINGLE, read_header


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Made once; a test that changes a folder takes a copy."""
    root = tmp_path_factory.mktemp("models")
    return {name: make_tiny_model(name, root / name) for name in ("llama", "llama-tied-sharded", "mistral-window-sharded")}


@pytest.fixture
def copy(originals, tmp_path):
    return lambda name: shutil.copytree(originals[name], tmp_path / name)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_families(tmp_path, name):
    folder = make_tiny_model(name, tmp_path)
    checkpoint = open_checkpoint(str(folder))
    reference = load_reference(folder)
    weights = checkpoint.read_stage(0, checkpoint.spec.num_layers, embedding=True, head=True)
    expected = {key.removeprefix("model."): value for key, value in reference.state_dict().items()}
    if checkpoint.spec.tie_word_embeddings:
        expected.pop("lm_head.weight")
    assert weights.keys() == expected.keys()
    for key, value in weights.items():
        assert torch.equal(value, expected[key]), key
    assert (folder / INDEX).is_file() == TINY_MODELS[name].sharded
    assert checkpoint.eos_token_ids == (2, 3)
    config = reference.config
    assert checkpoint.spec.max_position_embeddings == config.max_position_embeddings
    assert checkpoint.spec.rms_norm_eps == config.rms_norm_eps
    assert checkpoint.spec.rope.kind == TINY_MODELS[name].rope


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_types_are_kept(copy, dtype):
    folder = copy("llama")
    weights = {name: value.to(dtype) for name, value in load_file(folder / SINGLE).items()}
    save_file(weights, folder / SINGLE)
    value = open_checkpoint(str(folder)).read("layers.1.mlp.down_proj.weight")
    assert value.dtype == dtype and torch.equal(value, weights["model.layers.1.mlp.down_proj.weight"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_other_types_are_refused_by_tensor_and_type(copy, dtype):
    folder = copy("llama")
    weights = load_file(folder / SINGLE)
    weights["model.layers.1.mlp.up_proj.weight"] = weights["model.layers.1.mlp.up_proj.weight"].to(dtype)
    save_file(weights, folder / SINGLE)
    with pytest.raises(
        UnsupportedModelError, match=r"model\.safetensors: tensor model\.layers\.1\.mlp\.up_proj\.weight has type"
    ):
        open_checkpoint(str(folder))


def change_weights(folder, change):
    weights = load_file(folder / SINGLE)
    change(weights)
    save_file(weights, folder / SINGLE)
    return folder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("model.layers.2.mlp.up_proj.weight"), r"tensor layers\.2\.mlp\.up_proj\.weight is missing"),
        (lambda w: w.pop("lm_head.weight"), r"tensor lm_head\.weight is missing"),
        (
            lambda w: w.update({"model.layers.4.input_layernorm.weight": torch.ones(64)}),
            r"tensor model\.layers\.4\.input.* is not part",
        ),
        (lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}), r"q_proj\.bias is not part"),
        (lambda w: w.update({"visual.patch.weight": torch.ones(2)}), r"tensor visual\.patch\.weight is not part"),
        (lambda w: w.update({"model.norm.weight": torch.ones(63)}), r"tensor model\.norm\.weight has shape \[63\]"),
        (
            lambda w: w.update({"model.layers.0.mlp.up_proj.weight": torch.ones(64, 96)}),
            r"up_proj\.weight has shape \[64, 96\], the configuration says \[96, 64\]",
        ),
    ],
    ids=["missing", "missing-head", "extra-layer", "extra-bias", "extra-name", "short-vector", "transposed"],
)
def test_wrong_tensor_sets(copy, change, words):
    folder = change_weights(copy("llama"), change)
    with pytest.raises(CheckpointError, match=words) as raised:
        open_checkpoint(str(folder))
    assert str(folder) in str(raised.value)


def test_many_problems_are_one_line(copy):
    def change(weights):
        for name in list(weights):
            if ".mlp." in name:
                del weights[name]

    with pytest.raises(CheckpointError, match=r"is missing; .*; and 7 more") as raised:
        open_checkpoint(str(change_weights(copy("llama"), change)))
    assert "\n" not in str(raised.value)


def test_harmless_extras_are_tolerated(copy):
    folder = copy("llama")
    change_weights(folder, lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert "layers.0.self_attn.rotary_emb.inv_freq" not in open_checkpoint(str(folder)).tensors
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert "lm_head.weight" not in open_checkpoint(str(folder)).tensors  # a copy that a tied model does not need


def test_truncated(copy):
    folder = copy("llama")
    data = (folder / SINGLE).read_bytes()
    for size in [0, 7, 8, 100, *range(200, len(data), len(data) // 40), len(data) - 1]:
        (folder / SINGLE).write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"model\.safetensors: .*truncated"):
            open_checkpoint(str(folder))
    last = max(read_header_of(data, folder), key=lambda tensor: tensor.offset)
    (folder / SINGLE).write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=last.stored_name):
        open_checkpoint(str(folder))


def read_header_of(data, folder):
    (folder / SINGLE).write_bytes(data)
    return list(read_header(folder / SINGLE).values())


def test_damaged_headers(copy):
    folder = copy("llama")
    data = (folder / SINGLE).read_bytes()
    for changed, words in [
        (data[:8] + b"}" + data[9:], "not JSON"),
        (data.replace(b'"data_offsets":[', b'"data_offsetz":[', 1), "damaged header entry"),
        (data.replace(b'"shape":[96,64]', b'"shape":[96,65]', 1), "bytes"),
        ((2).to_bytes(8, "little") + b"[]", "must hold an object"),
        ((9).to_bytes(8, "little") + b'{"a": [] }', "not JSON|damaged"),
    ]:
        (folder / SINGLE).write_bytes(changed)
        with pytest.raises(CheckpointError, match=words):
            open_checkpoint(str(folder))


def test_missing_and_wrong_shards(copy):
    folder = copy("llama-tied-sharded")
    index = json.loads((folder / INDEX).read_text())
    name, shard = next((n, f) for n, f in index["weight_map"].items() if "layers.2.mlp.up_proj" in n)
    weights = load_file(folder / shard)
    save_file({n: w for n, w in weights.items() if n != name}, folder / shard)
    with pytest.raises(CheckpointError, match=rf"{shard}: tensor {name} is missing, though the index lists it"):
        open_checkpoint(str(folder))
    save_file(weights, folder / shard)
    open_checkpoint(str(folder))

    data = (folder / shard).read_bytes()
    (folder / shard).write_bytes(data[:-10])
    with pytest.raises(CheckpointError, match=rf"{shard}: tensor .* truncated"):
        open_checkpoint(str(folder))
    (folder / shard).unlink()
    with pytest.raises(CheckpointError, match=rf"{shard}: missing"):
        open_checkpoint(str(folder))


def test_a_tensor_in_two_shards(copy):
    folder = copy("mistral-window-sharded")
    index = json.loads((folder / INDEX).read_text())
    shards = sorted(set(index["weight_map"].values()))
    first, second = load_file(folder / shards[0]), load_file(folder / shards[1])
    name = next(iter(first))
    save_file(second | {name: first[name]}, folder / shards[1])
    with pytest.raises(CheckpointError, match=rf"{shards[1]}: tensor {name} is also in .*{shards[0]}"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize(
    ("index", "words"),
    [("[]", "must hold an object"), ("{}", "no weight_map"), ('{"weight_map": {"a": "../x"}}', r"not in the model's folder")],
)
def test_damaged_index(copy, index, words):
    folder = copy("llama-tied-sharded")
    (folder / INDEX).write_text(index)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(str(folder))
