"""rerank_decode on Triton: what is chosen, what is attended, what is written and what is never read."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from oracle import assert_matches_oracle
from paged_batch import DEVICES, DTYPES, FP8, PagedBatch, make_batch

pytest.importorskip("triton")
import triton
import triton.language as tl

from qsa.kernels import rerank_decode_triton
from qsa.kernels.paged_kv import PagedKV
from qsa.kernels.rerank_decode_triton import rerank_decode, take_largest
from qsa.kernels.sparse_decode_ref import sparse_decode_ref

SLICE, SINK, WINDOW, TOP_K = 32, 16, 64, 3
SIZES = dict(slice_size=SLICE, sink_size=SINK, window_size=WINDOW)
UNTOUCHED = 12345
SHAPES = [  # num_q_heads, num_kv_heads, head_dim, lists, seq_lens
    (1, 1, 64, 1, [1]),  # smallest, shorter than the window
    (7, 1, 128, 1, [500, 65]),  # group of 7; a window that begins at token 1, inside the sink
    (6, 2, 80, 2, [229, 0, 361]),  # head_dim is not a power of two; a row that attends to nothing
    (6, 3, 96, 1, [290, 160]),  # one list for all heads; no more candidates than are chosen
]


def pools_of(seq_lens: list[int], lists: int, pool_size: int) -> torch.Tensor:
    """Random candidates of every sequence, rising, padded with -1; always slice 0 and the one that the window cuts."""
    out = torch.full((len(seq_lens), lists, pool_size), -1, dtype=torch.int32)
    for row, seq_len in enumerate(seq_lens):
        last = -(-max(0, seq_len - WINDOW) // SLICE)
        for one in range(lists if last else 0):
            pool = torch.cat((torch.tensor([0, last - 1]), torch.randperm(last))).unique(sorted=False)[:pool_size]
            out[row, one, : len(pool)] = pool.sort().values
    return out


@triton.jit
def _take_kernel(shares_ptr, is_candidate_ptr, taken_ptr, count, N: tl.constexpr):
    # grid: (1,)
    offs_n = tl.arange(0, N)
    taken = take_largest(tl.load(shares_ptr + offs_n), tl.load(is_candidate_ptr + offs_n) != 0, count)
    tl.store(taken_ptr + offs_n, taken.to(tl.int32))


@dataclass
class Result:
    """out of the batch's rows; chosen [batch, lists, top_k]; others: lists of slots that no row has."""

    out: torch.Tensor
    chosen: torch.Tensor
    others: torch.Tensor


def run(q: torch.Tensor, batch: PagedBatch, pools: torch.Tensor, top_k: int = TOP_K, **options) -> Result:
    """The operator, with pools at slots in falling order and nothing but large numbers in between."""
    rows = len(pools)
    slots = 2 * torch.arange(rows - 1, -1, -1, dtype=torch.int32)
    places = torch.full((2 * rows, *pools.shape[1:]), 2**31 - 1, dtype=torch.int32)
    for row, slot in enumerate(slots.tolist()):
        if batch.seq_lens[row]:
            places[slot] = pools[row]
    chosen = torch.full((2 * rows, pools.shape[1], top_k), UNTOUCHED, dtype=torch.int32, device=q.device)
    out = rerank_decode(
        q,
        batch.page_table,
        batch.seq_lens,
        slots.to(q.device),
        places.to(q.device),
        chosen,
        top_k=top_k,
        kv=batch.kv,
        num_kv_heads=batch.num_kv_heads,
        sm_scale=q.shape[2] ** -0.5,
        **{**SIZES, **options},
    )
    return Result(out.cpu(), chosen[slots.to(q.device).long()].cpu(), chosen[1::2].cpu())


def expected(
    q: torch.Tensor, batch: PagedBatch, pools: torch.Tensor, dtype: torch.dtype, top_k: int = TOP_K, **sizes
) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.zeros(q.shape, dtype=dtype)
    chosen = torch.full((len(pools), pools.shape[1], top_k), UNTOUCHED, dtype=torch.int32)
    for row, (k, v) in enumerate(zip(batch.k, batch.v)):
        if k.shape[1]:
            args = (part.cpu().to(dtype) for part in (q[row], k, v))
            sizes = {**SIZES, **sizes}
            out[row], chosen[row], _ = sparse_decode_ref(
                *args, pools[row].long(), top_k=top_k, sm_scale=q.shape[2] ** -0.5, **sizes
            )
    return out, chosen


def compare(q: torch.Tensor, batch: PagedBatch, pools: torch.Tensor, dtype: torch.dtype, got: Result, **options) -> None:
    oracle, want = expected(q, batch, pools, torch.float64, **options)
    assert torch.equal(got.chosen, want)
    assert (got.others == UNTOUCHED).all()
    final = torch.where(want == UNTOUCHED, -1, want)
    peer, _ = expected(q, batch, final, dtype, **options)  # the same list, so that no near tie decides
    assert_matches_oracle("out", got.out, oracle, peer)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim", "lists", "seq_lens"), SHAPES)
def test_chooses_and_attends_like_the_reference(num_q_heads, num_kv_heads, head_dim, lists, seq_lens, dtype, device):
    torch.manual_seed(0)
    batch = make_batch(seq_lens, num_kv_heads, head_dim, dtype, device)
    q = (2 * torch.randn(len(seq_lens), num_q_heads, head_dim)).to(dtype).to(device)
    pools = pools_of(seq_lens, lists, 8)
    compare(q, batch, pools, dtype, run(q, batch, pools, score_splits=3, value_splits=3))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim", "lists", "seq_lens"), SHAPES[1:3])
def test_float8(num_q_heads, num_kv_heads, head_dim, lists, seq_lens, device):
    torch.manual_seed(0)
    batch = make_batch(seq_lens, num_kv_heads, head_dim, FP8, device)
    q = (2 * torch.randn(len(seq_lens), num_q_heads, head_dim)).half().to(device)
    pools = pools_of(seq_lens, lists, 8)
    compare(q, batch, pools, torch.float16, run(q, batch, pools))


@pytest.mark.gpu
def test_bfloat16():
    torch.manual_seed(3)
    batch = make_batch([700, 400], 2, 128, torch.bfloat16, "cuda")
    q = (2 * torch.randn(2, 14, 128)).bfloat16().to("cuda")
    pools = pools_of([700, 400], 2, 12)
    compare(q, batch, pools, torch.bfloat16, run(q, batch, pools))


@pytest.mark.gpu
def test_pages_in_pinned_host_memory():
    torch.manual_seed(2)
    batch = make_batch([700, 400], 2, 128, torch.float16, "cuda", pinned=True)
    q = (2 * torch.randn(2, 14, 128)).half().to("cuda")
    pools = pools_of([700, 400], 2, 12)
    compare(q, batch, pools, torch.float16, run(q, batch, pools))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("top_k", [1, 7, 24])
def test_lists_of_several_lengths(top_k, device):
    """One slice, some of a pool of 24, all of it; and a sequence with fewer candidates than that."""
    torch.manual_seed(4)
    batch = make_batch([1000, 230], 1, 64, torch.float16, device)
    q = (2 * torch.randn(2, 4, 64)).half().to(device)
    pools = pools_of([1000, 230], 1, 24)
    compare(q, batch, pools, torch.float16, run(q, batch, pools, top_k), top_k=top_k)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seq_len", [512, 511, 513, 544])
def test_window_at_and_beside_the_border_of_a_slice(seq_len, device):
    torch.manual_seed(5)
    batch = make_batch([seq_len], 1, 64, torch.float32, device)
    q = (2 * torch.randn(1, 2, 64)).to(device)
    pools = pools_of([seq_len], 1, 8)
    for window in (1, 31, 32, 33, 64):
        sizes = dict(window_size=window)
        compare(q, batch, pools, torch.float32, run(q, batch, pools, **sizes), **sizes)


@pytest.mark.parametrize("device", DEVICES)
def test_sink_and_window_are_attended_once(device):
    """With V one-hot in position modulo 64 and equal scores, every token weighs the same: count them."""
    batch = make_batch([300], 1, 64, torch.float32, device, page_size=512)
    batch.pool[1, 0, 0, :300] = 0.0
    batch.pool[1, 0, 1, :300] = torch.eye(64, device=device).repeat(5, 1)[:300]
    # slice 0 overlaps the sink (16 tokens), slice 7 is cut by the window's start 300 - 64 = 236 (12 tokens are far)
    pools = torch.tensor([[[0, 2, 7, -1]]], dtype=torch.int32)
    got = run(torch.zeros(1, 1, 64, device=device), batch, pools)
    assert got.chosen.tolist() == [[[0, 2, 7]]]
    want = torch.zeros(64)
    for token in [*range(32), *range(64, 96), *range(224, 236), *range(236, 300)]:
        want[token % 64] += 1
    torch.testing.assert_close(got.out[0, 0] * want.sum(), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_nearly_tied_slices_need_float32(device):
    """Slices whose scores differ by less than a float16 score can say."""
    batch = make_batch([2048], 1, 64, torch.float16, device, page_size=2048)
    for index in range(16):  # keys at q.k = 32 + index / 1024; there float16 steps by 1/32
        keys = torch.zeros(64, 64)
        keys[:, 0], keys[:, 1] = 32.0, index / 1024
        batch.k[0][0, index * 64 : (index + 1) * 64] = batch.pool[1, 0, 0, index * 64 : (index + 1) * 64] = keys.half()
    q = torch.zeros(1, 1, 64).half().to(device)
    q[..., :2] = 1.0
    sizes = dict(slice_size=64, sink_size=64, window_size=512)
    pools = torch.arange(16, dtype=torch.int32).view(1, 1, 16)
    got = run(q, batch, pools, 4, **sizes)
    assert got.chosen[0, 0].tolist() == [12, 13, 14, 15]
    compare(q, batch, pools, torch.float16, got, top_k=4, **sizes)


@pytest.mark.parametrize("device", DEVICES)
def test_equal_slices_are_taken_in_order(device):
    batch = make_batch([600], 1, 64, torch.float16, device, page_size=1024)
    batch.k[0].zero_()
    batch.pool[1, 0, 0, :600] = 0
    pools = torch.arange(1, 13, dtype=torch.int32).view(1, 1, 12)
    got = run(torch.randn(1, 3, 64).half().to(device), batch, pools, 5)
    assert got.chosen[0, 0].tolist() == [1, 2, 3, 4, 5]


SHARES = {
    "near": lambda: torch.rand(256),
    "over many powers of two": lambda: torch.exp(20 * torch.randn(256)),
    "one of almost all": lambda: torch.cat((torch.tensor([6.9]), 1e-9 * torch.rand(255))),
    "nothing for many": lambda: torch.rand(256) * (torch.rand(256) < 0.1),
    "subnormal": lambda: 1e-41 * torch.rand(256),
    "equal": lambda: torch.ones(256),
    "few values": lambda: torch.randint(1, 4, (256,)) / 7,
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shares", SHARES)
def test_the_largest_shares_are_taken(shares, device):
    """As many as are wanted, or all candidates; of equal shares the first."""
    torch.manual_seed(0)
    values = SHARES[shares]()
    for num_candidates in (256, 200, 7, 0):
        is_candidate = torch.zeros(256, dtype=torch.int32)
        is_candidate[torch.randperm(256)[:num_candidates]] = 1
        for count in (1, 7, 55, 199):
            taken = torch.empty(256, dtype=torch.int32, device=device)
            _take_kernel[(1,)](values.to(device), is_candidate.to(device), taken, count, N=256)
            order = torch.where(is_candidate > 0, values, -1.0).argsort(descending=True, stable=True)
            want = order[: min(count, num_candidates)].sort().values
            assert torch.equal(taken.cpu().nonzero().flatten(), want), (num_candidates, count)


@pytest.mark.parametrize("device", DEVICES)
def test_an_outvoted_head_attends_to_what_was_chosen(device):
    """One head has all its mass, 200 nats above the rest, in a slice that three others leave out: no 0 / 0."""
    torch.manual_seed(0)
    batch = make_batch([400], 1, 64, torch.float16, device, page_size=512)
    for index, channel in ((5, 0), (7, 1)):
        tokens = slice(index * SLICE, (index + 1) * SLICE)
        batch.k[0][0, tokens] = 0
        batch.k[0][0, tokens, channel] = 40.0
        batch.pool[1, 0, 0, tokens] = batch.k[0][0, tokens]
    q = torch.zeros(1, 4, 64).half().to(device)
    q[0, 0, 0], q[0, 1:, 1] = 40.0, 40.0
    pools = torch.tensor([[[2, 5, 7]]], dtype=torch.int32)
    got = run(q, batch, pools, 1)
    assert got.chosen.tolist() == [[[7]]]
    compare(q, batch, pools, torch.float16, got, top_k=1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lists", [1, 2])
def test_a_row_does_not_depend_on_its_company(lists, device):
    torch.manual_seed(1)
    seq_lens = [590, 0, 470]
    batch = make_batch(seq_lens, 2, 64, torch.float16, device)
    q = torch.randn(3, 6, 64).half().to(device)
    pools = pools_of(seq_lens, lists, 9)
    together, alone = run(q, batch, pools), run(q[2:], batch.rows(slice(2, 3)), pools[2:])
    assert torch.equal(together.out[2:], alone.out) and torch.equal(together.chosen[2:], alone.chosen)
    assert not together.out[1].any()


@pytest.mark.parametrize("device", DEVICES)
def test_tables_of_many_pages(device):
    """Too many for a program to hold: it reads the entries of the slices' pages alone."""
    torch.manual_seed(1)
    batch = make_batch([590, 470], 2, 64, torch.float16, device)
    wide = torch.full((2, 1100), 1, dtype=torch.int64, device=device)
    wide[:, : batch.page_table.shape[1]] = batch.page_table
    q = torch.randn(2, 6, 64).half().to(device)
    pools = pools_of([590, 470], 2, 9)
    narrow = run(q, batch, pools)
    batch.page_table = wide
    got = run(q, batch, pools)
    assert torch.equal(got.out, narrow.out) and torch.equal(got.chosen, narrow.chosen)


@pytest.mark.gpu
def test_launches_that_overlap():
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("launches overlap from Hopper on")
    torch.manual_seed(1)
    batch = make_batch([790, 0, 470], 2, 64, torch.float16, "cuda")
    q = torch.randn(3, 6, 64).half().to("cuda")
    pools = pools_of([790, 0, 470], 2, 9)
    apart = run(q, batch, pools, overlaps=False)
    for _ in range(20):
        together = run(q, batch, pools, overlaps=True)
        assert torch.equal(together.out, apart.out) and torch.equal(together.chosen, apart.chosen)


@pytest.mark.gpu
def test_addresses_and_places_beyond_two_gigabytes():
    """Pages in the last of 5 GB, pools and lists at slots whose first number is past 2^31."""
    if torch.cuda.get_device_properties(0).total_memory < 40e9:
        pytest.skip("needs 25 GB")
    torch.manual_seed(6)
    batch = make_batch([700, 400], 4, 128, torch.float16, "cuda", page_size=512)
    far = torch.empty((5 << 30) // batch.pool[0].nbytes, *batch.pool.shape[1:], dtype=torch.float16, device="cuda")
    far[-len(batch.pool) :] = batch.pool
    batch.page_table += far[-len(batch.pool)].data_ptr() - batch.pool.data_ptr()
    q = (2 * torch.randn(2, 28, 128)).half().to("cuda")
    pools = pools_of([700, 400], 4, 12)
    num_slots = (1 << 31) // (4 * 12) + 3
    places = torch.empty(num_slots, 4, 12, dtype=torch.int32, device="cuda")
    chosen = torch.empty(num_slots, 4, 12, dtype=torch.int32, device="cuda")[..., :TOP_K]
    slots = torch.tensor([num_slots - 1, num_slots - 2], dtype=torch.int32, device="cuda")
    places[slots.long()] = pools.to("cuda")
    sizes = dict(**SIZES, top_k=TOP_K, num_kv_heads=4, sm_scale=128**-0.5)
    out = rerank_decode(q, batch.page_table, batch.seq_lens, slots, places, chosen, kv=batch.kv, **sizes)
    got = Result(out.cpu(), chosen[slots.long()].cpu(), torch.tensor(UNTOUCHED))
    compare(q, batch, pools, torch.float16, got)


@pytest.mark.gpu
def test_in_a_graph():
    torch.manual_seed(7)
    batch = make_batch([790, 470], 2, 128, torch.float16, "cuda")
    q = torch.randn(2, 14, 128).half().to("cuda")
    pools = pools_of([790, 470], 2, 9).to("cuda")
    slots = torch.arange(2, dtype=torch.int32, device="cuda")
    chosen = torch.empty(2, 2, TOP_K, dtype=torch.int32, device="cuda")
    sizes = dict(**SIZES, top_k=TOP_K, kv=batch.kv, num_kv_heads=2, sm_scale=128**-0.5)

    def call() -> torch.Tensor:
        return rerank_decode(q, batch.page_table, batch.seq_lens, slots, pools, chosen, **sizes)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for _ in range(3):
        q.normal_()
        out.fill_(float("nan"))
        graph.replay()
        captured, lists = out.clone(), chosen.clone()
        assert torch.equal(captured, call()) and torch.equal(lists, chosen)


def test_sizes_must_fit():
    batch = make_batch([100], 4, 64, torch.float16, "cpu")
    arguments = (torch.zeros(1, 4, 64).half(), batch.page_table, batch.seq_lens, torch.zeros(1, dtype=torch.int32))
    sizes = dict(**SIZES, num_kv_heads=4, sm_scale=0.1)
    pools = torch.zeros(1, 4, 8, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"chosen must have shape \[any, 4, 3\]"):
        rerank_decode(*arguments, pools, pools[..., :2], top_k=3, kv=batch.kv, **sizes)
    with pytest.raises(ValueError, match="multiple"):
        rerank_decode(*arguments, pools, pools[..., :3], top_k=3, kv=PagedKV(torch.float16, 16), **sizes)


def test_tuning_candidates_are_arguments():
    known = rerank_decode.__kwdefaults__
    assert all(set(launch) <= set(known) for launch in rerank_decode_triton.TUNE)
