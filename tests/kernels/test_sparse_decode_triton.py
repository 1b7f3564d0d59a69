"""sparse_decode on Triton: lists, sink and window through page addresses, against the reference in float64."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_matches_oracle
from paged_batch import DEVICES, DTYPES, PagedBatch, make_batch

pytest.importorskip("triton")
from qsa.kernels.sparse_decode_ref import sparse_decode_ref
from qsa.kernels.sparse_decode_triton import sparse_decode

SLICE, SINK, WINDOW = 32, 16, 64
SHAPES = [  # num_q_heads, num_kv_heads, head_dim, lists, seq_lens
    (1, 1, 64, 1, [1]),  # smallest, shorter than the window
    (7, 1, 128, 1, [300, 65]),  # group of 7; a window that begins at token 1, inside the sink
    (6, 2, 80, 2, [129, 0, 261]),  # head_dim is not a power of two; a row that attends to nothing
    (8, 8, 96, 1, [200]),  # no groups, one list for all heads
]


def lists_of(seq_lens: list[int], lists: int, num_selected: int) -> torch.Tensor:
    """Random candidates of every sequence, rising, padded with -1; always slice 0 and the one that the window cuts."""
    out = torch.full((len(seq_lens), lists, num_selected), -1, dtype=torch.int32)
    for row, seq_len in enumerate(seq_lens):
        last = -(-max(0, seq_len - WINDOW) // SLICE)
        for one in range(lists if last else 0):
            chosen = torch.cat((torch.tensor([0, last - 1]), torch.randperm(last))).unique(sorted=False)[: num_selected - 1]
            out[row, one, : len(chosen)] = chosen.sort().values
    return out


def expected(q: torch.Tensor, batch: PagedBatch, lists: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.zeros(q.shape, dtype=dtype)
    for row, (k, v) in enumerate(zip(batch.k, batch.v)):
        if k.shape[1]:
            args = (part.cpu().to(dtype) for part in (q[row], k, v))
            sizes = dict(slice_size=SLICE, sink_size=SINK, window_size=WINDOW, sm_scale=q.shape[2] ** -0.5)
            out[row] = sparse_decode_ref(*args, lists[row].long(), top_k=lists.shape[2], **sizes)[0]
    return out


def run(q: torch.Tensor, batch: PagedBatch, lists: torch.Tensor, dtype: torch.dtype, **options) -> torch.Tensor:
    return sparse_decode(
        q,
        batch.page_table,
        batch.seq_lens,
        lists.to(q.device),
        kv_dtype=dtype,
        num_kv_heads=batch.num_kv_heads,
        page_size=batch.page_size,
        slice_size=SLICE,
        sink_size=SINK,
        window_size=WINDOW,
        sm_scale=q.shape[2] ** -0.5,
        **options,
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim", "lists", "seq_lens"), SHAPES)
def test_sparse_decode(num_q_heads, num_kv_heads, head_dim, lists, seq_lens, dtype, device):
    torch.manual_seed(0)
    batch = make_batch(seq_lens, num_kv_heads, head_dim, dtype, device)
    q = torch.randn(len(seq_lens), num_q_heads, head_dim).to(dtype).to(device)
    chosen = lists_of(seq_lens, lists, 6)

    got = run(q, batch, chosen, dtype, num_splits=4)

    peer = expected(q, batch, chosen, dtype)
    assert_matches_oracle("out", got.cpu(), expected(q, batch, chosen, torch.float64), peer)


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_does_not_depend_on_its_company(device):
    torch.manual_seed(1)
    batch = make_batch([290, 170], 1, 64, torch.float16, device)
    q = torch.randn(2, 3, 64).half().to(device)
    chosen = lists_of([290, 170], 1, 5)
    together = run(q, batch, chosen, torch.float16)
    alone = PagedBatch(batch.k[1:], batch.v[1:], batch.pool, batch.page_table[1:], batch.seq_lens[1:])
    assert torch.equal(together[1:], run(q[1:], alone, chosen[1:], torch.float16))


@pytest.mark.gpu
def test_pages_in_pinned_host_memory():
    torch.manual_seed(2)
    batch = make_batch([700, 400], 2, 128, torch.float16, "cuda", pinned=True)
    q = torch.randn(2, 14, 128).half().to("cuda")
    chosen = lists_of([700, 400], 2, 8)
    got = run(q, batch, chosen, torch.float16).cpu()
    peer = expected(q, batch, chosen, torch.float16)
    assert_matches_oracle("out", got, expected(q, batch, chosen, torch.float64), peer)


@pytest.mark.gpu
def test_bfloat16():
    torch.manual_seed(3)
    batch = make_batch([700, 400], 2, 128, torch.bfloat16, "cuda")
    q = torch.randn(2, 14, 128).bfloat16().to("cuda")
    chosen = lists_of([700, 400], 2, 8)
    got = run(q, batch, chosen, torch.bfloat16).cpu()
    peer = expected(q, batch, chosen, torch.bfloat16)
    assert_matches_oracle("out", got, expected(q, batch, chosen, torch.float64), peer)


def test_lists_must_fit_the_heads():
    batch = make_batch([100], 4, 64, torch.float16, "cpu")
    with pytest.raises(ValueError, match="1 or 4 lists"):
        run(torch.zeros(1, 4, 64).half(), batch, torch.zeros(1, 2, 3, dtype=torch.int32), torch.float16)
