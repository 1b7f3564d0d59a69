"""float_linear on Triton: few rows against float64, whole, in parts and gated; rows that do not depend on their company."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_matches_oracle
from paged_batch import DEVICES, DTYPES

pytest.importorskip("triton")
from qsa.kernels.pointwise_ref import silu_multiply_ref
from qsa.kernels.registry import get_operator
from qsa.kernels.skinny_launch_triton import CardSize, Launch, cut, rows_from_tiles, store_in_tiles
from qsa.kernels.skinny_linear_triton import TUNE, FloatLinear, pick, skinny_linear

SHAPES = [  # out_features, in_features, num_rows
    (64, 64, 1),  # smallest
    (96, 200, 8),  # neither a whole number of blocks
    (320, 264, 19),  # more rows than the tile of the tensor cores
]
LAUNCHES = [
    dict(block_n=32, block_k=32, splits=1),
    dict(block_n=64, block_k=64, splits=3),  # more parts than the narrowest weight has steps
    dict(block_n=32, block_k=32, splits=2, tile_n=16),  # stored in tiles
]


def make(out_features: int, in_features: int, num_rows: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    weight = (torch.randn(out_features, in_features) * in_features**-0.5).to(dtype).to(device)
    return torch.randn(num_rows, in_features).to(dtype).to(device), weight, torch.randn(out_features).to(dtype).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
@pytest.mark.parametrize(("out_features", "in_features", "num_rows"), SHAPES)
def test_float_linear(out_features, in_features, num_rows, launch, dtype, device):
    torch.manual_seed(0)
    x, weight, bias = make(out_features, in_features, num_rows, dtype, device)
    linear = FloatLinear()
    linear.init(weight=weight, bias=bias, launch=launch)
    x64, weight64, bias64 = (part.cpu().double() for part in (x, weight, bias))
    oracle = F.linear(x64, weight64, bias64)
    peer = F.linear(x.cpu(), weight.cpu(), bias.cpu())
    assert_matches_oracle("sum", linear.forward(x).cpu(), oracle, peer)
    parts = linear.forward_parts(x)
    assert parts.shape == (linear.launch.splits, num_rows, out_features) and parts.dtype == torch.float32
    assert_matches_oracle("parts", parts.sum(0).cpu(), oracle, peer)
    gated = linear.forward_gated(x)
    assert_matches_oracle("gated", gated.cpu(), silu_multiply_ref(oracle), silu_multiply_ref(peer))
    assert_matches_oracle("prefill", linear.forward_prefill(x).cpu(), oracle, peer)
    gated = linear.forward_gated_prefill(x)
    assert_matches_oracle("gated prefill", gated.cpu(), silu_multiply_ref(oracle), silu_multiply_ref(peer))
    assert torch.equal(linear.forward(x), linear.forward(x)), "counters are zero again after every product"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_a_row_does_not_depend_on_its_company(launch, device):
    torch.manual_seed(1)
    x, weight, bias = make(128, 160, 18, torch.float16, device)
    linear = FloatLinear()
    linear.init(weight=weight, bias=bias, launch=launch)
    for form in (linear.forward, linear.forward_gated, lambda rows: linear.forward_parts(rows).transpose(0, 1)):
        together = form(x)
        for first, last in ((0, 1), (7, 8), (3, 11), (0, 16), (17, 18)):
            assert torch.equal(form(x[first:last]), together[first:last]), (first, last)


@pytest.mark.gpu
@pytest.mark.parametrize("launch", [{}, *TUNE], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("out_features", "in_features"), [(4608, 3584), (3584, 18944)])
def test_launches_at_full_size(out_features, in_features, dtype, launch):
    torch.manual_seed(2)
    x, weight, bias = make(out_features, in_features, 8, dtype, "cuda")
    linear = FloatLinear()
    linear.init(weight=weight, bias=bias, launch=launch)
    oracle, peer = F.linear(x.double(), weight.double(), bias.double()), F.linear(x, weight, bias)
    for repeat in range(3):
        assert_matches_oracle(f"sum {repeat}", linear.forward(x), oracle, peer)
    assert torch.equal(linear.forward(x)[3:4], linear.forward(x[3:4]))
    assert_matches_oracle("parts", linear.forward_parts(x).sum(0), oracle, peer)
    assert_matches_oracle("gated", linear.forward_gated(x), silu_multiply_ref(oracle), silu_multiply_ref(peer))


@pytest.mark.gpu
@pytest.mark.parametrize("prefetch", [0, None])
def test_launches_that_begin_early(prefetch):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("Hopper and newer")
    torch.manual_seed(3)
    x, weight, _ = make(3584, 3584, 8, torch.bfloat16, "cuda")
    early, plain = FloatLinear(), FloatLinear()
    early.init(weight=weight, launch=dict(pdl=True))
    if prefetch is None:
        early.begin_early(x.device)
        assert early.launch.pdl and early.launch.prefetch > 0
    plain.init(weight=weight)
    graph = torch.cuda.CUDAGraph()
    early.forward(x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = x
        for _ in range(20):
            y = early.forward(y)
    graph.replay()
    want = x
    for _ in range(20):
        want = plain.forward(want)
    assert torch.equal(y, want)


@pytest.mark.gpu
def test_weights_past_two_gigabytes():
    """Rows that begin past 2 ** 31 numbers."""
    torch.manual_seed(4)
    weight = torch.empty(300_000, 8192, dtype=torch.bfloat16, device="cuda")
    for part in weight.split(50_000):
        part.normal_()
    linear = FloatLinear()
    linear.init(weight=weight)
    x = torch.randn(3, 8192, device="cuda").bfloat16()
    got = linear.forward(x)[:, -1000:]
    tail = weight[-1000:]
    assert_matches_oracle("tail", got, F.linear(x.double(), tail.double()), F.linear(x, tail))


def test_tiles_are_undone():
    weight = torch.randn(48, 100)
    stored = store_in_tiles(weight, 16, 32)
    assert stored.shape == (48, 128)
    assert torch.equal(stored.flatten()[: 16 * 32].view(16, 32), weight[:16, :32]), "the first tile is one piece"
    assert torch.equal(rows_from_tiles(stored, 16, 32, 100), weight)
    with pytest.raises(ValueError, match="tiles of 32"):
        store_in_tiles(weight, 32, 32)


def test_programs_fill_the_card():
    assert cut(56, 28, programs=396) == 7  # 392 programs
    assert cut(72, 28, programs=396) == 5
    assert cut(1188, 56, programs=396) == 1  # three whole waves
    assert cut(592, 28, programs=396) == 2  # one and a half waves, or three
    assert cut(1, 3, programs=396) == 1  # a part has at least two steps


CARDS = [CardSize(4, 99 << 10), CardSize(128, 99 << 10), CardSize(132, 227 << 10)]


@pytest.mark.parametrize("card", CARDS, ids=str)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_weight_has_a_launch(itemsize, card):
    for out_features, in_features in ((4608, 3584), (37888, 3584), (3584, 18944), (152064, 3584), (8, 8)):
        launch = pick(out_features, in_features, itemsize, card)
        assert launch.splits <= max(1, in_features // launch.block_k), launch


def test_wrong_arguments_are_named():
    x, weight, _ = make(64, 64, 2, torch.float16, "cpu")
    with pytest.raises(ValueError, match="weight must be float16"):
        skinny_linear(x, weight.float(), None, Launch())
    with pytest.raises(ValueError, match="does not go with a weight of 64"):
        skinny_linear(x[:, :32], weight, None, Launch())
    with pytest.raises(ValueError, match="cannot be cut into 3 parts"):
        skinny_linear(x, weight, None, Launch(block_k=32, splits=3))
    with pytest.raises(ValueError, match="even number of outputs"):
        skinny_linear(x, weight[:63].contiguous(), None, Launch(), gated=True)


def test_nothing_begins_early_where_it_cannot():
    x, weight, _ = make(64, 64, 4, torch.float32, "cpu")
    linear = FloatLinear()
    linear.init(weight=weight)
    linear.begin_early(x.device)
    assert not linear.launch.pdl


def test_freed():
    linear = get_operator("float_linear", "triton")
    linear.init(weight=torch.randn(32, 32), bias=torch.randn(32))
    assert linear.nbytes == 4 * 32 * 33
    linear.free()
    linear.free()
    assert linear.nbytes == 0
