"""Norm, rotary embedding and gated activation against their references; rows that do not depend on the batch."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_matches_oracle

from qsa.kernels.pointwise import (
    double,
    rms_norm,
    rms_norm_rows,
    rotate,
    signed_sine,
    silu_multiply,
    silu_multiply_rows,
)
from qsa.kernels.pointwise_ref import rms_norm_ref, rotate_ref, silu_multiply_ref

DTYPES = [torch.bfloat16, torch.float32]
WIDTHS = [8, 576, 37]  # smallest, the default model's, and one that fills no vector register


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 300.0])  # epsilon matters at the first
def test_rms_norm(width, dtype, magnitude, rng):
    x = ((torch.randn(5, width, generator=rng) + 0.5) * magnitude).to(dtype)
    weight = torch.randn(width, generator=rng).to(dtype)
    oracle = rms_norm_ref(x.double(), weight.double(), 1e-5)
    peer = rms_norm_ref(x, weight, 1e-5)
    assert_matches_oracle("few rows", rms_norm_rows(x, double(weight), 1e-5), oracle, peer)
    assert_matches_oracle("many rows", rms_norm(x, weight, 1e-5), oracle, peer)
    bare = rms_norm_ref(x.double(), None, 1e-5)
    assert_matches_oracle("no weight", rms_norm_rows(x, None, 1e-5), bare, rms_norm_ref(x, None, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [8, 64, 80])
def test_rotate(head_dim, dtype, rng):
    x = torch.randn(5, 3, head_dim, generator=rng).to(dtype)
    angle = torch.rand(5, 1, head_dim // 2, generator=rng) * 6
    cos, sin = (torch.cat((t, t), dim=-1) for t in (angle.cos(), angle.sin()))
    oracle = rotate_ref(x.double(), cos.double(), sin.double())
    assert_matches_oracle("rotated", rotate(x, cos, signed_sine(sin)), oracle, rotate_ref(x, cos, sin))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_silu_multiply(width, dtype, rng):
    gate_up = (torch.randn(5, 2 * width, generator=rng) * 3).to(dtype)
    assert_matches_oracle("gated", silu_multiply(gate_up), silu_multiply_ref(gate_up.double()), silu_multiply_ref(gate_up))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_do_not_depend_on_the_batch(width, dtype, rng):
    x = torch.randn(17, 2 * width, generator=rng).to(dtype)
    weight = double(torch.randn(2 * width, generator=rng))
    angle = torch.rand(17, 1, 2 * width, generator=rng)
    operators = {
        "norm": lambda start, end: rms_norm_rows(x[start:end], weight, 1e-5),
        "gated": lambda start, end: silu_multiply_rows(x[start:end]),
        "rotated": lambda start, end: rotate(x[start:end].view(end - start, 1, -1), angle[start:end], angle[start:end]),
    }
    for name, operator in operators.items():
        alone = torch.cat([operator(row, row + 1) for row in range(17)])
        for num_rows in range(1, 18):
            assert torch.equal(operator(17 - num_rows, 17), alone[17 - num_rows :]), f"{name}, {num_rows} rows"


@pytest.mark.parametrize("threads", [3, 5])
@pytest.mark.parametrize("width", [8960, 18944])
def test_wide_rows_do_not_depend_on_the_batch_with_threads(width, threads, rng):
    """8 rows are cut among threads within a row; a piece's last numbers must be the same as in the middle of one."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = torch.randn(64, 2 * width, generator=rng) * 3
        alone = torch.cat([silu_multiply_rows(x[row : row + 1]) for row in range(64)])
        for num_rows in (2, 3, 8, 64):
            assert torch.equal(torch.cat([silu_multiply_rows(piece) for piece in x.split(num_rows)]), alone)
    finally:
        torch.set_num_threads(before)
