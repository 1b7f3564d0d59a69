"""Weights of 8 and 4 bits on Triton: against the dequantised product in float64; words, assembly, and many rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracle import assert_matches_oracle
from paged_batch import DEVICES
from ptx_words import execute, halves, snippets

pytest.importorskip("triton")
from qsa.kernels import skinny_quant_triton as skinny
from qsa.kernels.pointwise_ref import silu_multiply_ref
from qsa.kernels.quant_linear_ref import dequantize_groups_ref
from qsa.kernels.quant_linear_triton import (
    FEW_ROWS,
    TUNE_BYTES,
    TUNE_NIBBLES,
    Fp8Linear,
    Int4Linear,
    Int8Head,
    Int8Linear,
    by_pieces,
    quantize_fp8,
    whole_zeros,
)
from qsa.kernels.quant_prefill_triton import quantise_rows
from qsa.kernels.registry import get_operator

BYTES = {"int8": Int8Linear, "fp8": Fp8Linear}
SHAPES = [  # out_features, in_features
    (64, 128),  # smallest
    (96, 200),  # neither a whole number of blocks
    (192, 640),
]


def make_bytes(kind: str, out_features: int, in_features: int, device: str, dtype: torch.dtype = torch.float16, **options):
    """A linear layer, its weight as held in float64, and its bias."""
    weight = torch.randn(out_features, in_features, device=device) * in_features**-0.5
    bias = torch.randn(out_features, device=device).to(dtype)
    linear = BYTES[kind]()
    linear.init(weight=weight, bias=bias, **options)
    values, scale = BYTES[kind]._quantise(weight)
    return linear, values.cpu().double() * scale.cpu().double()[:, None], bias


def make_nibbles(zeros: str, out_features: int, in_features: int, group: int, device: str, dtype=torch.float16, **options):
    """The same in 4 bits; zeros: none, integer, or minimum."""
    values = torch.randint(0, 16, (out_features, in_features), dtype=torch.uint8)
    scale = ((torch.rand(out_features, in_features // group) + 0.5) * 0.2 * in_features**-0.5).half().float()
    minimum = {
        "none": -8 * scale,
        "integer": -scale * torch.randint(0, 17, scale.shape),
        "minimum": (-8 * scale + 0.02 * torch.randn(scale.shape)).half().float(),
    }[zeros]
    bias = torch.randn(out_features, device=device).to(dtype)
    linear = Int4Linear()
    parts = dict(values=values.to(device), scale=scale.to(device), minimum=minimum.to(device))
    linear.init(**parts, bias=bias, dtype=dtype, **options)
    return linear, dequantize_groups_ref(values, scale.double(), minimum.double()), bias


def check(linear, weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor, prefill_factor: float = 2.0) -> None:
    """All forms of a product. weight: float64, what the layer holds."""
    x_cpu, bias = x.cpu(), bias.cpu()
    oracle = F.linear(x_cpu.double(), weight, bias.double())
    peer = F.linear(x_cpu, weight.to(x.dtype), bias)
    assert_matches_oracle("sum", linear.forward(x).cpu(), oracle, peer)
    assert_matches_oracle("parts", linear.forward_parts(x).sum(0).cpu(), oracle, peer)
    assert_matches_oracle("gated", linear.forward_gated(x).cpu(), silu_multiply_ref(oracle), silu_multiply_ref(peer))
    assert_matches_oracle("prefill", linear.forward_prefill(x).cpu(), oracle, peer, factor=prefill_factor)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", BYTES)
@pytest.mark.parametrize("launch", [dict(block_n=32, splits=1), dict(block_n=64, splits=2, tile_n=32)], ids=str)
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_weights_of_8_bits(out_features, in_features, launch, kind, device):
    torch.manual_seed(0)
    linear, weight, bias = make_bytes(kind, out_features, in_features, device, launch=launch, multiply_in_8_bits=False)
    for num_rows in (1, FEW_ROWS + 1):
        check(linear, weight, bias, torch.randn(num_rows, in_features).half().to(device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("zeros", ["none", "integer", "minimum"])
@pytest.mark.parametrize(
    ("out_features", "in_features", "group", "launch"),
    [
        (64, 128, 32, dict(block_n=32, splits=1)),
        (64, 256, 64, dict(block_n=64, splits=2, tile_n=1)),
        (96, 640, 128, dict(block_n=32, splits=1)),  # columns are no whole number of blocks
        (32, 256, 256, dict(block_n=32, splits=1, block_k=64)),  # a group of several runs
    ],
)
def test_weights_of_4_bits(out_features, in_features, group, launch, zeros, device):
    torch.manual_seed(1)
    linear, weight, bias = make_nibbles(zeros, out_features, in_features, group, device, launch=launch)
    assert linear._zeros == zeros
    for num_rows in (3, FEW_ROWS + 1):
        check(linear, weight, bias, torch.randn(num_rows, in_features).half().to(device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [*BYTES, "int4"])
def test_a_row_does_not_depend_on_its_company(kind, device):
    torch.manual_seed(2)
    launch = dict(block_n=32, splits=2)
    if kind == "int4":
        linear, _, _ = make_nibbles("integer", 64, 256, 32, device, launch=launch)
    else:
        linear, _, _ = make_bytes(kind, 64, 256, device, launch=launch)
    x = torch.randn(17, 256).half().to(device)
    for form in (linear.forward, linear.forward_gated):
        together = form(x)
        for first, last in ((0, 1), (5, 13), (16, 17)):
            assert torch.equal(form(x[first:last]), together[first:last])


@pytest.mark.parametrize("device", DEVICES)
def test_int8_activations_in_prefill(device):
    """Half a step of a row's scale is the error of an activation; it is what the reference makes of such activations."""
    torch.manual_seed(3)
    linear, weight, bias = make_bytes("int8", 64, 200, device, multiply_in_8_bits=True)
    x = torch.randn(FEW_ROWS + 1, 200).half()
    step = x.float().abs().amax(1, keepdim=True) / 127
    rounded = torch.floor(x.float() / step + 0.5).clamp(-127, 127).double() * step.double()
    oracle = F.linear(rounded, weight, bias.cpu().double())
    got = linear.forward_prefill(x.to(device)).cpu()
    assert_matches_oracle("int8", got, oracle, oracle.half(), factor=4.0)
    exact = F.linear(x.double(), weight, bias.cpu().double())
    assert (got.double() - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_rows_are_quantised_in_the_order_of_the_weights(device):
    torch.manual_seed(4)
    x = torch.randn(3, 200).half().to(device)
    x[2] = 0
    numbers, scale = quantise_rows(x, 256, "int8")
    columns = skinny.byte_columns(200, x.device)
    plain = F.pad(x.float(), (0, 56))[:, columns]
    assert ((numbers.float() * scale[:, None] - plain).abs() <= 0.501 * scale[:, None]).all()
    assert torch.equal(numbers[2], torch.zeros_like(numbers[2]))
    assert numbers.abs().amax(1).tolist() == [127, 127, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fp8_activations_in_prefill(dtype):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("Ada and newer")
    torch.manual_seed(5)
    linear, weight, bias = make_bytes("fp8", 512, 3584, "cuda", dtype)
    x = torch.randn(200, 3584, device="cuda").to(dtype)
    got = linear.forward_prefill(x).double().cpu()
    exact = F.linear(x.cpu().double(), weight, bias.cpu().double())
    assert (got - exact).norm() < 0.04 * exact.norm()
    numbers, scale = quantise_rows(x, 3584, "fp8")
    held = (numbers.float() * scale[:, None]).double().cpu()
    order = skinny.byte_columns(3584, torch.device("cpu"))
    own = F.linear(held, weight[:, order], bias.cpu().double())
    assert (got - own).norm() < 0.006 * own.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("launch", [{}, *TUNE_BYTES], ids=str)
@pytest.mark.parametrize("kind", BYTES)
def test_launches_of_8_bits_at_full_size(kind, launch, dtype):
    torch.manual_seed(6)
    linear, weight, bias = make_bytes(kind, 3584, 3584, "cuda", dtype, launch=launch, multiply_in_8_bits=False)
    check(linear, weight, bias, torch.randn(8, 3584, device="cuda").to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("launch", [{}, *TUNE_NIBBLES], ids=str)
@pytest.mark.parametrize("zeros", ["none", "integer", "minimum"])
def test_launches_of_4_bits_at_full_size(zeros, launch, dtype):
    torch.manual_seed(7)
    linear, weight, bias = make_nibbles(zeros, 3584, 3584, 128, "cuda", dtype, launch=launch)
    x = torch.randn(8, 3584, device="cuda").to(dtype)
    check(linear, weight, bias, x)
    many = torch.randn(100, 3584, device="cuda").to(dtype)
    oracle = F.linear(many.cpu().double(), weight, bias.cpu().double())
    peer = F.linear(many.cpu(), weight.to(dtype), bias.cpu())
    assert_matches_oracle("prefill", linear.forward_prefill(many).cpu(), oracle, peer)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [32, 64])
def test_small_groups_at_full_size(group):
    torch.manual_seed(8)
    linear, weight, bias = make_nibbles("integer", 3584, 3584, group, "cuda", torch.bfloat16)
    check(linear, weight, bias, torch.randn(8, 3584, device="cuda").bfloat16())


ALL_WORDS = np.arange(1 << 16, dtype=np.uint32)
PAIRS = ALL_WORDS | (ALL_WORDS * 40503 % 65536) << 16  # each word beside an unrelated one


def bytes_of(words: np.ndarray) -> torch.Tensor:
    """int8 [words, 2 halves, 2 bytes], the lower first."""
    return torch.from_numpy(words.view(np.int8).copy()).view(-1, 2, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", BYTES)
def test_assembly_of_8_bits(kind, dtype):
    place = (0 if kind == "int8" else 2) + (dtype == torch.float16)
    low, high = execute(snippets(skinny.unpack_bytes)[place], 2, [PAIRS])
    values = bytes_of(PAIRS) if kind == "int8" else bytes_of(PAIRS).view(torch.float8_e4m3fn)
    expected = values.to(torch.float32).double()
    is_number = expected.isfinite()
    got = torch.stack((halves(low, dtype), halves(high, dtype)), dim=2)
    assert torch.equal(got[is_number], expected[is_number])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_assembly_of_4_bits(dtype):
    numbers = torch.from_numpy(PAIRS.view(np.int16).astype(np.int32)).view(-1, 2, 1) >> torch.tensor([0, 4, 8, 12]) & 15
    zeros = torch.arange(len(PAIRS))[:, None] * torch.tensor([1, 3, 5, 7]) % 17
    added = torch.tensor([128.0] * 4 if dtype == torch.bfloat16 else [1024.0, 64.0, 1024.0, 64.0])
    negative = (-added - zeros).to(dtype).view(torch.int16).numpy().astype(np.uint16).astype(np.uint32)
    inputs = [PAIRS, *(negative[:, place] | negative[:, place] << 16 for place in range(4))]
    results = execute(snippets(skinny.unpack_nibbles)[int(dtype == torch.float16)], 4, inputs)
    got = torch.stack([halves(words, dtype) for words in results], dim=2)
    assert torch.equal(got, (numbers - zeros[:, None]).double())


def test_words_hold_columns_far_apart():
    values = torch.randint(-128, 128, (3, 200), dtype=torch.int8)
    words = skinny.pack_bytes(values)
    assert words.shape == (3, 128)
    order = skinny.byte_columns(200, torch.device("cpu"))
    assert torch.equal(words.view(torch.int8), F.pad(values, (0, 56))[:, order])
    assert order[:4].tolist() == [0, 64, 1, 65]
    nibbles = torch.randint(0, 16, (2, 128), dtype=torch.uint8)
    packed = skinny.pack_nibbles(nibbles, 32).int()
    for place in range(4):
        assert torch.equal(packed >> 4 * place & 15, nibbles[:, 32 * place : 32 * place + 32].int())


def test_zeros_are_recognised():
    scale = torch.rand(4, 3).half().float()
    assert whole_zeros(scale, None)[0] == whole_zeros(scale, -8 * scale)[0] == "none"
    kind, zero = whole_zeros(scale, -scale * 5)
    assert kind == "integer" and (zero == 5).all()
    assert whole_zeros(scale, -scale * 5.5)[0] == "minimum"
    assert whole_zeros(scale, scale)[0] == "minimum"  # -1 is no zero
    scale[1, 1] = 0
    assert whole_zeros(scale, -8 * scale)[0] == "none"


def test_head_has_float32_logits():
    torch.manual_seed(9)
    weight = torch.randn(96, 128) * 0.1
    head = Int8Head()
    head.init(weight=weight, launch=dict(block_n=32, splits=1))
    for num_rows in (2, FEW_ROWS + 1):
        x = torch.randn(num_rows, 128).half()
        got = head.forward(x) if num_rows == 2 else head.forward_prefill(x)
        assert got.dtype == torch.float32
        assert (got - x.float() @ weight.T).norm() < 0.01 * got.norm()


def test_given_values_are_kept():
    values, scale = quantize_fp8(torch.randn(32, 128))
    assert torch.equal(by_pieces(quantize_fp8, values.float() * scale[:, None], rows=10)[0].float(), values.float())
    linear = Fp8Linear()
    linear.init(values=values, scale=scale, launch=dict(block_n=32, splits=1))
    eye = torch.eye(128).half()
    got = torch.cat([linear.forward(rows) for rows in eye.split(16)])
    assert torch.allclose(got.float(), (values.float() * scale[:, None]).T, rtol=1e-3)


def test_wrong_arguments_are_named():
    values = torch.zeros(32, 96, dtype=torch.uint8)
    with pytest.raises(ValueError, match="multiple of 32 columns"):
        Int4Linear().init(values=values, scale=torch.ones(32, 2))
    with pytest.raises(ValueError, match="bfloat16 or float16"):
        Int4Linear().init(values=values, scale=torch.ones(32, 3), dtype=torch.float32)
    with pytest.raises(ValueError, match="must divide the group"):
        Int4Linear().init(values=values, scale=torch.ones(32, 3), launch=dict(block_k=64))
    with pytest.raises(ValueError, match="`weight`, or `values` with `scale`"):
        Int8Linear().init(values=values.view(torch.int8))
    with pytest.raises(ValueError, match="multiple of 64 words"):
        Int8Linear().init(weight=torch.ones(32, 96), launch=dict(block_k=32))


@pytest.mark.parametrize("name", ["int8_linear", "int8_head", "fp8_linear", "int4_linear"])
def test_registered_and_freed(name):
    linear = get_operator(name, "triton")
    linear.init(weight=torch.ones(32, 64), values=None) if name != "int4_linear" else linear.init(
        values=torch.zeros(32, 64, dtype=torch.uint8), scale=torch.ones(32, 2)
    )
    assert linear.nbytes > 0
    linear.free()
    linear.free()
    assert linear.nbytes == 0
