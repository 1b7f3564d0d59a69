"""block_select against its reference, and scores that half precision would get wrong."""

from __future__ import annotations

import pytest
import torch

from qsa.kernels.block_select import block_select
from qsa.kernels.block_select_ref import block_select_ref
from qsa.kernels.float_scores import float_scores


@pytest.mark.parametrize("per_layer", [False, True], ids=["kv_head", "layer"])
@pytest.mark.parametrize(
    ("lists", "num_kv_heads", "rows", "num_slices", "num_selected"),
    [
        (1, 1, 1, 1, 4),  # smallest, fewer slices than asked for
        (1, 3, 3, 128, 64),  # the default model at 8K
        (2, 2, 7, 33, 16),
        (4, 1, 48, 40, 32),  # tiles of sampled queries
    ],
)
def test_slices(lists, num_kv_heads, rows, num_slices, num_selected, per_layer):
    torch.manual_seed(0)
    scores = 3 * torch.randn(lists, num_kv_heads, rows, num_slices)
    got, edge = block_select(scores, num_selected, per_layer=per_layer)
    assert torch.equal(got, block_select_ref(scores.double(), num_selected, per_layer=per_layer))
    assert (edge is None) == (num_slices <= num_selected)
    assert edge is None or (edge[..., 0] >= edge[..., 1]).all()


@pytest.mark.parametrize("per_layer", [False, True], ids=["kv_head", "layer"])
@pytest.mark.parametrize("top_k_coarse", [1, 3, 100])  # fewer slices than asked for; some blocks; coarse stage skipped
def test_blocks_then_slices(top_k_coarse, per_layer):
    torch.manual_seed(0)
    scores = 3 * torch.randn(2, 3, 3, 70)  # blocks of 8: the last one is cut
    blocks = torch.nn.functional.pad(scores, (0, 2), value=-torch.inf).unflatten(-1, (9, 8)).amax(-1)
    options = dict(per_layer=per_layer, block_scores=blocks, top_k_coarse=top_k_coarse, slices_per_block=8)
    got, _ = block_select(scores, 16, **options)
    assert torch.equal(got, block_select_ref(scores.double(), 16, **{**options, "block_scores": blocks.double()}))
    assert (got == -1).any() == (top_k_coarse == 1)


def test_only_candidates_are_selected():
    torch.manual_seed(0)
    scores = torch.randn(2, 1, 5, 20)
    candidates = torch.zeros(2, 1, 20, dtype=torch.bool)
    candidates[0, :, 3:7] = True
    candidates[1, :, 1:19] = True
    got, _ = block_select(scores, 8, candidates=candidates)
    assert got[0, 0].tolist() == [3, 4, 5, 6, -1, -1, -1, -1]
    assert torch.equal(got, block_select_ref(scores.double(), 8, candidates=candidates))


def test_rows_of_weight_zero_do_not_count():
    torch.manual_seed(0)
    scores = torch.randn(1, 1, 6, 30)
    weights = torch.tensor([1.0, 0, 1, 0, 0, 1]).view(1, 1, 6, 1)
    got, _ = block_select(scores, 8, weights=weights)
    assert torch.equal(got, block_select(scores[:, :, [0, 2, 5]], 8)[0])


def test_nearly_tied_scores_need_float32():
    """Scores around 20 that differ by less than float16 can say: rounded to it, the first slices win; the last ones should."""
    scores = (20 + torch.arange(32) * 1e-4).view(1, 1, 1, 32)
    assert (scores.half() == scores.half().flatten()[0]).sum() > 16  # indeed tied there
    got, _ = block_select(scores, 4)
    assert got.flatten().tolist() == [28, 29, 30, 31]
    rounded, _ = block_select(scores.half().float(), 4)
    assert rounded.flatten().tolist() != [28, 29, 30, 31]
    with pytest.raises(ValueError, match="must be float32"):
        block_select(scores.half(), 4)


def test_scores_of_bfloat16_keys_are_not_rounded():
    """q.k of bfloat16 inputs is as exact as a float32 sum; the plain bfloat16 product is off by up to 2^-9."""
    torch.manual_seed(0)
    q, k = (4 * torch.randn(3, 3, 64)).bfloat16(), torch.randn(3, 4736, 64).bfloat16()
    exact = q.double() @ k.double().transpose(1, 2)
    got = float_scores(q, k)
    assert got.dtype == torch.float32
    assert ((got - exact).abs() <= 2.0**-15 * exact.abs().clamp(min=1.0)).all()
    assert ((torch.bmm(q, k.transpose(1, 2)).double() - exact).abs().max()) > 0.05


def test_scores_of_float16_keys_may_exceed_its_range():
    q, k = torch.full((1, 1, 128), 30.0).half(), torch.full((1, 3, 128), -30.0).half()
    assert (float_scores(q, k) == -115200.0).all()
