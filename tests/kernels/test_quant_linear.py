"""Linear layers: packed weights against their reference, and rows that do not depend on the batch."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_matches_oracle

from qsa.kernels.linear import FloatLinear, can_fuse_gate, gated_linear
from qsa.kernels.pointwise_ref import silu_multiply_ref
from qsa.kernels.quant_linear import (
    PREFILL_ROWS,
    Int4Linear,
    Int8Head,
    Int8Linear,
    LinearOperator,
    columns_with_repeats,
    quantize_repeated,
    quantize_rows,
)
from qsa.kernels.quant_linear_ref import dequantize_groups_ref, quant_linear_ref
from qsa.kernels.registry import get_operator

SHAPES = [  # in_features, out_features
    (32, 16),  # smallest
    (96, 40),  # output is not a multiple of the packed tile
    (576, 960),  # default model: Q, K and V
    (1536, 576),  # default model: down projection
    (2048, 512),  # long enough for a matrix library to change its kernel with the number of rows
]


def affine_parts(in_features: int, out_features: int, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, scale and minimum as GGUF's Q4_1 holds them: the last two are float16 numbers."""
    values = torch.randint(0, 16, (out_features, in_features), generator=rng).to(torch.uint8)
    scale = (torch.rand(out_features, in_features // 32, generator=rng) * 0.02).half().float()
    minimum = (-8 * scale + torch.randn(scale.shape, generator=rng) * 0.01).half().float()
    return values, scale, minimum


def make_linear(kind: str, in_features: int, out_features: int, rng: torch.Generator, *, copy: bool = True) -> LinearOperator:
    values, scale, minimum = affine_parts(in_features, out_features, rng)
    weight = dequantize_groups_ref(values, scale, minimum)
    bias = torch.randn(out_features, generator=rng).bfloat16()
    if kind == "int4":
        linear: LinearOperator = Int4Linear()
        linear.init(values=values, scale=scale, minimum=minimum, bias=bias, keep_prefill_copy=copy)
    elif kind == "int8":
        linear = Int8Linear()
        linear.init(weight=weight, bias=bias, keep_prefill_copy=copy)
    elif kind == "head":
        linear = Int8Head()
        linear.init(weight=weight, keep_batch_copy=copy)
    else:
        linear = FloatLinear()
        dtype = torch.bfloat16 if kind == "bf16" else torch.float32
        linear.init(weight=weight.to(dtype), bias=bias.to(dtype))
    return linear


@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
@pytest.mark.parametrize("num_rows", [1, 5, PREFILL_ROWS + 3])
@pytest.mark.parametrize("copy", [True, False], ids=["copy", "on the fly"])
def test_int4_matches_the_dequantised_product(in_features, out_features, num_rows, copy, rng):
    values, scale, minimum = affine_parts(in_features, out_features, rng)
    bias = torch.randn(out_features, generator=rng).bfloat16()
    linear = Int4Linear()
    linear.init(values=values, scale=scale, minimum=minimum, bias=bias, keep_prefill_copy=copy)
    x = torch.randn(num_rows, in_features, generator=rng).bfloat16()
    oracle = quant_linear_ref(x.double(), values, scale, minimum, bias)
    peer = quant_linear_ref(x, values, scale, minimum, bias)
    assert_matches_oracle("int4", linear.forward(x), oracle, peer)
    assert_matches_oracle("int4 prefill", linear.forward_prefill(x), oracle, peer)


def test_every_4_bit_weight_is_itself(rng):
    """Columns of W one by one: with scales that bfloat16 can hold, each of the 16 values comes back exactly."""
    values = torch.arange(16, dtype=torch.uint8).repeat(16, 4)[:, torch.randperm(64, generator=rng)]
    scale, minimum = torch.full((16, 2), 0.5), torch.full((16, 2), -3.0)
    linear = Int4Linear()
    linear.init(values=values, scale=scale, minimum=minimum)
    got = linear.forward(torch.eye(64).bfloat16())
    assert torch.equal(got.float(), dequantize_groups_ref(values, scale, minimum).T)


@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_int8_is_within_half_a_step_of_its_row(in_features, out_features, rng):
    weight = torch.randn(out_features, in_features, generator=rng) * 0.05
    for scale_dtype in (torch.bfloat16, torch.float32):
        values, scale = quantize_rows(weight, scale_dtype)
        error = (values.float() * scale.float()[:, None] - weight).abs()
        step = weight.abs().amax(1, keepdim=True) / 127
        assert (error <= 0.76 * step).all()  # half a step; bfloat16 may choose the scale up to 1/256 too small at the very end
        assert (error <= 0.505 * step).float().mean() > 0.995


@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
@pytest.mark.parametrize("num_rows", [1, 5, PREFILL_ROWS + 3])
@pytest.mark.parametrize("copy", [True, False], ids=["copy", "on the fly"])
def test_int8_matches_the_product_of_its_own_weights(in_features, out_features, num_rows, copy, rng):
    weight = torch.randn(out_features, in_features, generator=rng) * 0.05
    linear = Int8Linear()
    linear.init(weight=weight, keep_prefill_copy=copy)
    x = torch.randn(num_rows, in_features, generator=rng).bfloat16()
    values, scale = quantize_rows(weight, torch.bfloat16)
    own = values.double() * scale.double()[:, None]
    peer = x @ own.bfloat16().T
    assert_matches_oracle("int8", linear.forward(x), x.double() @ own.T, peer)
    wanted = weight.double() if copy else own
    assert_matches_oracle("int8 prefill", linear.forward_prefill(x), x.double() @ wanted.T, peer, factor=3.0 if copy else 2.0)


@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
@pytest.mark.parametrize("copy", [True, False], ids=["copy", "one layout"])
def test_int8_head_is_a_float32_product(in_features, out_features, copy, rng):
    weight = torch.randn(out_features, in_features, generator=rng) * 0.05
    head = Int8Head()
    head.init(weight=weight, keep_batch_copy=copy)
    assert head._columns is not None
    columns = head._columns
    values, scale = quantize_repeated(weight, columns)
    held = torch.zeros_like(weight).index_add_(1, columns, values.float()) * scale[:, None]
    x = torch.randn(7, in_features, generator=rng)
    got = head.forward(x)
    own = x.double() @ held.double().T
    assert got.dtype == torch.float32
    # rounding x to 15 bits of its largest element: a tenth of what bfloat16 activations and results would lose
    assert (got - own).abs().max() < 0.1 * ((x.bfloat16() @ held.bfloat16().T).double() - own).abs().max()


def test_repeated_columns_give_rows_with_large_channels_a_finer_step(rng):
    weight = torch.randn(4000, 96, generator=rng) * 0.1
    weight[:, 7] *= 6
    weight[:, 50] *= 3
    columns = columns_with_repeats(weight, 8)
    counts = torch.bincount(columns, minlength=96)
    assert len(columns) == 104 and (columns.diff() >= 0).all()
    assert counts[7] > counts[50] > 1 and counts.sum() - counts[7] - counts[50] <= 94 + 2

    def error(columns: torch.Tensor) -> float:
        values, scale = quantize_repeated(weight, columns)
        held = torch.zeros_like(weight).index_add_(1, columns, values.float()) * scale[:, None]
        assert ((held - weight).abs() <= 0.501 * scale[:, None]).all(), "half a step at most"
        return float((held - weight).square().mean())

    plain, plain_scale = quantize_rows(weight, torch.float32)
    alone = error(torch.arange(96))
    assert alone == pytest.approx(float((plain * plain_scale[:, None] - weight).square().mean()))
    assert error(columns) < 0.3 * alone


def test_int8_head_survives_sums_beyond_31_bits():
    head = Int8Head()
    head.init(weight=torch.ones(16, 4096))
    assert torch.allclose(head.forward(torch.ones(2, 4096)), torch.tensor(4096.0), rtol=1e-5)


def test_int8_head_of_a_zero_row_is_zero():
    head = Int8Head()
    head.init(weight=torch.cat((torch.zeros(1, 64), torch.ones(15, 64))))
    got = head.forward(torch.stack((torch.zeros(64), torch.ones(64))))
    assert torch.equal(got[0], torch.zeros(16)) and got[1, 0] == 0 and torch.isfinite(got).all()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", ["int4", "int8", "head", "bf16", "f32"])
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_rows_do_not_depend_on_the_batch(kind, in_features, out_features, threads, rng):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        linear = make_linear(kind, in_features, out_features, rng)
        x = torch.randn(24, in_features, generator=rng)
        x = x if kind in ("f32", "head") else x.bfloat16()
        alone = torch.cat([linear.forward(row) for row in x.split(1)])
        for num_rows in (*range(1, 18), 24):
            for start in {0, 24 - num_rows}:
                together = linear.forward(x[start : start + num_rows])
                assert torch.equal(together, alone[start : start + num_rows]), f"{num_rows} rows from {start}"
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not can_fuse_gate(torch.bfloat16), reason="this CPU's matrix library has no bfloat16")
@pytest.mark.parametrize(("in_features", "width"), [(32, 8), (576, 1536)])
def test_gated_linear_matches_its_parts(in_features, width, rng):
    x = torch.randn(70, in_features, generator=rng).bfloat16()
    gate_up = (torch.randn(2 * width, in_features, generator=rng) * in_features**-0.5).bfloat16()
    oracle = silu_multiply_ref(x.double() @ gate_up.double().T)
    assert_matches_oracle("gated", gated_linear(x, gate_up), oracle, silu_multiply_ref(x @ gate_up.T))


@pytest.mark.parametrize("name", ["float_linear", "int4_linear", "int8_linear", "int8_head"])
def test_operators_are_registered_and_freed(name, rng):
    operator = get_operator(name, "torch")
    values, scale, minimum = affine_parts(64, 32, rng)
    operator.init(values=values, scale=scale, minimum=minimum, weight=dequantize_groups_ref(values, scale, minimum))
    assert operator.nbytes > 0
    operator.free()
    operator.free()
    assert operator.nbytes == 0


def test_wrong_groups_are_refused():
    with pytest.raises(ValueError, match="a column per 32"):
        Int4Linear().init(values=torch.zeros(16, 48, dtype=torch.uint8), scale=torch.zeros(16, 1), minimum=torch.zeros(16, 1))
