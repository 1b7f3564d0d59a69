"""Weights in the forms that settings ask for: packed checkpoints and weights quantised while they are read, on the CPU."""

from __future__ import annotations

import shutil

import pytest
import torch
from paged_batch import DEVICES
from safetensors.torch import load_file, save_file
from stages import Stages, mean_kl
from tiny_models import make_tiny_model
from tiny_packed import FORMATS, make_packed

from qsa.errors import ConfigError
from qsa.kernels.pointwise_ref import silu_multiply_ref
from qsa.kernels.quant_linear import Int4Linear, Int8Linear, quantize_groups, quantize_rows
from qsa.kernels.quant_linear_ref import dequantize_groups_ref
from qsa.model.checkpoint.load import open_checkpoint
from qsa.model.checkpoint.packed import PackedTensor
from qsa.model.weights import JoinedLinear, ReorderedLinear, WeightPolicy, make_head, make_linear

CPU = torch.device("cpu")
IDS = [5, 77, 12, 250, 33, 9, 140, 201, 64, 18, 300, 90]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return make_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")


def logits_of(folder, **options) -> torch.Tensor:
    """Of a prompt in one piece, then of the rest token by token."""
    stages = Stages(open_checkpoint(str(folder)), [2], **options)
    first = stages.prefill(0, IDS[:8], all_rows=True)
    rest = [stages.decode([0], [8 + place], [token]) for place, token in enumerate(IDS[8:])]
    stages.close()
    return torch.cat([first, *rest])


@pytest.fixture(scope="module", params=FORMATS)
def packed(request, plain, tmp_path_factory):
    """A packed folder, and one with the same weights in float32."""
    folder = tmp_path_factory.mktemp("packed")
    expected = make_packed(plain, folder / request.param, request.param)
    make_packed(plain, folder / "float", request.param)
    config = (plain / "config.json").read_text()
    (folder / "float/config.json").write_text(config)
    names = {name: name if name == "lm_head.weight" else f"model.{name}" for name in expected}
    save_file({names[name]: value.contiguous() for name, value in expected.items()}, folder / "float/model.safetensors")
    return folder / request.param, folder / "float"


def test_packed_logits_are_those_of_the_dequantised_weights(packed):
    folder, dequantised = packed
    exact = logits_of(dequantised, dtype="float32")
    assert (logits_of(folder, dtype="float32") - exact).abs().max() < 1e-3
    assert (logits_of(folder, dtype="float32", quantization="none") - exact).abs().max() < 1e-3
    coarse = mean_kl(exact, logits_of(dequantised, dtype="bfloat16"))
    if "8-bits" in str(folder):
        coarse += 0.05  # groups of 8 bits become rows of 8 bits
    for copies in (2 << 30, 0):  # with bfloat16 copies for prefill, and without
        assert mean_kl(exact, logits_of(folder, dtype="bfloat16", prefill_copy_bytes=copies)) < 3 * coarse + 2e-3


def quantised_folder(plain, folder, quantization: str):
    """A copy of a tiny model with the layers' matrices rounded as they are when they are quantised while read."""
    shutil.copytree(plain, folder)
    weights = load_file(plain / "model.safetensors")
    for name, weight in weights.items():
        if weight.dim() < 2 or "layers." not in name:
            continue
        if quantization == "int8":
            values, scale = quantize_rows(weight, torch.bfloat16)
            weights[name] = values.float() * scale.float()[:, None]
        else:
            group = 64 if weight.shape[1] % 64 == 0 else 32
            weights[name] = dequantize_groups_ref(*quantize_groups(weight, group))
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_while_read(plain, tmp_path, quantization):
    rounded = quantised_folder(plain, tmp_path / "rounded", quantization)
    exact = logits_of(rounded, dtype="float32")
    coarse = mean_kl(exact, logits_of(rounded, dtype="bfloat16"))
    for copies in (2 << 30, 0):
        got = logits_of(plain, dtype="bfloat16", quantization=quantization, prefill_copy_bytes=copies)
        if quantization == "int4" or copies == 0:  # the copies of int8 weights are made before they are rounded
            assert mean_kl(exact, got) < 3 * coarse + 2e-3
    assert mean_kl(logits_of(plain, dtype="float32"), exact) > 1.5 * coarse, "the rounding shows"


def test_what_weights_are_held_in(plain):
    policies = {name: WeightPolicy.choose(name, torch.bfloat16, CPU) for name in ("auto", "none", "int8", "int4")}
    weight = torch.randn(64, 96)
    assert [policy.kernel_of(weight) for policy in policies.values()] == ["float", "float", "int8", "int4"]
    assert policies["int4"].kernel_of(torch.randn(64, 40)) == "float"  # no whole groups
    assert isinstance(make_linear([weight], [None], policies["int8"]), Int8Linear)
    assert isinstance(make_linear([weight, weight], [None, None], policies["int4"]), Int4Linear)
    card = WeightPolicy.choose("auto", torch.float16, torch.device("cuda"), backend="triton")
    assert card.is_packed and WeightPolicy.choose("fp8", torch.bfloat16, torch.device("cuda"), backend="triton").target == "fp8"
    assert not WeightPolicy.choose("auto", torch.float32, CPU).is_packed


@pytest.mark.parametrize(
    ("quantization", "dtype", "backend", "words"),
    [
        ("fp8", torch.bfloat16, "torch", "fp8, which only cards can do"),
        ("int8", torch.float32, "torch", "does not go with model.dtype float32"),
        ("int4", torch.float32, "triton", "does not go with model.dtype float32"),
    ],
)
def test_settings_that_are_refused(quantization, dtype, backend, words):
    with pytest.raises(ConfigError, match=words):
        WeightPolicy.choose(quantization, dtype, CPU, backend=backend)
    with pytest.raises(ValueError, match="quantization must be auto, none, int8"):
        WeightPolicy.choose("int3", dtype, CPU)


def test_columns_in_the_order_of_groups(plain, tmp_path):
    """Layers of one input share an order and are stacked; others are multiplied one by one."""
    make_packed(plain, tmp_path / "packed", "gptq-by-activation")
    checkpoint = open_checkpoint(str(tmp_path / "packed"))
    policy = WeightPolicy.choose("auto", torch.bfloat16, CPU)
    weights = [checkpoint.read(f"layers.0.mlp.{name}_proj.weight") for name in ("gate", "up", "down")]
    assert all(isinstance(weight, PackedTensor) for weight in weights)
    stacked = make_linear(weights[:2], [None, None], policy)
    assert isinstance(stacked, ReorderedLinear)
    x = torch.randn(3, 64).bfloat16()
    whole = torch.cat([weight.dequantize() for weight in weights[:2]])
    assert (stacked.forward(x).float() - x.float() @ whole.T).norm() < 0.02 * (x.float() @ whole.T).norm()
    reversed_order = PackedTensor(**{**vars(weights[1]), "order": weights[1].order.flip(0)})
    apart = make_linear([weights[0], reversed_order], [None, None], policy)
    assert isinstance(apart, JoinedLinear)
    whole = torch.cat([weights[0].dequantize(), reversed_order.dequantize()])
    want = x.float() @ whole.T
    assert (apart.forward(x).float() - want).norm() < 0.02 * want.norm()
    gate, up = want.chunk(2, 1)
    assert (apart.forward_gated(x).float() - torch.nn.functional.silu(gate) * up).norm() < 0.05 * want.norm()
    assert apart.nbytes == sum(part.nbytes for part in apart._parts)
    apart.free()


@pytest.mark.parametrize("group", [32, 128])
def test_groups_made_here(group):
    torch.manual_seed(0)
    weight = torch.randn(40, 256) * 0.05
    weight[3, 7] = 1.0  # an outlier
    values, scale, minimum = quantize_groups(weight, group)
    assert values.dtype == torch.uint8 and values.max() <= 15 and scale.shape == minimum.shape == (40, 256 // group)
    assert torch.equal(scale.half().float(), scale)
    zero = torch.round(-minimum / scale)
    assert torch.equal(minimum, -scale * zero) and zero.min() >= 0 and zero.max() <= 15

    def error(values: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> float:
        held = values.float() * scale.repeat_interleave(group, 1) + minimum.repeat_interleave(group, 1)
        return float((held - weight).square().sum())

    grouped = weight.unflatten(1, (-1, group))
    plain_scale = (grouped.amax(2) - grouped.amin(2)) / 15
    plain_zero = torch.round(-grouped.amin(2) / plain_scale)
    plain_values = (torch.round(grouped / plain_scale[..., None]) + plain_zero[..., None]).clamp(0, 15).flatten(1)
    plain = error(plain_values, plain_scale, -plain_scale * plain_zero)
    assert error(values, scale, minimum) < 0.97 * plain
    assert quantize_groups(torch.zeros(2, 64), 32)[0].unique().numel() == 1


def test_tied_tables_and_a_quantised_head(tmp_path):
    """The embedding stays what it is; the head is a quantised copy of it."""
    folder = make_tiny_model("llama-tied-sharded", tmp_path / "tied")
    plain, quantised = (logits_of(folder, dtype="bfloat16", quantization=name) for name in ("auto", "int8"))
    exact = logits_of(folder, dtype="float32")
    assert mean_kl(exact, quantised) < 5 * mean_kl(exact, plain)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FORMATS)
def test_packed_layers_on_a_card(plain, tmp_path, name, device):
    """Every format through the operators of a card; in float16, which the interpreter multiplies right."""
    pytest.importorskip("triton")
    make_packed(plain, tmp_path / "packed", name)
    checkpoint = open_checkpoint(str(tmp_path / "packed"))
    policy = WeightPolicy.choose("auto", torch.float16, torch.device(device), backend="triton")
    weights = [checkpoint.read(f"layers.1.mlp.{part}_proj.weight") for part in ("gate", "up")]
    kinds = {policy.kernel_of(weight) for weight in weights}
    assert kinds == {weight.kind for weight in weights}
    linear = make_linear(weights, [None, None], policy)
    whole = torch.cat([weight.dequantize() for weight in weights]).double()
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).half()
    want = x.double() @ whole.T
    gated = silu_multiply_ref(want)
    slack = 0.02 if name == "gptq-8-bits" else 2e-3  # groups of 8 bits become rows of 8 bits
    x = x.to(device)
    assert (linear.forward(x).cpu() - want).norm() < slack * want.norm()
    assert (linear.forward_parts(x).sum(0).cpu() - want).norm() < slack * want.norm()
    assert (linear.forward_gated(x).cpu() - gated).norm() < 2 * slack * gated.norm()
    many = linear.forward_prefill(x.repeat(12, 1)).cpu()
    assert (many - want.repeat(12, 1)).norm() < slack * many.norm() + (0.06 if "fp8" in name else 0) * many.norm()
    linear.free()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_layers_quantised_for_a_card(quantization, device):
    pytest.importorskip("triton")
    torch.manual_seed(1)
    policy = WeightPolicy.choose(quantization, torch.float16, torch.device(device), backend="triton")
    weights = [torch.randn(32, 128).bfloat16() * 0.1 for _ in range(2)]
    linear = make_linear(weights, [torch.randn(32), None], policy)
    head = make_head(weights[0], policy)
    x = torch.randn(3, 128).half()
    want = x.double() @ torch.cat(weights).double().T
    got = linear.forward(x.to(device)).cpu().double()
    bias = got[:, :32] - want[:, :32]
    loss = {"int8": 0.01, "int4": 0.12, "fp8": 0.04}[quantization]
    assert (got[:, 32:] - want[:, 32:]).norm() < loss * want.norm()
    assert (bias - bias.mean(0)).norm() < loss * want.norm()
    logits = head.forward(x.to(device)).cpu()
    assert logits.dtype == torch.float32 and (logits - want[:, :32]).norm() < 0.01 * want.norm()
    assert linear.nbytes < {"int8": 1.1, "int4": 0.65, "fp8": 1.1}[quantization] * 64 * 128 + 64 * 8
