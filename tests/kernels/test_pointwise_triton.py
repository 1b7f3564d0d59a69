"""Norm with residual, gated activation and rotation on Triton against their references; rows apart from their batch."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_matches_oracle
from paged_batch import DEVICES

pytest.importorskip("triton")
from qsa.kernels.pointwise import signed_sine
from qsa.kernels.pointwise_ref import add_rms_norm_ref, rms_norm_ref, rotate_ref, silu_multiply_ref
from qsa.kernels.pointwise_triton import TUNE, add_rms_norm, rms_norm, rotate, silu_multiply
from qsa.kernels.registry import get_operator

DTYPES = [torch.float16, torch.float32, torch.bfloat16]
WIDTHS = [8, 576, 37, 3584]  # smallest, the default model's, one that fills no vector, the 7B shape's


def assert_close(name: str, got: torch.Tensor, oracle: torch.Tensor, peer: torch.Tensor) -> None:
    """assert_matches_oracle; the interpreter cuts numbers to bfloat16 instead of rounding them."""
    is_cut = got.dtype == torch.bfloat16 and got.device.type == "cpu"
    assert_matches_oracle(name, got, oracle, peer, factor=4.0 if is_cut else 2.0)


def random(*shape: int, dtype: torch.dtype, device: str, magnitude: float = 1.0) -> torch.Tensor:
    return ((torch.randn(*shape) + 0.5) * magnitude).to(dtype).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 30.0])  # epsilon matters at the first
def test_rms_norm(width, dtype, magnitude, device):
    torch.manual_seed(0)
    x = random(5, width, dtype=dtype, device=device, magnitude=magnitude)
    weight = random(width, dtype=dtype, device=device)
    oracle = rms_norm_ref(x.double(), weight.double(), 1e-5)
    assert_close("normed", rms_norm(x, weight, 1e-5), oracle, rms_norm_ref(x, weight, 1e-5))
    bare = rms_norm_ref(x.double(), None, 1e-5)
    assert_close("no weight", rms_norm(x, None, 1e-5), bare, rms_norm_ref(x, None, 1e-5))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_parts", [0, 1, 3, 8])
@pytest.mark.parametrize("width", [37, 576])
def test_add_rms_norm(width, num_parts, dtype, device):
    torch.manual_seed(0)
    wide = random(5, width + 8, dtype=dtype, device=device)
    x, rest = wide[:, :width], wide[:, width:].clone()  # rows with a gap
    weight = random(width, dtype=dtype, device=device)
    parts = random(num_parts, 5, width, dtype=torch.float32, device=device) if num_parts else None
    exact = add_rms_norm_ref(x.double(), None if parts is None else parts.double(), weight.double(), 1e-5)
    peer = add_rms_norm_ref(x, parts, weight, 1e-5)
    got = add_rms_norm(x, parts, weight, 1e-5)
    assert_close("residual", x, exact[0], peer[0])
    assert_close("normed", got, exact[1], peer[1])
    assert torch.equal(got, rms_norm(x, weight, 1e-5))  # of what was stored
    assert torch.equal(wide[:, width:], rest)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_part_of_the_activations_type(dtype, device):
    torch.manual_seed(0)
    x, part = (random(3, 96, dtype=dtype, device=device) for _ in range(2))
    exact = add_rms_norm_ref(x.double(), part.double().unsqueeze(0), None, 1e-5)
    peer = add_rms_norm_ref(x, part.unsqueeze(0), None, 1e-5)
    got = add_rms_norm(x, part, None, 1e-5)
    assert_close("residual", x, exact[0], peer[0])
    assert_close("normed", got, exact[1], peer[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [*WIDTHS, 18944])
def test_silu_multiply(width, dtype, device):
    torch.manual_seed(0)
    gate_up = random(3, 2 * width, dtype=dtype, device=device, magnitude=3.0)
    gate_up[0, 0], gate_up[1, 0] = -100, 100  # exp overflows at one of them
    assert_close("gated", silu_multiply(gate_up), silu_multiply_ref(gate_up.double()), silu_multiply_ref(gate_up))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 8), (7, 64), (36, 80), (3, 96), (2, 128)])
def test_rotate(num_heads, head_dim, dtype, device):
    torch.manual_seed(0)
    x = random(5, num_heads, head_dim + 16, dtype=dtype, device=device)[..., :head_dim]
    angle = torch.rand(5, 1, head_dim // 2, device=device) * 6
    cos, sin = (torch.cat((t, t), dim=-1) for t in (angle.cos(), angle.sin()))
    oracle = rotate_ref(x.double(), cos.double(), sin.double())
    assert_close("rotated", rotate(x, cos, signed_sine(sin)), oracle, rotate_ref(x, cos, sin))


@pytest.mark.parametrize("device", DEVICES)
def test_rows_do_not_depend_on_the_batch(device):
    torch.manual_seed(0)
    x, parts = random(9, 600, dtype=torch.float16, device=device), random(3, 9, 600, dtype=torch.float32, device=device)
    weight = random(600, dtype=torch.float16, device=device)
    together, gated = add_rms_norm(x.clone(), parts, weight, 1e-5), silu_multiply(x)
    for row in range(9):
        rows = slice(row, row + 1)
        assert torch.equal(add_rms_norm(x[rows].clone(), parts[:, rows], weight, 1e-5)[0], together[row])
        assert torch.equal(silu_multiply(x[rows])[0], gated[row])


@pytest.mark.parametrize("device", DEVICES)
def test_operators(device):
    torch.manual_seed(0)
    norm, gated = get_operator("rms_norm", "triton"), get_operator("silu_multiply", "triton")
    weight, x = torch.rand(64, device=device), torch.randn(2, 3, 64, device=device)
    norm.init(eps=1e-6, weight=weight)
    assert norm.nbytes == weight.nbytes
    want = rms_norm_ref(x, weight, 1e-6)
    torch.testing.assert_close(norm.forward(x), want)
    torch.testing.assert_close(norm.forward_prefill(x), want)
    stream = x[0].clone()
    torch.testing.assert_close(norm.add(stream, x[1]), rms_norm_ref(x.sum(0), weight, 1e-6))
    torch.testing.assert_close(stream, x.sum(0))
    torch.testing.assert_close(gated.forward(x[0]), silu_multiply_ref(x[0]))
    assert rms_norm(x[:, :0], weight, 1e-6).shape == (2, 0, 64) and gated.forward(x[0, :0]).shape == (0, 32)
    norm.free()
    norm.free()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [8, 8192])
def test_every_launch(rows):
    torch.manual_seed(0)
    x, parts = random(rows, 3584, dtype=torch.bfloat16, device="cuda"), torch.randn(4, rows, 3584, device="cuda")
    exact = add_rms_norm_ref(x.double(), parts.double(), None, 1e-6)
    peer = add_rms_norm_ref(x, parts, None, 1e-6)
    for launch in TUNE["add_rms_norm"]:
        stream = x.clone()
        assert_close("normed", add_rms_norm(stream, parts, None, 1e-6, **launch), exact[1], peer[1])
        assert_close("residual", stream, exact[0], peer[0])
    for launch in TUNE["silu_multiply"]:
        assert_close("gated", silu_multiply(x, **launch), silu_multiply_ref(x.double()), silu_multiply_ref(x))


@pytest.mark.gpu
def test_offsets_beyond_two_billion():
    """The last rows of tensors of more than 2^31 numbers."""
    torch.manual_seed(0)
    rows, width = (1 << 31) // 4096 + 8, 4096
    x = torch.zeros(rows, width, dtype=torch.float16, device="cuda")
    x[-3:] = random(3, width, dtype=torch.float16, device="cuda")
    last = x[-3:].clone()
    gated = silu_multiply(x)[-3:]
    assert_close("gated", gated, silu_multiply_ref(last.double()), silu_multiply_ref(last))
    normed = add_rms_norm(x, x, None, 1e-5)[-3:]
    exact, peer = (
        add_rms_norm_ref(last.double(), last.double()[None], None, 1e-5),
        add_rms_norm_ref(last, last[None], None, 1e-5),
    )
    assert_close("normed", normed, exact[1], peer[1])
    assert_close("residual", x[-3:], exact[0], peer[0])


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"parts must have shape \[2, 3, 8\], got \[2, 4, 8\]"):
        add_rms_norm(torch.zeros(3, 8), torch.zeros(2, 4, 8), None, 0.0)
    with pytest.raises(ValueError, match="gate_up must have an even width"):
        silu_multiply(torch.zeros(3, 7))
