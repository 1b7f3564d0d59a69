"""GGUF files: every supported type, architecture and layout reads as the gguf library says; damage is named."""

from __future__ import annotations

import itertools
import struct

import gguf
import numpy as np
import pytest
import torch
from tiny_gguf import convert_to_gguf, dequantize, quantize, random_blocks, write_gguf
from tiny_models import make_tiny_model

from qsa.errors import CheckpointError, UnsupportedModelError
from qsa.model.checkpoint.gguf import canonical_name, read_header
from qsa.model.checkpoint.load import open_checkpoint
from qsa.model.checkpoint.quantized import QuantizedTensor
from qsa.model.checkpoint.tensors import half_split_order, stage_tensors

FIELDS = {
    **{"block_count": 1, "context_length": 128, "embedding_length": 256, "feed_forward_length": 256, "vocab_size": 268},
    **{"attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5},
}
SHAPES = {
    **{"token_embd": (268, 256), "blk.0.attn_q": (256, 256), "blk.0.attn_k": (128, 256), "blk.0.attn_v": (128, 256)},
    **{"blk.0.attn_output": (256, 256), "blk.0.ffn_gate": (256, 256), "blk.0.ffn_up": (256, 256), "blk.0.ffn_down": (256, 256)},
}
VECTORS = ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")


def full_set(kind: str = "F32"):
    """Random tensors of a one-layer Llama whose rows are whole blocks of 256."""
    rng = np.random.default_rng(1)
    tensors = {f"{name}.weight": quantize(rng.standard_normal(256), "F32") for name in VECTORS}
    for name, shape in SHAPES.items():
        if kind.endswith("_K"):
            tensors[f"{name}.weight"] = random_blocks(shape, kind, rng)
        else:
            tensors[f"{name}.weight"] = quantize(rng.standard_normal(shape), kind)
    return tensors


def as_float(value) -> torch.Tensor:
    return value.dequantize() if isinstance(value, QuantizedTensor) else value.float()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    names = ["llama", "llama-biases", "llama-wide-heads", "mistral", "qwen2", "qwen3", "qwen3-tied-wide-heads"]
    return {name: make_tiny_model(name, tmp_path_factory.mktemp(name)) for name in names}


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_K", "Q4_K", "Q6_K"])
def test_types(tmp_path, kind):
    tensors = full_set(kind)
    write_gguf(tmp_path / "model.gguf", "llama", FIELDS, tensors)
    checkpoint = open_checkpoint(str(tmp_path / "model.gguf"))
    heads = {"blk.0.attn_q.weight": 4, "blk.0.attn_k.weight": 2}
    for name, stored in tensors.items():
        value = checkpoint.read(canonical_name(name))
        expected = torch.from_numpy(dequantize(stored))
        if name in heads:
            expected = expected[half_split_order(expected.shape[0], heads[name])]
        assert torch.equal(as_float(value), expected), name
        assert isinstance(value, QuantizedTensor) == (kind.startswith("Q") and expected.dim() == 2)


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1"])
def test_families(tmp_path, folders, kind):
    for name, folder in folders.items():
        path = tmp_path / f"{name}.gguf"
        expected = convert_to_gguf(folder, path, kind)
        checkpoint, original = open_checkpoint(str(path)), open_checkpoint(str(folder)).spec
        spec = checkpoint.spec
        assert (spec.head_dim, spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.qk_norm, spec.tie_word_embeddings) == (
            *(original.head_dim, original.qkv_bias, original.o_bias, original.mlp_bias, original.qk_norm),
            original.tie_word_embeddings,
        )
        weights = checkpoint.read_stage(0, spec.num_layers, embedding=True, head=True)
        assert weights.keys() == expected.keys()
        for key, value in weights.items():
            assert torch.equal(as_float(value), torch.from_numpy(expected[key])), (name, key)


def test_llama_rows_come_back_in_half_split_order():
    order = half_split_order(16, 2)
    stored = torch.arange(16).reshape(2, 2, 4).transpose(1, 2).reshape(-1)  # llama.cpp's interleaving of two heads of 8
    assert torch.equal(stored[order], torch.arange(16))
    assert not torch.equal(stored, torch.arange(16))


def test_rope_freqs_tensor_is_read(tmp_path):
    tensors = full_set() | {"rope_freqs.weight": quantize(np.linspace(1, 8, 32), "F32")}
    write_gguf(tmp_path / "model.gguf", "llama", FIELDS, tensors)
    spec = open_checkpoint(str(tmp_path / "model.gguf")).spec
    assert spec.rope.freq_factors == tuple(np.linspace(1, 8, 32).astype(np.float32).tolist())


def test_header_equals_the_librarys(tmp_path, folders):
    path = tmp_path / "model.gguf"
    convert_to_gguf(folders["llama"], path, "Q4_1")
    reader, header = gguf.GGUFReader(path), read_header(path)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):
            value = header.fields[key]
            assert (value if isinstance(value, str | int | float) else list(value)) == field.contents(), key
    assert {t.name: (t.data_offset, t.n_bytes, t.tensor_type.name) for t in reader.tensors} == {
        t.stored_name: (t.offset, t.nbytes, t.kind) for t in header.tensors.values()
    }


def test_tokenizer_and_end_set(tmp_path, folders):
    convert_to_gguf(folders["llama"], tmp_path / "model.gguf")
    checkpoint = open_checkpoint(str(tmp_path / "model.gguf"))
    assert checkpoint.eos_token_ids == (2, 3)
    tokenizer = checkpoint.tokenizer()
    assert tokenizer is checkpoint.tokenizer()
    assert tokenizer.encode("the 😀")[0] == 0
    assert tokenizer.decode(tokenizer.encode("the 😀", add_bos=False)) == "the 😀"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("blk.0.ffn_up.weight"), "tensor layers.0.mlp.up_proj.weight is missing"),
        (lambda t: t.update({"blk.1.ffn_up.weight": t["blk.0.ffn_up.weight"]}), "tensor blk.1.ffn_up.weight is not part"),
        (lambda t: t.update({"blk.0.mystery.weight": t["output_norm.weight"]}), "tensor blk.0.mystery.weight is not part"),
        (lambda t: t.update({"output_norm.weight": quantize(np.ones(255), "F32")}), r"output_norm.weight has shape \[255\]"),
        (lambda t: t.update({"blk.0.attn_k.weight": t["blk.0.attn_q.weight"]}), r"attn_k.weight has shape \[256, 256\]"),
    ],
    ids=["missing", "extra-layer", "extra-name", "short-vector", "wrong-matrix"],
)
def test_wrong_tensor_sets(tmp_path, change, words):
    tensors = full_set()
    change(tensors)
    write_gguf(tmp_path / "model.gguf", "llama", FIELDS, tensors)
    with pytest.raises(CheckpointError, match=words) as raised:
        open_checkpoint(str(tmp_path / "model.gguf"))
    assert str(tmp_path / "model.gguf") in str(raised.value)


@pytest.mark.parametrize("kind", ["Q5_0", "Q2_K", "IQ4_NL", "TQ1_0"])
def test_other_types_are_refused_by_tensor_and_type(tmp_path, kind):
    tensors = full_set()
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    tensors["blk.0.ffn_up.weight"] = (np.zeros((256, 256 // block * size), np.uint8), kind)
    write_gguf(tmp_path / "model.gguf", "llama", FIELDS, tensors)
    with pytest.raises(UnsupportedModelError, match=f"tensor blk.0.ffn_up.weight has type {kind}"):
        open_checkpoint(str(tmp_path / "model.gguf"))


def test_other_architectures_are_refused(tmp_path):
    write_gguf(tmp_path / "model.gguf", "gemma3", FIELDS, full_set())
    with pytest.raises(UnsupportedModelError, match="'gemma3'"):
        open_checkpoint(str(tmp_path / "model.gguf"))


def test_truncated_anywhere(tmp_path):
    """Cut at every length within the header (a sample) and within the data: an error that names the file, never a crash."""
    path, cut = tmp_path / "model.gguf", tmp_path / "cut.gguf"
    write_gguf(path, "llama", FIELDS, full_set("Q4_1"))
    data = path.read_bytes()
    for size in [0, 3, 4, 10, 23, *range(24, len(data), len(data) // 60), len(data) - 1]:
        cut.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            open_checkpoint(str(cut))
    cut.write_bytes(data[:-1])
    last = max(read_header(path).tensors.values(), key=lambda tensor: tensor.offset)
    with pytest.raises(CheckpointError, match=f"tensor {last.stored_name} ends at byte"):
        open_checkpoint(str(cut))


def test_damaged_headers(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", FIELDS, full_set())
    data = path.read_bytes()
    for changed, words in [
        (b"GGML" + data[4:], "not a GGUF file"),
        (data[:4] + struct.pack("<I", 1) + data[8:], "version 1"),
        (data[:4] + data[4:8][::-1] + data[8:], "little-endian"),
        (data[:16] + struct.pack("<Q", 1 << 60) + data[24:], r"truncated|damaged|not supported"),
        (data[:8] + struct.pack("<Q", 1 << 60) + data[16:], r"truncated|unknown type|no multiple|expected"),
    ]:
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match=words):
            open_checkpoint(str(path))


def test_random_damage_never_crashes(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", FIELDS, full_set("Q4_1"))
    data = np.frombuffer(path.read_bytes(), np.uint8)
    header_size = min(tensor.offset for tensor in read_header(path).tensors.values())
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(150):
        changed = data.copy()
        changed[rng.integers(0, header_size, 3)] = rng.integers(0, 256, 3)
        path.write_bytes(changed.tobytes())
        try:
            open_checkpoint(str(path))
        except CheckpointError:
            refused += 1
    assert refused > 10


def test_absurd_layer_count(tmp_path):
    write_gguf(tmp_path / "model.gguf", "llama", FIELDS | {"block_count": 4_000_000_000}, full_set())
    with pytest.raises(CheckpointError, match="says 4000000000 layers"):
        open_checkpoint(str(tmp_path / "model.gguf"))


def test_split_files(tmp_path):
    tensors = full_set()
    names = sorted(tensors)
    for part in range(2):
        writer_path = tmp_path / f"model-{part + 1:05d}-of-00002.gguf"
        some = {name: tensors[name] for name in itertools.islice(names, part, None, 2)}
        write_gguf(writer_path, "llama", FIELDS | {}, some, split_count=2)
    checkpoint = open_checkpoint(str(tmp_path / "model-00001-of-00002.gguf"))
    assert checkpoint.tensors.keys() == stage_tensors(checkpoint.spec, 0, 1, embedding=True, head=True).keys()
    assert len({tensor.file for tensor in checkpoint.tensors.values()}) == 2
    (tmp_path / "model-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.gguf: part 2 of 2 is missing"):
        open_checkpoint(str(tmp_path / "model-00001-of-00002.gguf"))
