"""selection_figures against sets, and that a step's lists become the previous ones."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from paged_batch import DEVICES

from qsa.kernels.selection_figures_ref import selection_figures_ref
from qsa.kernels.selection_figures_triton import selection_figures

SIZES = dict(slice_size=16, sink_size=8, window_size=32)
SHAPES = [  # layers, slots, lists, top_k
    (1, 2, 1, 1),  # smallest
    (2, 5, 4, 7),  # not a power of two
    (1, 5, 2, 130),  # the previous list in several pieces
]


def random_lists(shape: tuple[int, ...], num_slices: int) -> torch.Tensor:
    """Rising lists of different slices, the last places of some padded with -1."""
    scores = torch.rand(*shape[:-1], num_slices)
    lists = scores.argsort(-1)[..., : shape[-1]].sort(-1).values.int()
    padding = torch.arange(shape[-1]) >= torch.randint(1, shape[-1] + 2, (*shape[:-1], 1))
    return lists.masked_fill(padding, -1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_figures_are_those_of_sets(shape, device):
    torch.manual_seed(0)
    _, num_slots, _, top_k = shape
    num_slices = 2 * top_k + 3
    long = 16 * (num_slices - 1) + 32 + 5
    slots = [num_slots - 1, 0, 0]
    seq_lens = [long, 0, 16 * top_k + 32]  # selects; is not used; has as many candidates as places
    if num_slots == 2:
        slots, seq_lens = slots[:2], seq_lens[:2]
    chosen, previous = random_lists(shape, num_slices), random_lists(shape, num_slices)
    edges = torch.rand(*shape[:-1], 2)
    edges[..., 1] *= torch.rand(shape[:-1]) > 0.3
    want_previous = previous.clone()
    want = selection_figures_ref(chosen, want_previous, edges, slots, seq_lens, **SIZES)
    inputs = [t.to(device) for t in (chosen, previous, edges)]
    rows = [torch.tensor(t, dtype=torch.int32, device=device) for t in (slots, seq_lens)]
    got = selection_figures(*inputs, *rows, **SIZES)
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(inputs[1].cpu(), want_previous)
    got = selection_figures(*inputs, *rows, **SIZES).cpu()
    assert torch.equal(got[..., 3], got[..., 4]), "the same lists again: nothing is new"


@pytest.mark.parametrize("device", DEVICES)
def test_wrong_arguments_are_named(device):
    lists = torch.zeros(1, 2, 2, 4, dtype=torch.int32, device=device)
    edges, rows = torch.zeros(1, 2, 2, 2, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="chosen must be int32"):
        selection_figures(lists.long(), lists, edges, rows, rows, **SIZES)
    with pytest.raises(ValueError, match="lists of previous must be contiguous"):
        selection_figures(lists, lists.mT.contiguous().mT, edges, rows, rows, **SIZES)
