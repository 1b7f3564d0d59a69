"""topk against its reference: rising, padded, -inf never chosen."""

from __future__ import annotations

import pytest
import torch

from qsa.kernels.registry import get_operator
from qsa.kernels.topk import topk
from qsa.kernels.topk_ref import topk_ref


@pytest.mark.parametrize(
    ("shape", "k"),
    [
        ((1, 1), 1),  # smallest
        ((3, 33), 16),
        ((2, 3, 5), 8),  # fewer entries than asked for
        ((2, 128), 64),
    ],
)
def test_topk(shape, k):
    torch.manual_seed(0)
    scores = torch.randn(shape)
    assert torch.equal(topk(scores, k), topk_ref(scores, k))


def test_minus_infinity_is_never_chosen():
    scores = torch.full((2, 10), -torch.inf)
    scores[0, 7], scores[0, 2] = 1.0, -5.0
    got = topk(scores, 4)
    assert got.tolist() == [[2, 7, -1, -1], [-1, -1, -1, -1]]
    assert torch.equal(got, topk_ref(scores, 4))


def test_operator_is_registered():
    operator = get_operator("topk", "torch")
    operator.init()
    assert operator.forward(torch.tensor([[1.0, 3.0, 2.0]]), 2).tolist() == [[1, 2]]
    operator.free()
