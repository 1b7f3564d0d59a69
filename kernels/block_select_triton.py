"""Choose slices by their scores on a GPU: softmax over slices a head, sum over the heads of a list, top-k in rising order.

One program a list holds all its slices in registers. Nothing is sorted: the bits of positive floats order like the floats,
so the smallest share to keep is found by halving a range of bits and counting, and the search ends as soon as the count is
right. It starts from a bound that is mostly near: of as many groups of slices as are wanted, each group's largest share is
kept or beaten. Of equal shares the first slices win.

Reference: kernels/block_select_ref.py
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qsa.kernels.checks import check_tensor
from qsa.kernels.registry import Operator, register

TUNE_DECODE = [dict(num_warps=warps, block_r=rows) for warps, rows in ((16, 8), (8, 8), (16, 4), (32, 8), (8, 4), (32, 4))]
TUNE_TILES = [
    dict(num_warps=warps, block_r=rows, num_stages=stages)
    for warps, rows, stages in ((8, 2, 2), (16, 2, 2), (8, 1, 3), (16, 4, 2), (8, 2, 1), (16, 2, 1), (16, 4, 1))
]
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
MIN_SLICES = 1024  # held at least, so that few sizes are compiled
MAX_SLICES = 1 << 14  # that registers hold


@triton.jit
def _add_shares(
    share, is_candidate, is_read, scores_ptr, weights_ptr, first_head, stride_s, stride_h,
    NUM_SAMPLES: tl.constexpr, NUM_HEADS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    SLICES_PER_BLOCK: tl.constexpr, POOL: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Add every head's softmax over the candidates, times its row's weight, to `share`.

    With SLICES_PER_BLOCK > 1 the softmax is over blocks: share [BLOCK_N / SLICES_PER_BLOCK].
    is_read: candidates and their neighbours, whole vectors of columns.
    """
    NUM_BLOCKS: tl.constexpr = BLOCK_N // SLICES_PER_BLOCK
    offs_n = tl.arange(0, BLOCK_N)
    for first in tl.range(0, NUM_SAMPLES * NUM_HEADS, BLOCK_R, num_stages=NUM_STAGES):
        offs_r = first + tl.arange(0, BLOCK_R)
        mask_r = offs_r < NUM_SAMPLES * NUM_HEADS
        rows_ptr = scores_ptr + (offs_r // NUM_HEADS).to(tl.int64) * stride_s + (first_head + offs_r % NUM_HEADS) * stride_h
        mask = mask_r[:, None] & is_read[None, :]
        scores = tl.load(rows_ptr[:, None] + offs_n[None, :], mask=mask, other=float("-inf"))  # [BLOCK_R, BLOCK_N]
        scores = tl.where(is_candidate[None, :], scores, float("-inf"))
        if SLICES_PER_BLOCK > 1:
            grouped = tl.reshape(scores, [BLOCK_R, NUM_BLOCKS, SLICES_PER_BLOCK])
            if POOL == "mean":
                known = grouped > float("-inf")
                count = tl.sum(known.to(tl.float32), 2)
                scores = tl.sum(tl.where(known, grouped, 0.0), 2) / tl.maximum(count, 1.0)
                scores = tl.where(count > 0, scores, float("-inf"))
            else:
                scores = tl.max(grouped, 2)
                if POOL == "lse":
                    top = tl.maximum(scores, -3.0e38)
                    scores = top + tl.log(tl.sum(tl.exp(grouped - top[:, :, None]), 2))
        top = tl.maximum(tl.max(scores, 1), -1.0e38)  # finite where there is nothing to choose from
        parts = tl.exp2((scores - top[:, None]) * LOG2_E)
        total = tl.sum(parts, 1)
        factor = 1.0 / tl.where(total > 0, total, 1.0)
        if NUM_SAMPLES > 1:
            weight = tl.load(weights_ptr + offs_r // NUM_HEADS, mask=mask_r, other=0.0)
            factor *= weight
            parts = tl.where((weight != 0)[:, None], parts, 0.0)
        share += tl.sum(parts * factor[:, None], 0)
    return share


@triton.jit
def _running_sum(x, BLOCK_N: tl.constexpr):
    """tl.cumsum of int32 [BLOCK_N], by threads, warps and the whole in turn: several times fewer steps."""
    if BLOCK_N < 512:
        return tl.cumsum(x, 0)
    even, odd = tl.split(tl.reshape(x, [BLOCK_N // 4, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    x1 += x0
    x2 += x1
    x3 += x2
    rows = tl.reshape(x3, [BLOCK_N // 128, 32])
    totals = tl.sum(rows, 1)
    before = tl.cumsum(totals, 0) - totals
    before = tl.reshape(tl.cumsum(rows, 1) - rows + before[:, None], [BLOCK_N // 4])
    both = tl.join(tl.join(before + x0, before + x2), tl.join(before + x1, before + x3))
    return tl.reshape(both, [BLOCK_N])


@triton.jit
def _take(share, is_candidate, num_selected, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr):
    """Which candidates have the num_selected largest shares.

    GROUPS: num_selected rounded up to a power of two.

    Returns:
        taken, the place of each that is taken in a list (from 1), how many they are, and the shares as ordered integers,
        -1 for no candidate.
    """
    bits = tl.where(is_candidate, share.to(tl.int32, bitcast=True), -1)
    num_candidates = tl.sum(is_candidate.to(tl.int32), 0)
    low = tl.full([], 0, tl.int32)  # at least num_selected shares are as large as `low`: low_count
    low_count = num_candidates
    high = tl.max(bits, 0) + 1  # fewer are as large as `high`: high_count
    high_count = tl.full([], 0, tl.int32)
    if 2 * GROUPS <= BLOCK_N:  # noqa: SIM102 (decided while compiling)
        if low_count > num_selected:
            low = tl.maximum(tl.min(tl.max(tl.reshape(bits, [BLOCK_N // GROUPS, GROUPS]), 0), 0), 0)
            low_count = tl.sum((bits >= low).to(tl.int32), 0)
    while (low_count > num_selected) & (high - low > 1):
        middle = low + (high - low) // 2
        count = tl.sum((bits >= middle).to(tl.int32), 0)
        is_low = count >= num_selected
        low = tl.where(is_low, middle, low)
        low_count = tl.where(is_low, count, low_count)
        high = tl.where(is_low, high, middle)
        high_count = tl.where(is_low, high_count, count)
    is_exact = low_count <= num_selected
    above = bits >= tl.where(is_exact, low, high)
    room = tl.where(is_exact, 0, num_selected - high_count)  # for shares that equal `low`
    equal = (bits == low) & (room > 0)
    both = above.to(tl.int32) + (equal.to(tl.int32) << 16)  # two counts in one: BLOCK_N is at most 2^14
    counts = _running_sum(both, BLOCK_N)
    num_equal = counts >> 16
    places = (counts & 0xFFFF) + tl.minimum(num_equal, room)
    return above | (equal & (num_equal <= room)), places, tl.minimum(num_candidates, num_selected), bits


@triton.jit
def _select(
    scores_ptr, weights_ptr, list_ptr, first_head, first_slice, end_slice, num_columns, num_selected, stride_s, stride_h,
    NUM_SAMPLES: tl.constexpr, NUM_HEADS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr, TOP_K_COARSE: tl.constexpr, COARSE_GROUPS: tl.constexpr, SLICES_PER_BLOCK: tl.constexpr,
    POOL: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Write the list of the best slices of [first_slice, end_slice); returns the shares' bits, and which were taken."""
    NUM_BLOCKS: tl.constexpr = BLOCK_N // SLICES_PER_BLOCK
    offs_n = tl.arange(0, BLOCK_N)
    is_candidate = (offs_n >= first_slice) & (offs_n < end_slice)
    is_read = (offs_n < num_columns) & (offs_n < tl.cdiv(end_slice, 16) * 16)
    if TOP_K_COARSE > 0:
        blocks = tl.arange(0, NUM_BLOCKS) * SLICES_PER_BLOCK
        is_block = (blocks + SLICES_PER_BLOCK > first_slice) & (blocks < end_slice)
        share = _add_shares(
            tl.zeros([NUM_BLOCKS], tl.float32), is_candidate, is_read, scores_ptr, weights_ptr, first_head, stride_s, stride_h,
            NUM_SAMPLES, NUM_HEADS, BLOCK_R, BLOCK_N, SLICES_PER_BLOCK, POOL, NUM_STAGES,
        )  # fmt: skip
        taken, _, _, _ = _take(share, is_block, TOP_K_COARSE, NUM_BLOCKS, COARSE_GROUPS)
        inside = tl.broadcast_to(taken.to(tl.int32)[:, None], [NUM_BLOCKS, SLICES_PER_BLOCK])
        is_candidate &= tl.reshape(inside, [BLOCK_N]) > 0
    share = _add_shares(
        tl.zeros([BLOCK_N], tl.float32), is_candidate, is_read, scores_ptr, weights_ptr, first_head, stride_s, stride_h,
        NUM_SAMPLES, NUM_HEADS, BLOCK_R, BLOCK_N, 1, POOL, NUM_STAGES,
    )  # fmt: skip
    taken, places, num_taken, bits = _take(share, is_candidate, num_selected, BLOCK_N, GROUPS)
    tl.store(list_ptr + places - 1, offs_n, mask=taken != 0)
    offs_k = tl.arange(0, GROUPS)
    padding = tl.full([GROUPS], -1, tl.int32)
    tl.store(list_ptr + offs_k, padding, mask=(offs_k >= num_taken) & (offs_k < num_selected))
    return bits, taken


@triton.jit
def _select_decode_kernel(
    scores_ptr, seq_lens_ptr, due_ptr, slots_ptr, pools_ptr, edges_ptr,
    num_columns, window_size, stride_b, stride_h, stride_p_s, stride_p_l, stride_e_s, stride_e_l,
    SLICE: tl.constexpr,       # tokens of a slice
    NUM_SELECTED: tl.constexpr,
    NUM_HEADS: tl.constexpr,   # query heads that share a list
    BLOCK_R: tl.constexpr,     # heads held at once
    BLOCK_N: tl.constexpr,     # slices, rounded up to a power of two
    GROUPS: tl.constexpr,      # NUM_SELECTED rounded up to a power of two
    TOP_K_COARSE: tl.constexpr,  # blocks kept by a first selection, 0: none
    COARSE_GROUPS: tl.constexpr,  # TOP_K_COARSE rounded up to a power of two
    SLICES_PER_BLOCK: tl.constexpr,
    POOL: tl.constexpr,        # how slices' scores become a block's
):  # fmt: skip
    # grid: (lists, batch)
    place = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + batch).to(tl.int32)
    due = tl.load(due_ptr + batch)
    slot = tl.load(slots_ptr + batch).to(tl.int64)
    if (due != 0) & (seq_len > 0):
        num_slices = tl.cdiv(tl.maximum(seq_len - window_size, 0), SLICE)
        list_ptr = pools_ptr + slot * stride_p_s + place * stride_p_l
        bits, taken = _select(
            scores_ptr + batch * stride_b, scores_ptr, list_ptr, place * NUM_HEADS, 0, num_slices, num_columns,
            NUM_SELECTED, 0, stride_h,
            1, NUM_HEADS, BLOCK_R, BLOCK_N, GROUPS, TOP_K_COARSE, COARSE_GROUPS, SLICES_PER_BLOCK, POOL, 1,
        )  # fmt: skip
        both = tl.join(tl.where(taken, 0x7FFFFFFF - bits, 0), tl.where(taken, -1, bits))
        kept, dropped = tl.split(tl.max(both, 0))
        edges = edges_ptr + slot * stride_e_s + place * stride_e_l
        tl.store(edges, tl.where(dropped >= 0, 0x7FFFFFFF - kept, 0).to(tl.float32, bitcast=True))
        tl.store(edges + 1, tl.maximum(dropped, 0).to(tl.float32, bitcast=True))


@triton.jit
def _select_tiles_kernel(
    scores_ptr, weights_ptr, window_slices_ptr, out_ptr,
    num_columns, stride_t, stride_s, stride_h,
    NUM_SELECTED: tl.constexpr,
    NUM_SAMPLES: tl.constexpr,  # queries of a tile that are asked
    NUM_HEADS: tl.constexpr,   # query heads that share a list
    BLOCK_R: tl.constexpr,     # rows held at once
    BLOCK_N: tl.constexpr,     # slices, rounded up to a power of two
    GROUPS: tl.constexpr,      # NUM_SELECTED rounded up to a power of two
    TOP_K_COARSE: tl.constexpr,  # blocks kept by a first selection, 0: none
    COARSE_GROUPS: tl.constexpr,  # TOP_K_COARSE rounded up to a power of two
    SLICES_PER_BLOCK: tl.constexpr,
    POOL: tl.constexpr,        # how slices' scores become a block's
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    # grid: (lists, num_tiles)
    place = tl.program_id(0)
    tile = tl.program_id(1).to(tl.int64)
    end_slice = tl.load(window_slices_ptr + tile)
    list_ptr = out_ptr + (tile * tl.num_programs(0) + place) * NUM_SELECTED
    _select(
        scores_ptr + tile * stride_t, weights_ptr + tile * NUM_SAMPLES, list_ptr, place * NUM_HEADS, 1, end_slice,
        num_columns, NUM_SELECTED, stride_s, stride_h,
        NUM_SAMPLES, NUM_HEADS, BLOCK_R, BLOCK_N, GROUPS, TOP_K_COARSE, COARSE_GROUPS, SLICES_PER_BLOCK, POOL, NUM_STAGES,
    )  # fmt: skip


def _sizes(
    scores: torch.Tensor, num_kv_heads: int, per_layer: bool, num_selected: int, top_k_coarse: int, slices_per_block: int,
    block_pool: str, block_r: int,
) -> tuple[int, int, dict[str, object]]:  # fmt: skip
    """Lists, columns of scores that can be read, and the constants of both kernels; refuses what they cannot do."""
    num_q_heads, num_slices = scores.shape[-2:]
    if scores.dtype != torch.float32:
        raise ValueError(f"scores must be float32, got {scores.dtype}: half-precision scores choose wrongly")
    if scores.stride(-1) != 1:
        raise ValueError("scores must be contiguous in the last axis")
    if num_q_heads % num_kv_heads:
        raise ValueError(f"num_q_heads ({num_q_heads}) must be a multiple of num_kv_heads ({num_kv_heads})")
    if num_slices > MAX_SLICES:
        raise ValueError(f"at most {MAX_SLICES} slices can be chosen from, got {num_slices}: use a larger block_size_fine")
    if slices_per_block & (slices_per_block - 1) or not 1 <= slices_per_block <= MIN_SLICES:
        raise ValueError(f"a block must be a power of two of at most {MIN_SLICES} slices, got {slices_per_block}")
    if block_pool not in ("max", "lse", "mean"):
        raise ValueError(f"block_pool must be max, lse or mean, got {block_pool!r}")
    lists = 1 if per_layer else num_kv_heads
    block_n = max(MIN_SLICES, triton.next_power_of_2(num_slices))
    heads = num_q_heads // lists
    longer = max(1, block_n // 4096)
    rows = min(triton.next_power_of_2(heads), max(1, block_r // longer**2))
    is_padded = all(stride % 16 == 0 for stride in scores.stride()[:-1])  # behind a row is room up to the next 16
    return lists, triton.cdiv(num_slices, 16) * 16 if is_padded else num_slices, dict(
        NUM_SELECTED=num_selected, NUM_HEADS=heads, BLOCK_R=rows, BLOCK_N=block_n, GROUPS=triton.next_power_of_2(num_selected),
        TOP_K_COARSE=top_k_coarse, COARSE_GROUPS=triton.next_power_of_2(max(1, top_k_coarse)),
        SLICES_PER_BLOCK=slices_per_block, POOL=block_pool,
    )  # fmt: skip


def select_decode(
    scores: torch.Tensor,
    seq_lens: torch.Tensor,
    due: torch.Tensor,
    slots: torch.Tensor,
    pools: torch.Tensor,
    edges: torch.Tensor,
    *,
    num_kv_heads: int,
    slice_size: int,
    window_size: int,
    per_layer: bool = False,
    top_k_coarse: int = 0,
    slices_per_block: int = 1,
    block_pool: str = "max",
    num_warps: int = 8,
    block_r: int = 8,
) -> None:
    """Choose among the slices that begin before the window, and replace what the slots of the rows due remember.

    Args:
        scores:     float32 [batch, num_q_heads, max_slices], in nats; columns that are no candidates are not read.
        seq_lens:   int32 or int64 [batch], the query's token included; a row of 0 writes nothing.
        due:        int32 [batch], 0 for a row that keeps what it has.
        slots:      int32 [batch]
        pools:      int32 [max_sequences, lists, pool_size], written: rising, padded with -1. lists is num_kv_heads or 1.
        edges:      float32 [max_sequences, lists, 2], written: shares of the last kept and the first dropped slice; 0 if
                    all were kept.
        per_layer:  one list for all KV heads instead of one each.
        top_k_coarse, slices_per_block: when not 0, first keep that many blocks, then choose inside them.
        block_pool: a block's score is the largest of its slices' ("max"), their log-sum-exp ("lse") or mean ("mean").
        block_r:    heads held at once.
    """
    batch = len(scores)
    lists, num_columns, sizes = _sizes(
        scores, num_kv_heads, per_layer, pools.shape[-1], top_k_coarse, slices_per_block, block_pool, block_r
    )
    check_tensor("seq_lens", seq_lens, (batch,), (torch.int32, torch.int64), scores.device)
    check_tensor("due", due, (batch,), (torch.int32,), scores.device)
    check_tensor("slots", slots, (batch,), (torch.int32, torch.int64), scores.device)
    check_tensor("pools", pools, (None, lists, None), (torch.int32,), scores.device)
    check_tensor("edges", edges, (len(pools), lists, 2), (torch.float32,), scores.device)
    if pools.stride(2) != 1 or edges.stride(2) != 1:
        raise ValueError("pools and edges must be contiguous in the last axis")
    _select_decode_kernel[(lists, batch)](
        scores, seq_lens, due, slots, pools, edges, num_columns, window_size, *scores.stride()[:2], *pools.stride()[:2],
        *edges.stride()[:2], SLICE=slice_size, num_warps=num_warps, **sizes,
    )  # fmt: skip


def select_tiles(
    scores: torch.Tensor,
    weights: torch.Tensor,
    window_slices: torch.Tensor,
    num_selected: int,
    *,
    num_kv_heads: int,
    per_layer: bool = False,
    top_k_coarse: int = 0,
    slices_per_block: int = 1,
    block_pool: str = "max",
    num_warps: int = 8,
    block_r: int = 2,
    num_stages: int = 2,
) -> torch.Tensor:
    """Choose the slices that the queries of each prefill tile attend to, beside slice 0 and the window.

    Args:
        scores:        float32 [num_tiles, samples, num_q_heads, num_slices], in nats
        weights:       float32 [num_tiles, samples], how much a sampled query counts; 0: not at all.
        window_slices: int32 [num_tiles], first slice of each tile's window; candidates are slices 1 .. that - 1.
        others:        as in select_decode

    Returns:
        int32 [num_tiles, lists, num_selected], rising, padded with -1.
    """
    num_tiles, samples = scores.shape[:2]
    lists, num_columns, sizes = _sizes(
        scores, num_kv_heads, per_layer, num_selected, top_k_coarse, slices_per_block, block_pool, block_r
    )
    check_tensor("weights", weights, (num_tiles, samples), (torch.float32,), scores.device)
    check_tensor("window_slices", window_slices, (num_tiles,), (torch.int32,), scores.device)
    if not (weights.is_contiguous() and window_slices.is_contiguous()):
        raise ValueError("weights and window_slices must be contiguous")
    out = torch.empty(num_tiles, lists, num_selected, dtype=torch.int32, device=scores.device)
    _select_tiles_kernel[(lists, num_tiles)](
        scores, weights, window_slices, out, num_columns, *scores.stride()[:3],
        NUM_SAMPLES=samples, NUM_STAGES=num_stages, num_warps=num_warps, **sizes,
    )  # fmt: skip
    return out


class BlockSelect(Operator):
    """Both selections on a GPU, `propose` slices or blocks."""

    forward = staticmethod(select_decode)
    forward_prefill = staticmethod(select_tiles)


register("block_select", "triton", BlockSelect)
