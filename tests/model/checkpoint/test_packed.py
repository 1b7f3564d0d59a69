"""AWQ, GPTQ, compressed-tensors and fp8 folders: equal to their dequantised weights; what is wrong is named."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_model
from tiny_packed import FORMATS, make_packed, words_of

from qsa.errors import CheckpointError, UnsupportedModelError
from qsa.model.checkpoint.load import open_checkpoint
from qsa.model.checkpoint.packed import PackedTensor, unpack_awq, unpack_words
from qsa.model.checkpoint.safetensors import SINGLE
from qsa.model.quantization import QuantScheme


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return make_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.mark.parametrize("name", FORMATS)
def test_weights(plain, tmp_path, name):
    expected = make_packed(plain, tmp_path / "packed", name)
    checkpoint = open_checkpoint(str(tmp_path / "packed"))
    assert checkpoint.is_quantized and checkpoint.tensors.keys() == expected.keys()
    kinds = set()
    for key, value in expected.items():
        got = checkpoint.read(key)
        if not isinstance(got, PackedTensor):
            assert torch.equal(got, value), key
            continue
        kinds.add(got.kind)
        assert got.shape == value.shape
        assert got.nbytes == checkpoint.tensors[key].nbytes - ("weight_shape" in FORMATS[name][1](value, 0)[0]) * 16
        assert torch.allclose(got.dequantize(), value, rtol=1e-6, atol=1e-7), key
        assert torch.equal(got.dequantize(torch.bfloat16), got.dequantize().bfloat16())
        values, scale, minimum = got.parts()
        whole = values.float() * scale.repeat_interleave(got.shape[1] // scale.shape[1], 1)
        whole += minimum.repeat_interleave(got.shape[1] // scale.shape[1], 1)
        columns = got.columns
        assert (columns is None) == ("activation" not in name and "zeros" not in name)
        assert torch.allclose(whole, value if columns is None else value[:, columns], rtol=1e-5, atol=1e-6)
    assert kinds == {"fp8" if "fp8" in name else "int8" if "8-bits" in name or "int8" in name or "bytes" in name else "int4"}
    stored = checkpoint.stage_weight_bytes(0, checkpoint.spec.num_layers)
    assert stored == sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    checkpoint.close()


def test_symmetric_weights_have_no_zeros(plain, tmp_path):
    make_packed(plain, tmp_path / "packed", "compressed-int4")
    weight = open_checkpoint(str(tmp_path / "packed")).read("layers.0.mlp.up_proj.weight")
    _, scale, minimum = weight.parts()
    assert torch.equal(minimum, -8 * scale)


def test_words():
    numbers = torch.arange(48).reshape(3, 16) % 16
    words = words_of(numbers.numpy(), 4)
    assert torch.equal(unpack_words(words, 4), numbers.to(torch.uint8))
    assert unpack_words(torch.tensor([[-1]], dtype=torch.int32), 8).tolist() == [[255] * 4]
    assert unpack_awq(words)[0, :8].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_first_zeros_wrap_around():
    """A zero of 0 is stored as 15 in the first format of GPTQ."""
    weight = PackedTensor(
        *("int4", (1, 8), words_of(torch.arange(8).reshape(1, 8).numpy(), 4).T),
        method="gptq",
        scales=torch.ones(1, 1),
        zeros=torch.tensor([[15]], dtype=torch.int32),
        stored_zero=1,
    )
    assert weight.dequantize().tolist() == [list(range(8))]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes'"),
        ({"bits": 4}, "'unknown'"),
        ({"quant_method": "awq", "bits": 3}, "'awq' with bits 3"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "gptq", "bits": 2}, "bits 2 is not supported, only 4 or 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, r"weight_block_size \[128, 128\]"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format 'marlin-24'"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized", "sparsity_config": {"format": "sparse-24"}},
            "sparse weights",
        ),
        (
            {
                **{"quant_method": "compressed-tensors", "format": "pack-quantized"},
                "config_groups": {"group_0": {"weights": {"num_bits": 3, "strategy": "group"}}},
            },
            "num_bits 3",
        ),
    ],
)
def test_schemes_that_are_refused(config, words):
    with pytest.raises(UnsupportedModelError, match=words):
        QuantScheme.from_config({"quantization_config": config})


def test_nothing_quantised():
    assert QuantScheme.from_config({}) is None
    assert QuantScheme.from_config({"quantization_config": None}) is None


@pytest.mark.parametrize(
    ("name", "change", "error", "words"),
    [
        (
            "awq",
            lambda w: w.pop("model.layers.1.mlp.up_proj.scales"),
            CheckpointError,
            r"scales of model\.layers\.1\.mlp\.up_proj",
        ),
        (
            "gptq",
            lambda w: w.pop("model.layers.1.mlp.up_proj.qweight"),
            CheckpointError,
            r"not the numbers of model\.layers\.1",
        ),
        (
            "gptq",
            lambda w: w.update({"model.layers.0.mlp.up_proj.g_idx": torch.zeros(3, dtype=torch.int32)}),
            CheckpointError,
            r"parts do not go together: .*up_proj\.g_idx \[3\]",
        ),
        (
            "awq",
            lambda w: w.update({"model.layers.0.mlp.up_proj.scales": torch.zeros(2, 64).half()}),
            CheckpointError,
            r"up_proj\.scales \[2, 64\]",
        ),
        (
            "awq",
            lambda w: w.update({"model.layers.0.mlp.up_proj.qweight": torch.zeros(64, 8, dtype=torch.int32)}),
            CheckpointError,
            r"parts do not go together: .*up_proj\.qweight \[64, 8\]",
        ),
        (
            "gptq",
            lambda w: w.update({"model.layers.0.mlp.up_proj.qweight": torch.zeros(8, 96).half()}),
            UnsupportedModelError,
            r"up_proj\.qweight has type F16",
        ),
        (
            "awq",
            lambda w: w.update({"model.layers.0.mlp.up_proj.other": torch.zeros(2, dtype=torch.int32)}),
            CheckpointError,
            r"up_proj\.other is not part",
        ),
        (
            "gptq",
            lambda w: w.pop("model.layers.1.mlp.up_proj.qzeros"),
            CheckpointError,
            r"not the zeros of model\.layers\.1\.mlp\.up_proj",
        ),
        (
            "awq",
            lambda w: w.update({"model.layers.0.mlp.up_proj.qzeros": torch.zeros(2, 6, dtype=torch.int32)}),
            CheckpointError,
            r"parts do not go together: .*up_proj\.qzeros \[2, 6\]",
        ),
        (
            "compressed-int4-zeros",
            lambda w: w.update({"model.layers.0.mlp.up_proj.weight_zero_point": torch.zeros(6, 2, dtype=torch.int32)}),
            CheckpointError,
            r"parts do not go together: .*weight_zero_point \[6, 2\]",
        ),
        (
            "compressed-bytes",
            lambda w: w.update({"model.layers.0.mlp.up_proj.weight_zero_point": torch.zeros(3, dtype=torch.int8)}),
            CheckpointError,
            r"parts do not go together: .*weight_zero_point \[3\]",
        ),
        (
            "awq",
            lambda w: w.update({"model.layers.0.mlp.up_proj.scales": torch.zeros(2, 96, dtype=torch.int32)}),
            CheckpointError,
            r"up_proj\.scales has type I32, expected F32 or",
        ),
        (
            "awq",
            lambda w: w.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(96, 64)}),
            CheckpointError,
            r"up_proj\.weight is there twice",
        ),
    ],
    ids=[
        *("no-scales", "no-numbers", "order", "scales", "transposed", "type", "unknown"),
        *("no-zeros", "awq-zeros", "packed-zeros", "zeros", "type-of-scales", "twice"),
    ],
)
def test_wrong_parts(plain, tmp_path, name, change, error, words):
    folder = tmp_path / "packed"
    make_packed(plain, folder, name)
    weights = load_file(folder / SINGLE)
    change(weights)
    save_file(weights, folder / SINGLE)
    with pytest.raises(error, match=words) as raised:
        open_checkpoint(str(folder))
    assert str(folder) in str(raised.value)


@pytest.mark.parametrize("change", [lambda g: g * 0, lambda g: g + 1, lambda g: g - 1, lambda g: g + 1000])
@pytest.mark.parametrize(("name", "part"), [("gptq-by-activation", "g_idx"), ("compressed-int4-zeros", "weight_g_idx")])
def test_groups_that_cannot_be_are_refused_when_they_are_read(plain, tmp_path, name, part, change):
    folder = tmp_path / "packed"
    make_packed(plain, folder, name)
    weights = load_file(folder / SINGLE)
    key = f"model.layers.0.mlp.up_proj.{part}"
    weights[key] = change(weights[key])
    save_file(weights, folder / SINGLE)
    checkpoint = open_checkpoint(str(folder))
    with pytest.raises(CheckpointError, match=rf"up_proj\.{part} must name each of 2 groups for 32 columns"):
        checkpoint.read("layers.0.mlp.up_proj.weight")
    checkpoint.close()


def test_an_order_that_was_not_filled_in_is_none(plain, tmp_path):
    folder = tmp_path / "packed"
    make_packed(plain, folder, "compressed-int4")
    weights = load_file(folder / SINGLE)
    weights["model.layers.0.mlp.up_proj.weight_g_idx"] = torch.full((64,), -1, dtype=torch.int32)
    save_file(weights, folder / SINGLE)
    assert open_checkpoint(str(folder)).read("layers.0.mlp.up_proj.weight").columns is None


@pytest.mark.parametrize("flat", [False, True])
def test_zeros_of_bytes_go_with_their_rows(plain, tmp_path, flat):
    folder = tmp_path / "packed"
    expected = make_packed(plain, folder, "compressed-bytes")["layers.0.mlp.up_proj.weight"]
    weights = load_file(folder / SINGLE)
    prefix = "model.layers.0.mlp.up_proj"
    zeros, scale = torch.arange(96, dtype=torch.int8).unsqueeze(1) % 5, weights[f"{prefix}.weight_scale"]
    weights[f"{prefix}.weight_zero_point"] = zeros.flatten() if flat else zeros
    weights[f"{prefix}.weight_scale"] = scale.flatten() if flat else scale
    save_file(weights, folder / SINGLE)
    read = open_checkpoint(str(folder)).read("layers.0.mlp.up_proj.weight").dequantize()
    assert torch.allclose(read, expected - zeros.float() * scale.float(), atol=1e-5)


def test_a_header_that_is_nested_too_deeply_is_damaged(plain, tmp_path):
    folder = tmp_path / "packed"
    make_packed(plain, folder, "awq")
    (folder / SINGLE).write_bytes((200_000).to_bytes(8, "little") + b"[" * 200_000)
    with pytest.raises(CheckpointError, match="the header is not JSON"):
        open_checkpoint(str(folder))


def test_a_model_that_its_configuration_calls_unquantised(plain, tmp_path):
    folder = tmp_path / "packed"
    make_packed(plain, folder, "awq")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"q[a-z]+ has type I32, which is not supported"):
        open_checkpoint(str(folder))
