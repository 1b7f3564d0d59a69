"""block_select on Triton: softmax over slices, sum over the heads of a list, own top-k, against the reference in float64."""

from __future__ import annotations

import pytest
import torch
from paged_batch import DEVICES

pytest.importorskip("triton")
from qsa.kernels.block_select_ref import block_select_ref, select_tiles_ref
from qsa.kernels.block_select_triton import MAX_SLICES, MIN_SLICES, select_decode, select_tiles
from qsa.kernels.summaries.base import group_blocks
from qsa.kernels.summaries.scan_triton import empty_scores

SLICE, WINDOW = 64, 512
POOLS = {"max": torch.amax, "lse": torch.logsumexp, "mean": torch.mean}
SHAPES = [  # num_q_heads, num_kv_heads, per_layer, pool_size, slices of every row
    (1, 1, False, 1, [1]),  # smallest
    (14, 2, False, 16, [100, 16, 0, 5]),  # group of 7; exactly as many candidates, none, and fewer than wanted
    (28, 4, True, 24, [70]),  # one list for all heads, more heads than are held at once
    (16, 2, False, 3, [MIN_SLICES - 3, 20]),  # group of 8; a row's end is the matrix's
]


def seq_lens_of(slices: list[int], device: str) -> torch.Tensor:
    """Lengths with that many slices before the window, the last one cut by it; 0 slices: the window holds everything."""
    return torch.tensor([count * SLICE - 5 + WINDOW if count else 9 for count in slices], dtype=torch.int32, device=device)


def scores_of(slices: list[int], num_q_heads: int, max_slices: int) -> torch.Tensor:
    """Random scores; NaN in the columns that are no candidates."""
    scores = torch.full((len(slices), num_q_heads, max_slices), float("nan"))
    for row, count in enumerate(slices):
        scores[row, :, :count] = 3 * torch.randn(num_q_heads, count)
    return scores


def select(scores, seq_lens, pool_size, *, num_kv_heads, device, due=None, slots=None, per_layer=False, **options):
    """Pools and edges of `max_sequences` = batch + 2 slots after select_decode; what was in them before was 77."""
    batch = len(scores)
    lists = 1 if per_layer else num_kv_heads
    pools = torch.full((batch + 2, lists, pool_size), 77, dtype=torch.int32, device=device)
    edges = torch.full((batch + 2, lists, 2), 77.0, device=device)
    flags = torch.tensor(due or [1] * batch, dtype=torch.int32, device=device)
    places = torch.tensor(slots or list(range(batch)), dtype=torch.int32, device=device)
    sizes = dict(num_kv_heads=num_kv_heads, slice_size=SLICE, window_size=WINDOW, per_layer=per_layer, **options)
    select_decode(scores.to(device), seq_lens.to(device), flags, places, pools, edges, **sizes)
    return pools.cpu(), edges.cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "per_layer", "pool_size", "slices"), SHAPES)
def test_decode(num_q_heads, num_kv_heads, per_layer, pool_size, slices, device):
    torch.manual_seed(0)
    scores = scores_of(slices, num_q_heads, max(slices) + 3)
    sizes = dict(num_kv_heads=num_kv_heads, per_layer=per_layer, device=device)
    pools, edges = select(scores, seq_lens_of(slices, device), pool_size, **sizes)
    for row, count in enumerate(slices):
        if count == 0:
            assert (pools[row] == -1).all() and (edges[row] == 0).all()
            continue
        grouped = scores[row, :, :count].double().view(1, num_kv_heads, -1, count)
        assert torch.equal(pools[row].long(), block_select_ref(grouped, pool_size, per_layer=per_layer)[0])
        share = torch.softmax(grouped[0], -1).sum((0, 1) if per_layer else 1).view(-1, count)
        best = share.sort(-1, descending=True).values
        want = best[:, pool_size - 1 : pool_size + 1] if count > pool_size else torch.zeros(len(best), 2).double()
        torch.testing.assert_close(edges[row].double(), want, rtol=1e-5, atol=0)
        alone, _ = select(scores[row : row + 1], seq_lens_of([count], device), pool_size, **sizes)
        assert torch.equal(alone[0], pools[row])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("group", range(1, 9))
def test_every_group_size(group, device):
    torch.manual_seed(group)
    scores = scores_of([90], 2 * group, 96)
    pools, _ = select(scores, seq_lens_of([90], device), 20, num_kv_heads=2, device=device)
    want = block_select_ref(scores[:, :, :90].double().view(1, 2, group, 90), 20)
    assert torch.equal(pools[0].long(), want[0])


@pytest.mark.parametrize("device", DEVICES)
def test_only_slots_of_rows_that_are_due_are_written(device):
    torch.manual_seed(0)
    scores = scores_of([40, 40, 40, 40], 4, 40)
    seq_lens = seq_lens_of([40, 40, 40, 40], device)
    seq_lens[2] = 0  # an unused row
    pools, edges = select(scores, seq_lens, 8, num_kv_heads=2, device=device, due=[1, 0, 1, 1], slots=[5, 4, 1, 2])
    for slot, row in ((5, 0), (2, 3)):
        want = block_select_ref(scores[row].double().view(1, 2, 2, 40), 8)
        assert torch.equal(pools[slot].long(), want[0]) and (edges[slot] < 77).all()
    assert (pools[[0, 1, 3, 4]] == 77).all() and (edges[[0, 1, 3, 4]] == 77).all()


@pytest.mark.parametrize("device", DEVICES)
def test_sink_and_window_are_never_listed(device):
    """Both are attended anyway: window slices are no candidates, and a sink that fills slice 0 leaves it without a score."""
    torch.manual_seed(0)
    scores = torch.randn(1, 2, 64)
    scores[:, :, 0] = -torch.inf  # what a scan says when the sink holds all of slice 0
    scores[:, :, 30:] = 100.0  # the window's
    pools, _ = select(scores, seq_lens_of([30], device), 29, num_kv_heads=1, device=device)
    assert pools[0].flatten().tolist() == list(range(1, 30))


@pytest.mark.parametrize("device", DEVICES)
def test_nearly_tied_scores_that_half_precision_confuses(device):
    """Scores that differ by less than a step of float16: in float16 the wrong slices are chosen, here the right ones."""
    torch.manual_seed(0)
    scores = 20 + 0.004 * torch.rand(1, 3, 200)  # float16 has steps of 0.0156 there
    better = torch.randperm(200)[:20].sort().values
    scores[:, :, better] += 0.004
    pools, _ = select(scores, seq_lens_of([200], device), 20, num_kv_heads=1, device=device)
    assert pools[0].flatten().tolist() == better.tolist()
    in_half = block_select_ref(scores.half().double().view(1, 1, 3, 200), 20)
    assert len(set(in_half.flatten().tolist()) & set(better.tolist())) < 10
    with pytest.raises(ValueError, match="half-precision"):
        select(scores.half(), seq_lens_of([200], device), 20, num_kv_heads=1, device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_equal_scores_and_a_head_without_mass(device):
    scores = torch.zeros(1, 2, 50)
    scores[0, 1] = -1e30  # all equal again
    scores[0, :, 7] = 5 * scores[0, :, 7] - 1e6
    pools, edges = select(scores, seq_lens_of([50], device), 20, num_kv_heads=1, device=device)
    assert pools[0].flatten().tolist() == [i for i in range(21) if i != 7]
    assert edges[0, 0, 0] == edges[0, 0, 1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["normal", "flat", "steep", "ties", "falling"])
@pytest.mark.parametrize("count", [4088, 2100, 5001])  # 256K tokens; half of the places held; more than one block of rows
def test_long_contexts(kind, count, device):
    torch.manual_seed(1)
    scores = torch.randn(1, 3, count)
    if kind == "flat":
        scores *= 0.01
    elif kind == "steep":
        scores *= 12
    elif kind == "ties":
        scores = scores[:, :1].round().expand(1, 3, count).contiguous()
    elif kind == "falling":
        scores -= torch.linspace(0, 60, count)
    for pool_size in (16, 220, 256):
        pools, _ = select(scores, seq_lens_of([count], device), pool_size, num_kv_heads=1, device=device)
        share = torch.softmax(scores[0].double(), -1).sum(0)
        order = share.argsort(descending=True, stable=True)[:pool_size]
        assert pools[0].flatten().tolist() == order.sort().values.tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block_pool", list(POOLS))
@pytest.mark.parametrize("per_layer", [False, True])
def test_blocks_of_decode(block_pool, per_layer, device):
    torch.manual_seed(0)
    num_kv_heads, per_block, top_blocks, slices = 2, 4, 5, [78, 18, 21]  # 20, 5 (no choice) and 6 blocks, the last ones cut
    scores = scores_of(slices, 6, 80)
    options = dict(top_k_coarse=top_blocks, slices_per_block=per_block, block_pool=block_pool)
    sizes = dict(num_kv_heads=num_kv_heads, per_layer=per_layer, device=device)
    pools, _ = select(scores, seq_lens_of(slices, device), 12, **sizes, **options)
    for row, count in enumerate(slices):
        grouped = scores[row, :, :count].double().view(1, num_kv_heads, 3, count)
        blocks = group_blocks(grouped, per_block)
        filled = blocks.masked_fill(blocks == -torch.inf, torch.nan).nanmean(-1) if block_pool == "mean" else None
        pooled = POOLS[block_pool](blocks, -1) if filled is None else filled
        want = block_select_ref(
            grouped, 12, per_layer=per_layer, block_scores=pooled, top_k_coarse=top_blocks, slices_per_block=per_block
        )
        assert torch.equal(pools[row].long(), want[0])


def blocks_ref(scores, weights, end, num_selected, num_kv_heads, per_layer, **options):
    """block_select_ref for one tile: queries that count, slices 1 .. end - 1, other slices at -inf."""
    wanted = scores[weights > 0, :, :end]
    grouped = wanted.view(len(wanted), num_kv_heads, -1, end).transpose(0, 1).flatten(1, 2).unsqueeze(0).clone()
    grouped[..., 0] = -torch.inf
    allowed = torch.ones(1, 1, end, dtype=torch.bool)
    allowed[..., 0] = False
    pooled = group_blocks(grouped, options["slices_per_block"]).amax(-1)
    rest = dict(per_layer=per_layer, candidates=allowed, block_scores=pooled, **options)
    return block_select_ref(grouped, num_selected, **rest)[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, dict(top_k_coarse=4, slices_per_block=4)], ids=["slices", "blocks"])
@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "per_layer", "samples"), [(14, 2, False, 2), (3, 3, False, 16), (8, 2, True, 1)]
)
def test_tiles(num_q_heads, num_kv_heads, per_layer, samples, options, device):
    torch.manual_seed(0)
    window_slices = torch.tensor([50, 14, 41, 9], dtype=torch.int32)  # 13 candidates: all of them; 8: padded
    num_tiles, num_selected = len(window_slices), 13
    scores = empty_scores(num_tiles * samples, num_q_heads, 50, torch.device(device)).view(num_tiles, samples, num_q_heads, 50)
    scores.copy_(3 * torch.randn(scores.shape))
    for tile, count in enumerate(window_slices.tolist()):
        scores[tile, :, :, count:] = torch.nan
    weights = torch.ones(num_tiles, samples)
    weights[2, 1:] = 0
    sizes = dict(num_kv_heads=num_kv_heads, per_layer=per_layer, **options)
    got = select_tiles(scores, weights.to(device), window_slices.to(device), num_selected, **sizes).cpu()
    assert got.shape == (num_tiles, 1 if per_layer else num_kv_heads, num_selected) and got.dtype == torch.int32
    wide = scores.cpu().double()
    if options:
        ends = window_slices.tolist()
        parts = [(wide[tile], weights[tile], ends[tile], num_selected, num_kv_heads, per_layer) for tile in range(num_tiles)]
        want = torch.stack([blocks_ref(*part, **options) for part in parts])
    else:
        want = select_tiles_ref(wide, weights, window_slices, num_selected, num_kv_heads=num_kv_heads, per_layer=per_layer)
    assert torch.equal(got.long(), want)
    assert (got[0] > 0).all() and (got[3] == -1).sum() == 5 * got.shape[1] and not (got == 0).any()


@pytest.mark.parametrize("device", DEVICES)
def test_long_tiles(device):
    """Shares are normalised query by query before they are weighted and added."""
    torch.manual_seed(0)
    scores = 4 * torch.randn(2, 2, 7, 4000)
    weights = torch.tensor([[1.0, 1.0], [0.5, 2.0]])
    window_slices = torch.tensor([4000, 1500], dtype=torch.int32)
    got = select_tiles(scores.to(device), weights.to(device), window_slices.to(device), 128, num_kv_heads=1).cpu()
    assert torch.equal(got.long(), select_tiles_ref(scores.double(), weights, window_slices, 128, num_kv_heads=1))


def test_refused():
    scores = torch.zeros(1, 2, MAX_SLICES + 1)
    with pytest.raises(ValueError, match="use a larger block_size_fine"):
        select(scores, torch.ones(1).int(), 4, num_kv_heads=1, device="cpu")
    with pytest.raises(ValueError, match="a block must be a power of two"):
        select(scores[..., :9], torch.ones(1).int(), 4, num_kv_heads=1, device="cpu", top_k_coarse=1, slices_per_block=3)
    with pytest.raises(ValueError, match="block_pool must be"):
        select(scores[..., :9], torch.ones(1).int(), 4, num_kv_heads=1, device="cpu", block_pool="best")
    with pytest.raises(ValueError, match="must be a multiple of num_kv_heads"):
        select(scores[..., :9], torch.ones(1).int(), 4, num_kv_heads=3, device="cpu")
