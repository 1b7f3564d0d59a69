"""sparse_decode on Triton: lists, sink and window through page addresses, against the reference in float64."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_matches_oracle
from paged_batch import DEVICES, DTYPES, FP8, PagedBatch, make_batch

pytest.importorskip("triton")
from qsa.kernels import split_triton
from qsa.kernels.paged_kv import PagedKV
from qsa.kernels.sparse_decode_ref import sparse_decode_ref
from qsa.kernels.sparse_decode_triton import sparse_decode

SLICE, SINK, WINDOW = 32, 16, 64
SIZES = dict(slice_size=SLICE, sink_size=SINK, window_size=WINDOW)
SHAPES = [  # num_q_heads, num_kv_heads, head_dim, lists, seq_lens
    (1, 1, 64, 1, [1]),  # smallest, shorter than the window
    (7, 1, 128, 1, [300, 65]),  # group of 7; a window that begins at token 1, inside the sink
    (6, 2, 80, 2, [129, 0, 261]),  # head_dim is not a power of two; a row that attends to nothing
    (8, 8, 96, 1, [200]),  # no groups, one list for all heads
]


def lists_of(seq_lens: list[int], lists: int, num_listed: int) -> torch.Tensor:
    """Random candidates of every sequence, rising, padded with -1; always slice 0 and the one that the window cuts."""
    out = torch.full((len(seq_lens), lists, num_listed), -1, dtype=torch.int32)
    for row, seq_len in enumerate(seq_lens):
        last = -(-max(0, seq_len - WINDOW) // SLICE)
        for one in range(lists if last else 0):
            chosen = torch.cat((torch.tensor([0, last - 1]), torch.randperm(last))).unique(sorted=False)[: num_listed - 1]
            out[row, one, : len(chosen)] = chosen.sort().values
    return out


def expected(q: torch.Tensor, batch: PagedBatch, lists: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.zeros(q.shape, dtype=dtype)
    for row, (k, v) in enumerate(zip(batch.k, batch.v)):
        if k.shape[1]:
            args = (part.cpu().to(dtype) for part in (q[row], k, v))
            ref = sparse_decode_ref(*args, lists[row].long(), top_k=lists.shape[2], sm_scale=q.shape[2] ** -0.5, **SIZES)
            out[row] = ref[0]
    return out


def run(q: torch.Tensor, batch: PagedBatch, lists: torch.Tensor, **options) -> torch.Tensor:
    """The operator, with lists at slots in falling order and nothing but large numbers in between."""
    rows = len(lists)
    slots = 2 * torch.arange(rows - 1, -1, -1, dtype=torch.int32)
    pools = torch.full((2 * rows, *lists.shape[1:]), 2**31 - 1, dtype=torch.int32)
    for row, slot in enumerate(slots.tolist()):
        if batch.seq_lens[row]:
            pools[slot] = lists[row]
    return sparse_decode(
        q,
        batch.page_table,
        batch.seq_lens,
        slots.to(q.device),
        pools.to(q.device),
        kv=batch.kv,
        num_kv_heads=batch.num_kv_heads,
        sm_scale=q.shape[2] ** -0.5,
        **SIZES,
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

    got = run(q, batch, chosen, num_splits=4, block_n=16)

    peer = expected(q, batch, chosen, dtype)
    assert_matches_oracle("out", got.cpu(), expected(q, batch, chosen, torch.float64), peer)


@pytest.mark.parametrize("casts", [True, False], ids=["cast", "bits"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim", "lists", "seq_lens"), SHAPES[1:3])
def test_float8(num_q_heads, num_kv_heads, head_dim, lists, seq_lens, device, casts, monkeypatch):
    """K and V in float8 with a scale a head, converted by the card or, where it cannot, by moving bits."""
    if device == "cuda" and casts and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this card does not convert float8_e4m3fn")
    monkeypatch.setattr(split_triton, "casts_e4m3", lambda device: casts)
    torch.manual_seed(0)
    batch = make_batch(seq_lens, num_kv_heads, head_dim, FP8, device)
    q = torch.randn(len(seq_lens), num_q_heads, head_dim).half().to(device)
    chosen = lists_of(seq_lens, lists, 6)
    got = run(q, batch, chosen, num_splits=4)
    peer = expected(q, batch, chosen, torch.float16)
    assert_matches_oracle("out", got.cpu(), expected(q, batch, chosen, torch.float64), peer)


def test_every_number_of_float8_by_moving_bits():
    """All 254 finite ones, subnormal ones too, the way load_rows does it."""
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8)
    numbers = numbers[torch.isfinite(numbers.float())]
    moved = (((numbers.view(torch.uint8).to(torch.int16) << 8) >> 1) & -16385).view(torch.float16)
    assert torch.equal(moved.float() * 256, numbers.float())


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_does_not_depend_on_its_company(device):
    torch.manual_seed(1)
    batch = make_batch([290, 170], 1, 64, torch.float16, device)
    q = torch.randn(2, 3, 64).half().to(device)
    chosen = lists_of([290, 170], 1, 5)
    together = run(q, batch, chosen)
    assert torch.equal(together[1:], run(q[1:], batch.rows(slice(1, 2)), chosen[1:]))


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_counters_serve_the_next_call(device):
    """Splits are counted in memory that nobody clears between calls."""
    torch.manual_seed(2)
    batch = make_batch([290, 170], 1, 64, torch.float16, device)
    q = torch.randn(2, 3, 64).half().to(device)
    chosen = lists_of([290, 170], 1, 5)
    first = run(q, batch, chosen)
    counters = split_triton._counters(q.device)
    assert not counters._counters.any()
    counters._next = 0
    assert torch.equal(first, run(q, batch, chosen))


@pytest.mark.gpu
def test_pages_in_pinned_host_memory():
    torch.manual_seed(2)
    batch = make_batch([700, 400], 2, 128, torch.float16, "cuda", pinned=True)
    q = torch.randn(2, 14, 128).half().to("cuda")
    chosen = lists_of([700, 400], 2, 8)
    got = run(q, batch, chosen).cpu()
    peer = expected(q, batch, chosen, torch.float16)
    assert_matches_oracle("out", got, expected(q, batch, chosen, torch.float64), peer)


@pytest.mark.gpu
def test_bfloat16():
    torch.manual_seed(3)
    batch = make_batch([700, 400], 2, 128, torch.bfloat16, "cuda")
    q = torch.randn(2, 14, 128).bfloat16().to("cuda")
    chosen = lists_of([700, 400], 2, 8)
    got = run(q, batch, chosen).cpu()
    peer = expected(q, batch, chosen, torch.bfloat16)
    assert_matches_oracle("out", got, expected(q, batch, chosen, torch.float64), peer)


@pytest.mark.parametrize(
    ("lists", "sizes", "message"),
    [
        ((1, 2, 3), {}, "1 or 4 lists"),
        ((1, 4, 3), dict(sink_size=33), "sink_size"),
        ((1, 4, 3), dict(slice_size=48), "slice_size"),
    ],
)
def test_wrong_arguments(lists, sizes, message):
    batch = make_batch([100], 4, 64, torch.float16, "cpu")
    with pytest.raises(ValueError, match=message):
        sparse_decode(
            torch.zeros(1, 4, 64).half(),
            batch.page_table,
            batch.seq_lens,
            torch.zeros(1, dtype=torch.int32),
            torch.zeros(lists, dtype=torch.int32),
            kv=batch.kv,
            num_kv_heads=4,
            sm_scale=0.1,
            **{**SIZES, **sizes},
        )


def test_float8_needs_a_scale_a_head():
    with pytest.raises(ValueError, match="scale a head"):
        PagedKV(FP8, 128)
