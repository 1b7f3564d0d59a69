"""Sparse prefill on Triton, both ways of reading, against its reference: cut tiles, padded lists, odd shapes, fp8 K and V."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from oracle import assert_matches_oracle
from paged_batch import DEVICES, PagedBatch, make_batch

pytest.importorskip("triton")
from qsa.kernels.dense_attention_ref import dense_attention_ref
from qsa.kernels.paged_kv import capability
from qsa.kernels.sparse_prefill import tile_window_slice
from qsa.kernels.sparse_prefill_ref import sparse_prefill_ref
from qsa.kernels.sparse_prefill_triton import TUNE, sparse_prefill
from qsa.kernels.tile_addresses_triton import list_addresses

CASES = [  # num_q_heads, num_kv_heads, head_dim, start, end, tile_size, slice_size, window_size, list_size
    (7, 1, 128, 700, 900, 128, 64, 256, 3),  # group of 7, both ends cut a tile, steps of two slices leave one over
    (4, 2, 64, 704, 832, 64, 64, 200, 5),  # two heads a program; a window that is no whole number of slices
    (6, 2, 64, 640, 700, 64, 64, 256, 2),  # groups of 3
    (2, 2, 80, 768, 900, 128, 64, 256, 1),  # head_dim is not a power of two
    (3, 1, 96, 500, 513, 64, 32, 128, 4),  # tiles of two slices, a last tile of one query
    (1, 1, 64, 0, 300, 128, 64, 128, 2),  # first tiles whose window reaches token 0
    (8, 1, 64, 899, 900, 64, 64, 256, 7),  # one query, whose lists hold all there is
]
WAYS = {"plain": dict(slices_per_step=1), "two": dict(slices_per_step=2), "descriptor": dict(use_tma=True)}
LOOPS = pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
LISTS_AND_TYPES = [  # lists per layer, dtype
    (False, torch.float16),
    (True, torch.float32),
    (False, torch.float32),
    (True, torch.float16),
]


def make_lists(case: tuple[int, ...], per_layer: bool) -> torch.Tensor:
    """Random lists in rising order, as long as there are candidates and one shorter than that for every second tile."""
    _, num_kv_heads, _, start, end, tile_size, slice_size, window_size, list_size = case
    tiles = range(start // tile_size, (end - 1) // tile_size + 1)
    lists = torch.full((len(tiles), 1 if per_layer else num_kv_heads, list_size), -1, dtype=torch.int32)
    for row, tile in enumerate(tiles):
        candidates = max(0, tile_window_slice(tile * tile_size, window_size, slice_size) - 1)
        for one in lists[row]:
            chosen = torch.randperm(candidates)[: max(0, list_size - row % 2)].sort().values + 1
            one[: len(chosen)] = chosen
    return lists


def run(q: torch.Tensor, batch: PagedBatch, lists: torch.Tensor | None, case: tuple[int, ...], **how: Any) -> torch.Tensor:
    _, num_kv_heads, head_dim, start, end, tile_size, slice_size, window_size, _ = case
    if q.is_cuda and capability(q.device) < (9, 0) and ("use_tma" in how or how.get("slices_per_step") == 2):
        pytest.skip("needs Hopper's descriptors, or its shared memory")
    return sparse_prefill(
        q,
        batch.page_table[0],
        None if lists is None else lists.to(q.device),
        first=start // tile_size * tile_size,
        start=start,
        end=end,
        tile_size=tile_size,
        num_kv_heads=num_kv_heads,
        slice_size=slice_size,
        window_size=window_size,
        sm_scale=head_dim**-0.5,
        kv=batch.kv,
        pool=batch.pool,
        **how,
    )


def expected(
    q: torch.Tensor, batch: PagedBatch, lists: torch.Tensor, case: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    _, _, head_dim, start, _, tile_size, slice_size, window_size, _ = case
    sizes = dict(start=start, tile_size=tile_size, window_size=window_size, slice_size=slice_size)
    args = (part.cpu().to(dtype) for part in (q, batch.k[0], batch.v[0]))
    return sparse_prefill_ref(*args, lists, sm_scale=head_dim**-0.5, **sizes)


def combinations() -> Iterator[Any]:
    """Every case in every way of reading, and each way with all lists and types; what remains of the product is slow."""
    for number, (case, way) in enumerate(product(CASES, WAYS)):
        for per_layer, dtype in product((False, True), (torch.float16, torch.bfloat16, torch.float32)):
            is_fast = dtype == torch.bfloat16 or (per_layer, dtype) == LISTS_AND_TYPES[number % 4]
            name = f"{case}-{'layer' if per_layer else 'kv_head'}-{dtype}-{way}"
            yield pytest.param(case, per_layer, dtype, WAYS[way], id=name, marks=[] if is_fast else pytest.mark.slow)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("case", "per_layer", "dtype", "how"), combinations())
def test_matches_reference(case, per_layer, dtype, device, how):
    num_q_heads, num_kv_heads, head_dim, start, end = case[:5]
    if "use_tma" in how and head_dim & (head_dim - 1):
        pytest.skip("rows of a descriptor are powers of two")
    if dtype == (torch.bfloat16 if device == "cpu" else torch.float32):
        pytest.skip("bfloat16 products are wrong in the interpreter; float32 is for the interpreter")
    torch.manual_seed(0)
    batch = make_batch([end], num_kv_heads, head_dim, dtype, device)
    q = torch.randn(end - start, num_q_heads, head_dim).to(dtype).to(device)
    lists = make_lists(case, per_layer)
    got = run(q, batch, lists, case, **how)
    oracle, peer = (expected(q, batch, lists, case, one) for one in (torch.float64, dtype))
    assert_matches_oracle("out", got.cpu(), oracle, peer)


HOW = [
    dict(heads=1),
    dict(heads=2),
    dict(heads=4),
    dict(num_warps=8),
    dict(slices_per_step=2),
    dict(use_tma=True),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", HOW, ids=str)
def test_how_it_is_launched_changes_nothing_but_rounding(how, device):
    torch.manual_seed(1)
    case = (7, 1, 64, 450, 600, 64, 64, 128, 4)
    batch = make_batch([600], 1, 64, torch.float16, device)
    q = torch.randn(150, 7, 64).half().to(device)
    lists = make_lists(case, False)
    got = run(q, batch, lists, case, **how)
    oracle, peer = (expected(q, batch, lists, case, one) for one in (torch.float64, torch.float16))
    assert_matches_oracle("out", got.cpu(), oracle, peer)


@LOOPS
@pytest.mark.parametrize("device", DEVICES)
def test_keys_and_values_in_fp8(device, how):
    torch.manual_seed(2)
    case = (6, 2, 64, 450, 600, 64, 64, 128, 4)
    batch = make_batch([600], 2, 64, torch.float8_e4m3fn, device)
    q = torch.randn(150, 6, 64).half().to(device)
    lists = make_lists(case, False)
    got = run(q, batch, lists, case, **how)
    oracle, peer = (expected(q, batch, lists, case, one) for one in (torch.float64, torch.float16))
    assert_matches_oracle("out", got.cpu(), oracle, peer)


@LOOPS
@pytest.mark.parametrize("device", DEVICES)
def test_no_lists_mean_everything(device, how):
    torch.manual_seed(3)
    case = (6, 2, 64, 450, 600, 128, 32, 128, 0)
    batch = make_batch([600], 2, 64, torch.float16, device)
    q = torch.randn(150, 6, 64).half().to(device)
    got = run(q, batch, None, case, **how)
    args = [part.cpu() for part in (q, batch.k[0], batch.v[0])]
    oracle = dense_attention_ref(*(part.double() for part in args), 0.125, 450)
    assert_matches_oracle("out", got.cpu(), oracle, dense_attention_ref(*args, 0.125, 450))


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_attended_anyway_is_attended_once(device):
    """Slice 0, slices of the window and padding may stand anywhere in a list."""
    torch.manual_seed(4)
    case = (1, 1, 64, 512, 576, 64, 64, 128, 5)
    batch = make_batch([576], 1, 64, torch.float16, device)
    q = torch.randn(64, 1, 64).half().to(device)
    messy = run(q, batch, torch.tensor([[[-1, 3, 0, 7, 5, 8, -1]]], dtype=torch.int32), case)
    clean = run(q, batch, torch.tensor([[[3, 5]]], dtype=torch.int32), case)
    assert torch.equal(messy, clean)


@pytest.mark.parametrize("device", DEVICES)
def test_a_chunk_is_the_same_in_pieces(device):
    torch.manual_seed(5)
    case = (2, 1, 64, 512, 640, 64, 64, 128, 3)
    batch = make_batch([640], 1, 64, torch.float16, device)
    q = torch.randn(128, 2, 64).half().to(device)
    lists = make_lists(case, False)
    whole = run(q, batch, lists, case)
    for start, end in ((512, 550), (550, 580), (580, 640)):
        first, last = start // 64 - 8, (end - 1) // 64 - 8
        piece = run(q[start - 512 : end - 512], batch, lists[first : last + 1], (2, 1, 64, start, end, *case[5:]))
        assert torch.equal(piece, whole[start - 512 : end - 512])


@pytest.mark.parametrize("device", DEVICES)
def test_addresses_are_those_of_the_slices(device):
    """In rising order: slice 0, the list, the window up to the last query; the count stops before the tile itself."""
    batch = make_batch([590], 2, 64, torch.float16, device)
    lists = torch.tensor([[[2, 4, -1], [-1, 1, 3]]], dtype=torch.int32, device=device)
    sizes = dict(num_kv_heads=2, head_dim=64, tile_size=128, slice_size=64, window_size=128)
    addresses, counts = list_addresses(batch.page_table[0], lists, 512, 590, kv=batch.kv, **sizes)
    pages = batch.page_table[0].tolist()
    for head, slices in enumerate(([0, 2, 4, 6, 7, 8, 9], [0, 1, 3, 6, 7, 8, 9])):
        assert counts[0, head] == 5
        assert addresses[0, head, :7].tolist() == [pages[s // 2] + (head * 256 + s % 2 * 64) * 128 for s in slices]


def test_tuning_candidates_are_arguments():
    names = sparse_prefill.__kwdefaults__
    assert all(set(candidate) <= set(names) for candidate in TUNE)


@LOOPS
@pytest.mark.gpu
def test_pages_behind_the_first_4_gib(how):
    """The first offset past 2^31 numbers."""
    torch.manual_seed(6)
    case = (7, 1, 128, 700, 900, 128, 64, 256, 3)
    batch = make_batch([900], 1, 128, torch.float16, "cuda")
    far = 2**31 // batch.pool[0].numel() + 1
    pool = torch.empty(far + len(batch.pool), *batch.pool.shape[1:], dtype=torch.float16, device="cuda")
    pool[far:] = batch.pool
    table = batch.page_table + (pool[far].data_ptr() - batch.pool.data_ptr())
    q = torch.randn(200, 7, 128).half().cuda()
    lists = make_lists(case, False)
    moved = replace(batch, pool=pool, page_table=table)
    assert torch.equal(run(q, moved, lists, case, **how), run(q, batch, lists, case, **how))
