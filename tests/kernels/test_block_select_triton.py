"""block_select on Triton: softmax over slices, sum over the heads of a list, own top-k, against the reference in float64."""

from __future__ import annotations

import pytest
import torch
from paged_batch import DEVICES

pytest.importorskip("triton")
from qsa.kernels.block_select_ref import block_select_ref
from qsa.kernels.block_select_triton import WIDE, block_select

SLICE, WINDOW = 64, 512
SHAPES = [  # num_q_heads, num_kv_heads, per_layer, num_selected, slices of every row
    (1, 1, False, 1, [1]),  # smallest
    (14, 2, False, 16, [100, 16, 0, 5]),  # group of 7; exactly as many candidates, none, and fewer than wanted
    (28, 4, True, 24, [70]),  # one list for all heads, more heads than are held at once
]


def seq_lens_of(slices: list[int], device: str) -> torch.Tensor:
    """Lengths with that many slices before the window, the last one cut by it."""
    return torch.tensor([count and count * SLICE - 5 + WINDOW for count in slices], dtype=torch.int32, device=device)


def scores_of(slices: list[int], num_q_heads: int, max_slices: int) -> torch.Tensor:
    scores = torch.full((len(slices), num_q_heads, max_slices), float("nan"))
    for row, count in enumerate(slices):
        scores[row, :, :count] = 3 * torch.randn(num_q_heads, count)
    return scores


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "per_layer", "num_selected", "slices"), SHAPES)
def test_block_select(num_q_heads, num_kv_heads, per_layer, num_selected, slices, device):
    torch.manual_seed(0)
    scores = scores_of(slices, num_q_heads, max(slices) + 3)
    sizes = dict(num_kv_heads=num_kv_heads, slice_size=SLICE, window_size=WINDOW, per_layer=per_layer)

    indices, edge = block_select(scores.to(device), seq_lens_of(slices, device), num_selected, **sizes)

    indices, edge = indices.cpu(), edge.cpu()
    for row, count in enumerate(slices):
        if count == 0:
            assert (indices[row] == -1).all() and (edge[row] == 0).all()
            continue
        grouped = scores[row, :, :count].double().view(1, num_kv_heads, -1, count)
        assert torch.equal(indices[row].long(), block_select_ref(grouped, num_selected, per_layer=per_layer)[0])
        share = torch.softmax(grouped[0], -1).sum((0, 1) if per_layer else 1).view(-1, count)
        best = share.sort(-1, descending=True).values
        want = best[:, num_selected - 1 : num_selected + 1] if count > num_selected else torch.zeros(len(best), 2).double()
        torch.testing.assert_close(edge[row].double(), want, rtol=1e-5, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_nearly_tied_scores_that_half_precision_confuses(device):
    scores = torch.full((1, 1, 40), 20.0)
    better = torch.tensor([3, 17, 31])
    scores[0, 0, better] += 0.004  # float16 has steps of 0.0156 there
    assert (scores.half() == 20).all()
    indices, _ = block_select(
        scores.to(device), seq_lens_of([40], device), 3, num_kv_heads=1, slice_size=SLICE, window_size=WINDOW
    )
    assert indices.flatten().tolist() == better.tolist()
    with pytest.raises(ValueError, match="half-precision"):
        block_select(scores.half(), torch.ones(1).int(), 3, num_kv_heads=1, slice_size=SLICE, window_size=WINDOW)


@pytest.mark.parametrize("device", DEVICES)
def test_equal_scores_and_a_head_without_mass(device):
    scores = torch.zeros(1, 2, 50)
    scores[0, 1] = -1e30  # all equal again
    scores[0, :, 7] = 5 * scores[0, :, 7] - 1e6
    indices, _ = block_select(
        scores.to(device), seq_lens_of([50], device), 20, num_kv_heads=1, slice_size=SLICE, window_size=WINDOW
    )
    assert indices.flatten().tolist() == [i for i in range(21) if i != 7]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [WIDE - 8, WIDE + 1])  # 256K tokens; one past what is held at once
def test_long_contexts(count, device):
    torch.manual_seed(1)
    scores = scores_of([count], 3, count)
    indices, _ = block_select(
        scores.to(device), seq_lens_of([count], device), 64, num_kv_heads=1, slice_size=SLICE, window_size=WINDOW
    )
    share = torch.softmax(scores[0].double(), -1).sum(0)
    assert indices.flatten().tolist() == share.topk(64).indices.sort().values.tolist()
