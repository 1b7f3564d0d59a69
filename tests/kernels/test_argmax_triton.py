"""Greedy tokens on Triton: the first of equal logits, rows that are not finite, vocabularies of any size."""

from __future__ import annotations

import pytest
import torch
from paged_batch import DEVICES

pytest.importorskip("triton")
from qsa.kernels.argmax_ref import greedy_tokens_ref
from qsa.kernels.argmax_triton import TUNE, greedy_tokens


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab_size", [1, 37, 4096, 49152, 152064])
def test_greedy_tokens(vocab_size, device):
    torch.manual_seed(0)
    logits = torch.randn(3, vocab_size + 1, device=device)[:, :vocab_size]  # rows with a gap
    logits[2] = -3.0e38  # as far down as the filling behind the last token
    assert torch.equal(greedy_tokens(logits), greedy_tokens_ref(logits))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("launch", TUNE, ids=str)
def test_the_first_of_equal_logits(launch, device):
    torch.manual_seed(0)
    logits = torch.randint(0, 4, (4, 20000), device=device).float()  # thousands of equal ones in every part
    logits[1, :9000] = 0
    logits[2] = -1.5
    got = greedy_tokens(logits, **launch)
    assert got.dtype == torch.int64
    assert torch.equal(got, greedy_tokens_ref(logits))
    assert got[2] == 0 and got[1] >= 9000


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("token", [0, 4095, 4096, 9999])
def test_rows_that_are_not_finite(token, value, device):
    torch.manual_seed(0)
    logits = torch.randn(3, 10000, device=device)
    logits[1, token] = value
    got = greedy_tokens(logits)
    assert got[1] == -1
    assert torch.equal(got, greedy_tokens_ref(logits)) and (got[[0, 2]] >= 0).all()


@pytest.mark.gpu
def test_offsets_beyond_two_billion():
    logits = torch.zeros((1 << 31) // 152064 + 2, 152064, device="cuda")
    logits[-1, 151000] = 1.0
    assert greedy_tokens(logits)[-1] == 151000


def test_no_rows():
    assert greedy_tokens(torch.zeros(0, 5)).shape == (0,)
    with pytest.raises(ValueError, match="logits must be float32"):
        greedy_tokens(torch.zeros(2, 5, dtype=torch.float16))
