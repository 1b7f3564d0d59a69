"""Dense decode on Triton, through page addresses, against plain softmax attention in float64."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_matches_oracle
from paged_batch import DEVICES, DTYPES, FP8, PagedBatch, make_batch

pytest.importorskip("triton")
from qsa.kernels.dense_attention_ref import dense_attention_ref
from qsa.kernels.dense_attention_triton import dense_decode

SHAPES = [  # num_q_heads, num_kv_heads, head_dim, seq_lens
    (1, 1, 64, [1]),  # smallest
    (7, 1, 128, [300, 65]),  # group of 7, splits that get nothing
    (6, 2, 80, [129, 0]),  # head_dim is not a power of two; a row that attends to nothing
]


def run(q: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
    return dense_decode(
        q,
        batch.page_table,
        batch.seq_lens,
        kv=batch.kv,
        num_kv_heads=batch.num_kv_heads,
        sm_scale=q.shape[2] ** -0.5,
        num_splits=4,
    )


def expected(q: torch.Tensor, batch: PagedBatch, dtype: torch.dtype) -> torch.Tensor:
    out = torch.zeros(q.shape, dtype=dtype)
    for row, (k, v) in enumerate(zip(batch.k, batch.v)):
        if k.shape[1]:
            args = (part.cpu().to(dtype) for part in (q[row : row + 1], k, v))
            out[row] = dense_attention_ref(*args, q.shape[2] ** -0.5, k.shape[1] - 1)[0]
    return out


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim", "seq_lens"), SHAPES)
def test_dense_decode(num_q_heads, num_kv_heads, head_dim, seq_lens, dtype, device):
    torch.manual_seed(0)
    batch = make_batch(seq_lens, num_kv_heads, head_dim, dtype, device)
    q = torch.randn(len(seq_lens), num_q_heads, head_dim).to(dtype).to(device)
    got = run(q, batch)
    assert_matches_oracle("out", got.cpu(), expected(q, batch, torch.float64), expected(q, batch, dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim", "seq_lens"), SHAPES[1:])
def test_float8(num_q_heads, num_kv_heads, head_dim, seq_lens, device):
    torch.manual_seed(0)
    batch = make_batch(seq_lens, num_kv_heads, head_dim, FP8, device)
    q = torch.randn(len(seq_lens), num_q_heads, head_dim).half().to(device)
    got = run(q, batch)
    assert_matches_oracle("out", got.cpu(), expected(q, batch, torch.float64), expected(q, batch, torch.float16))


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_does_not_depend_on_its_company(device):
    torch.manual_seed(1)
    batch = make_batch([290, 170], 1, 64, torch.float16, device)
    q = torch.randn(2, 3, 64).half().to(device)
    assert torch.equal(run(q, batch)[1:], run(q[1:], batch.rows(slice(1, 2))))


@pytest.mark.gpu
def test_bfloat16():
    torch.manual_seed(2)
    batch = make_batch([700, 400], 2, 128, torch.bfloat16, "cuda")
    q = torch.randn(2, 14, 128).bfloat16().to("cuda")
    assert_matches_oracle("out", run(q, batch).cpu(), expected(q, batch, torch.float64), expected(q, batch, torch.bfloat16))
