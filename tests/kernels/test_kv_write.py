"""kv_write against its reference, in pages of every head_dim, and check_tensor's messages."""

from __future__ import annotations

import pytest
import torch
from paged_kv import make_pool

from qsa.kernels.checks import FLOATS, check_tensor
from qsa.kernels.kv_write import kv_write, write_rows
from qsa.kernels.kv_write_ref import kv_write_ref
from qsa.kernels.paged_rows import SliceRows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_kv_heads", "head_dim"),
    [
        (3, 64),
        (2, 80),  # not a power of two: several rows a token
        (1, 128),
        (1, 96),
    ],
)
def test_kv_write(num_kv_heads, head_dim, dtype):
    torch.manual_seed(0)
    got, want = (make_pool(4, num_kv_heads, head_dim, dtype) for _ in range(2))
    page_size = got.shape[3]
    chunks, offsets = torch.tensor([3, 0, 3, 2]), torch.tensor([0, page_size - 1, 5, 17])
    k, v = (torch.randn(4, num_kv_heads, head_dim) for _ in range(2))

    rows = SliceRows(got, 1)
    kv_write(k, v, rows, write_rows(rows, chunks, offsets))

    kv_write_ref(k, v, want, chunks, offsets)
    assert torch.equal(torch.nan_to_num(got, nan=7.0), torch.nan_to_num(want, nan=7.0))
    assert not torch.isnan(want[3, :, :, 0]).any()


def test_a_page_must_hold_whole_slices():
    pages = torch.zeros(2, 1, 2, 32, 64)
    with pytest.raises(ValueError, match=r"32 tokens, fewer than the 64 tokens of sparse.block_size_fine"):
        SliceRows(pages, 64)


def test_check_tensor_names_the_tensor():
    check_tensor("q", torch.zeros(2, 3), (None, 3), FLOATS, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"q must have shape \[any, 4\], got \[2, 3\]"):
        check_tensor("q", torch.zeros(2, 3), (None, 4), FLOATS)
    with pytest.raises(ValueError, match="q must be float32 or bfloat16 or float16, got int64"):
        check_tensor("q", torch.zeros(2, 3, dtype=torch.int64), (2, 3), FLOATS)
