"""sparse_prefill against its reference, for chunks that cut tiles and for every alignment of tile and slice."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_matches_oracle
from paged_kv import make_sequence

from qsa.kernels.paged_rows import SliceRows
from qsa.kernels.sparse_prefill import first_sparse_tile, plan_tiles, sparse_prefill, tile_window_slice
from qsa.kernels.sparse_prefill_ref import sparse_prefill_ref

CASES = [  # num_q_heads, num_kv_heads, head_dim, start, end, tile_size, slice_size, window_size
    (9, 3, 64, 1024, 1200, 64, 64, 512),  # the default model, the last tile is cut
    (7, 1, 80, 1000, 1100, 64, 64, 256),  # the first tile is cut; head_dim is not a power of two
    (2, 2, 128, 768, 1024, 128, 32, 256),  # tiles of several slices
    (3, 1, 64, 960, 1056, 32, 64, 200),  # two tiles a slice, window not a whole number of slices
    (1, 1, 64, 1000, 1001, 64, 64, 512),  # one query
]


def run(q, seq, lists, start, end, tile_size, slice_size, window_size):
    rows = SliceRows(seq.pages, slice_size)
    bases = rows.bases(torch.tensor(seq.chunks))
    first = start // tile_size * tile_size
    sizes = dict(tile_size=tile_size, slice_size=slice_size, window_size=window_size)
    plan = plan_tiles(first, start, end, sample_every=4, dtype=q.dtype, **sizes)
    heads = rows.head_offsets.view(-1, 1)
    near_rows = bases[plan.near_slices].unsqueeze(1) + heads
    is_padding = lists < 0 if bool((lists < 0).any()) else None
    list_rows = bases[lists.clamp(min=0)] + heads
    return sparse_prefill(q, rows, list_rows, near_rows, plan, q.shape[-1] ** -0.5, is_padding), plan


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("per_layer", [False, True], ids=["kv_head", "layer"])
@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "head_dim", "start", "end", "tile_size", "slice_size", "window_size"), CASES
)
def test_matches_reference(
    num_q_heads, num_kv_heads, head_dim, start, end, tile_size, slice_size, window_size, per_layer, dtype
):
    torch.manual_seed(0)
    seq = make_sequence(end, num_kv_heads, head_dim, dtype, slice_size)
    q = torch.randn(end - start, num_q_heads, head_dim).to(dtype)
    num_tiles = (end - 1) // tile_size - start // tile_size + 1
    lists = torch.stack(
        [
            torch.stack([torch.randperm(tile_window_slice(t * tile_size, window_size, slice_size) - 1)[:3].sort().values + 1])
            if per_layer
            else torch.stack(
                [
                    torch.randperm(tile_window_slice(t * tile_size, window_size, slice_size) - 1)[:3].sort().values + 1
                    for _ in range(num_kv_heads)
                ]
            )
            for t in range(start // tile_size, start // tile_size + num_tiles)
        ]
    )

    got, _ = run(q, seq, lists, start, end, tile_size, slice_size, window_size)

    sizes = dict(start=start, tile_size=tile_size, window_size=window_size, slice_size=slice_size, sm_scale=q.shape[-1] ** -0.5)
    oracle = sparse_prefill_ref(q.double(), seq.k.double(), seq.v.double(), lists, **sizes)
    assert_matches_oracle("out", got, oracle, sparse_prefill_ref(q, seq.k, seq.v, lists, **sizes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("per_layer", [False, True], ids=["kv_head", "layer"])
def test_padded_lists_match_the_reference(per_layer, dtype):
    torch.manual_seed(0)
    seq = make_sequence(1056, 2, 64, dtype)
    q = torch.randn(96, 6, 64).to(dtype)
    lists = torch.tensor([[[2, 5, -1], [3, -1, -1]], [[1, 4, 6], [-1, -1, -1]]])[:, : 1 if per_layer else 2]
    got, _ = run(q, seq, lists, 960, 1056, 64, 64, 512)
    sizes = dict(start=960, tile_size=64, window_size=512, slice_size=64, sm_scale=0.125)
    oracle = sparse_prefill_ref(q.double(), seq.k.double(), seq.v.double(), lists, **sizes)
    assert_matches_oracle("out", got, oracle, sparse_prefill_ref(q, seq.k, seq.v, lists, **sizes))


def test_lists_of_everything_equal_dense():
    torch.manual_seed(0)
    seq = make_sequence(1024, 2, 64, torch.float32)
    q = torch.randn(64, 4, 64)
    count = tile_window_slice(960, 512, 64)
    lists = torch.arange(1, count).expand(1, 2, -1)
    got, _ = run(q, seq, lists, 960, 1024, 64, 64, 512)
    scores = torch.einsum("thd,hsd->hts", q, seq.k.repeat_interleave(2, 0)) * 0.125
    hidden = torch.arange(1024) > (960 + torch.arange(64)).unsqueeze(1)
    dense = torch.einsum("hts,hsd->thd", scores.masked_fill(hidden, -torch.inf).softmax(-1), seq.v.repeat_interleave(2, 0))
    torch.testing.assert_close(got, dense, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("start", "end", "tile_size"), [(1000, 1100, 64), (1024, 1025, 64), (960, 1056, 32), (896, 1000, 128)])
def test_every_tile_samples_real_queries(start, end, tile_size):
    first = start // tile_size * tile_size
    plan = plan_tiles(
        first, start, end, tile_size=tile_size, window_size=256, slice_size=64, sample_every=4, dtype=torch.float32
    )
    assert (plan.weights.sum(1) >= 1).all()
    positions = plan.sampled + start
    tiles = first // tile_size + torch.arange(plan.num_tiles).unsqueeze(1)
    real = plan.weights > 0
    assert (positions[real] // tile_size == tiles.expand_as(positions)[real]).all()


def test_a_query_sees_at_least_its_window():
    for tile_size, window_size, slice_size in [(64, 512, 64), (32, 200, 64), (128, 256, 32)]:
        for tile in range(1, 40):
            start = tile_window_slice(tile * tile_size, window_size, slice_size) * slice_size
            assert start <= max(0, tile * tile_size + 1 - window_size)


def test_tiles_whose_candidates_fit_are_dense():
    first = first_sparse_tile(0, 64, 512, 64, 8)
    assert tile_window_slice(first, 512, 64) - 1 == 9
    assert tile_window_slice(first - 64, 512, 64) - 1 == 8
    assert first_sparse_tile(first + 70, 64, 512, 64, 8) == first + 64  # a tile that the chunk's start cuts
