"""sketch, minmax and mean on Triton: what is kept of a slice, when it is, and both scans, against the references."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_matches_oracle
from paged_batch import DEVICES, DTYPES, FP8, make_batch

pytest.importorskip("triton")
from qsa.kernels.paged_kv import DecodeInputs
from qsa.kernels.registry import get_operator
from qsa.kernels.summaries.make import make_summary
from qsa.kernels.summaries.scan_triton import CHUNK_BYTES
from qsa.kernels.summaries.sketch_ref import sketch_keys_ref, sketch_scan_ref
from qsa.kernels.summaries.vectors_ref import slice_vectors_ref, vector_scan_ref

NAMES = ["sketch", "minmax", "mean"]
SINK, WINDOW, SM_SCALE = 16, 64, 0.125
SHAPES = [  # num_kv_heads, group, head_dim, slice_size, seq_lens
    (1, 1, 64, 64, [129]),  # two slices, of one token 1
    (2, 7, 128, 32, [300, 64, 0, 515]),  # group of 7; no candidates; an unused row
    (3, 3, 80, 16, [210]),  # head_dim is no power of two, the smallest slices
    (1, 12, 96, 32, [400]),  # more heads than half a product has rows
]


def make(name: str, num_kv_heads: int, head_dim: int, slice_size: int):
    summary = get_operator(f"{name}_summary", "triton")
    summary.init(num_kv_heads=num_kv_heads, head_dim=head_dim, slice_size=slice_size)
    assert summary.slice_bytes == make_summary(name, num_kv_heads, head_dim, slice_size, None).slice_bytes
    assert summary.code_write(0, torch.empty(0)) is None and summary.query(0) is None
    return summary


def make_store(summary, seq_lens: list[int], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Chunks of 255 (NaN as float32), and their table, whose entries behind a sequence's last are no addresses."""
    counts = [-(-seq_len // (summary.chunk_slices * summary.slice_size)) for seq_len in seq_lens]
    store = torch.full((2 * sum(counts) + 1, CHUNK_BYTES), 255, dtype=torch.uint8, device=device)
    table = torch.full((len(seq_lens), max(counts) + 1), 7, dtype=torch.int64)
    used = 0
    for row, count in enumerate(counts):
        places = 2 * torch.arange(used + count, used, -1) - 1
        table[row, :count] = store.data_ptr() + places * CHUNK_BYTES
        used += count
    return store, table.to(device)


def fill(summary, batch, table: torch.Tensor) -> None:
    """Summarise all complete slices, in two updates a sequence."""
    for row, seq_len in enumerate(batch.seq_lens.tolist()):
        count = seq_len // summary.slice_size
        for first, last in ((0, count // 3), (count // 3, count)):
            summary.update(0, batch.page_table[row], table[row], first, last, batch.kv)


def want_scores(name: str, q: torch.Tensor, k: torch.Tensor, slice_size: int, first: int, last: int, dtype: torch.dtype):
    """Reference scores [num_q_heads, slices] in `dtype`. q [num_q_heads, head_dim], k [num_kv_heads, tokens, head_dim]."""
    q, k = q.cpu().to(dtype), k.cpu().to(dtype)
    if name == "sketch":
        numbers, scale = sketch_keys_ref(k.float())  # as they are stored, whatever the type of the scores
        return sketch_scan_ref(q, numbers.to(dtype), scale, slice_size, first, last, SM_SCALE)
    count = -(-last // slice_size)
    keys = k[:, : count * slice_size].unflatten(1, (count, slice_size))
    return vector_scan_ref(q, slice_vectors_ref(keys, 1 if name == "mean" else 2), SM_SCALE)


def compare(name: str, got: torch.Tensor, want: torch.Tensor, peer: torch.Tensor) -> None:
    empty = want == -torch.inf
    assert (got[empty] == -torch.inf).all()
    if name == "sketch":
        assert_matches_oracle(name, got[~empty], want[~empty], peer[~empty].float())
    else:  # sums of three products of tf32: 100 times closer than half precision
        assert (got - want).abs().max() <= 5e-6 * want.abs().max()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [*DTYPES, FP8], ids=str)
@pytest.mark.parametrize(("num_kv_heads", "group", "head_dim", "slice_size", "seq_lens"), SHAPES)
def test_scans(num_kv_heads, group, head_dim, slice_size, seq_lens, dtype, name, device):
    torch.manual_seed(0)
    batch = make_batch(seq_lens, num_kv_heads, head_dim, dtype, device, page_size=128)
    summary = make(name, num_kv_heads, head_dim, slice_size)
    _store, table = make_store(summary, seq_lens, device)
    fill(summary, batch, table)
    q_dtype = torch.float16 if dtype == FP8 else dtype
    q = (3 * torch.randn(len(seq_lens), num_kv_heads * group, head_dim)).to(q_dtype).to(device)
    max_slices = -(-max(seq_lens) // slice_size)
    near = dict(max_slices=max_slices, sink_size=SINK, window_size=WINDOW, sm_scale=SM_SCALE)

    def scan(rows: slice, due: list[int]) -> torch.Tensor:
        flags = torch.tensor(due, dtype=torch.int32, device=device)
        return summary.scan(0, DecodeInputs(q[rows]), table[rows], batch.seq_lens[rows], flags, **near).cpu()

    got = scan(slice(None), [1] * len(seq_lens))
    for row, seq_len in enumerate(seq_lens):
        last = max(0, seq_len - WINDOW)
        count = -(-last // slice_size)
        assert got[row, :, count:].isnan().all()  # nothing behind the candidates is written
        if count == 0:
            continue
        sizes = slice_size, SINK, last
        want, peer = (want_scores(name, q[row], batch.k[row], *sizes, to) for to in (torch.float64, torch.float32))
        compare(name, got[row, :, :count], want, peer)
        assert torch.equal(scan(slice(row, row + 1), [1])[0, :, :count], got[row, :, :count])
    due = [row % 2 for row in range(len(seq_lens))]
    some = scan(slice(None), due)
    for row, flag in enumerate(due):
        torch.testing.assert_close(some[row], got[row] if flag else got[row] * torch.nan, rtol=0, atol=0, equal_nan=True)

    num_slices = seq_lens[-1] // slice_size - 1
    rows = summary.scan_rows(0, q, table[-1], num_slices=num_slices, sm_scale=SM_SCALE).cpu()
    assert rows.shape == (len(seq_lens), num_kv_heads * group, num_slices)
    for row in range(len(seq_lens)):
        sizes = slice_size, 0, num_slices * slice_size
        want, peer = (want_scores(name, q[row], batch.k[-1], *sizes, to) for to in (torch.float64, torch.float32))
        compare(name, rows[row], want, peer)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_decode_steps_write_what_a_chunk_writes(name, device):
    """Only a row whose last token completes a slice writes anything, and then what `update` does."""
    torch.manual_seed(0)
    seq_lens = [192, 191, 64, 0]
    batch = make_batch(seq_lens, 2, 64, torch.float16, device, page_size=128)
    summary = make(name, 2, 64, 64)
    store, table = make_store(summary, seq_lens, device)
    summary.update_decode(0, batch.page_table, table, batch.seq_lens, batch.kv)
    stepped = store.clone()
    store.fill_(255)
    for row, index in ((0, 2), (2, 0)):
        summary.update(0, batch.page_table[row], table[row], index, index + 1, batch.kv)
    summary.update(0, batch.page_table[1], table[1], 1, 1, batch.kv)  # no slice
    assert torch.equal(stepped, store)
    assert (store != 255).any(1).sum() == 2

    kept = torch.full((5, CHUNK_BYTES), 255, dtype=torch.uint8)  # the torch backend keeps the same bytes
    keys = batch.k[0].cpu()[:, 128:].unflatten(1, (1, 64))
    make_summary(name, 2, 64, 64, None).update(0, kept, keys, torch.tensor([1]), torch.tensor([2]))
    mine, theirs = (part[1].cpu()[2 * summary.slice_bytes : 3 * summary.slice_bytes] for part in (stepped, kept))
    if name == "sketch":
        assert torch.equal(mine, theirs)
    else:
        torch.testing.assert_close(mine.view(torch.float32), theirs.view(torch.float32), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_scan_crosses_chunks(name, device):
    """Chunks as the torch backend writes them; programs' shares begin and end anywhere, in heads, chunks and rows."""
    torch.manual_seed(0)
    num_kv_heads, head_dim, slice_size = 4, 128, 16
    summary = make(name, num_kv_heads, head_dim, slice_size)
    num_slices = summary.chunk_slices + 5
    keys = torch.randn(num_kv_heads, num_slices, slice_size, head_dim)
    places = torch.arange(num_slices)
    chunks = torch.tensor([3, 1])[places // summary.chunk_slices]
    store = torch.full((5, CHUNK_BYTES), 255, dtype=torch.uint8)
    peer_summary = make_summary(name, num_kv_heads, head_dim, slice_size, None)
    peer_summary.update(0, store, keys, chunks, places % summary.chunk_slices)
    store = store.to(device)
    table = (store.data_ptr() + torch.tensor([[3, 1, 2]]) * CHUNK_BYTES).to(device)
    q = torch.randn(1, num_kv_heads, head_dim).half().to(device)
    seq_lens = torch.tensor([num_slices * slice_size + WINDOW], dtype=torch.int32, device=device)
    due = torch.ones(1, dtype=torch.int32, device=device)
    near = dict(max_slices=num_slices + 4, sink_size=0, window_size=WINDOW, sm_scale=SM_SCALE)
    got = summary.scan(0, DecodeInputs(q), table, seq_lens, due, programs=1, **near).cpu()[0, :, :num_slices]
    sizes = slice_size, 0, num_slices * slice_size
    k = keys.flatten(1, 2)
    want, peer = (want_scores(name, q[0], k, *sizes, to) for to in (torch.float64, torch.float32))
    compare(name, got, want, peer)
    rows = summary.scan_rows(0, q, table[0], num_slices=num_slices, sm_scale=SM_SCALE).cpu()
    compare(name, rows[0], want, peer)


@pytest.mark.parametrize("device", DEVICES)
def test_minmax_bounds_every_key(device):
    torch.manual_seed(0)
    batch = make_batch([256], 2, 64, torch.float16, device, page_size=128)
    summary = make("minmax", 2, 64, 32)
    _store, table = make_store(summary, [256], device)
    fill(summary, batch, table)
    q = torch.randn(1, 6, 64).half().to(device)
    got = summary.scan_rows(0, q, table[0], num_slices=8, sm_scale=1.0).cpu()
    keys = batch.k[0].cpu().float().unflatten(1, (8, 32))
    exact = torch.einsum("hgd,hnsd->hgns", q[0].cpu().float().view(2, 3, 64), keys).amax(3)
    assert (exact.flatten(0, 1) <= got[0] + 1e-4).all()


@pytest.mark.parametrize("device", DEVICES)
def test_block_pools(device):
    """How scores of slices become a block's is the summary's own affair."""
    assert [make(name, 2, 64, 32).block_pool for name in NAMES] == ["lse", "max", "mean"]
