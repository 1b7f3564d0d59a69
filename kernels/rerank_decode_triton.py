"""Attention of one query token over sink, window and the best slices of a proposed pool, chosen by exact keys, in two launches.

The first reads K of the pool and of what is near, once, and keeps for every slice and query head its log-sum-exp, and its
tokens' weights within the slice. In the second, every program makes the same choice from the log-sum-exps, which costs it
less than to wait for another launch, and adds up V of its part of what was chosen: a slice's share of the attention times
the weights kept. So K is never read twice, V only where it counts, and no score of a token is computed twice.

Reference: kernels/sparse_decode_ref.py
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from qsa.kernels.checks import check_tensor
from qsa.kernels.paged_kv import PagedKV
from qsa.kernels.registry import Operator, register
from qsa.kernels.sparse_decode import num_near_slices
from qsa.kernels.split_triton import (
    LOG2_E,
    check_decode,
    check_lists,
    entry,
    finish_split,
    head_constants,
    kv_constants,
    launch_overlap,
    load_rows,
    load_scale,
    load_table,
    locate_slices,
    product_type,
    row_pointer,
    split_workspace,
    table_block,
)

TUNE = [  # the 7B shape with 8 sequences has 32 lists: programs of either launch all fit at once
    dict(),
    dict(value_warps=4),
    dict(value_stages=4),
    dict(value_splits=8, value_warps=4, value_stages=4),
    dict(score_stages=4),
    dict(score_splits=16, score_warps=4),
    dict(score_splits=64),
]


@triton.jit
def _rerank_scores_kernel(
    q_ptr, page_table_ptr, seq_lens_ptr, slots_ptr, pools_ptr, scale_ptr, weights_ptr, lse_ptr,
    pool_size, window_size, sink_size, qk_scale, max_pages,
    stride_q_b, stride_q_h, stride_pt_b, stride_p_s, stride_p_l, stride_lse_h,
    STORED: tl.constexpr,
    TYPE: tl.constexpr,
    E4M3: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SLICE: tl.constexpr,       # tokens of a slice
    NUM_NEAR: tl.constexpr,    # the sink's slice and those that a window can touch
    NUM_GROUPS: tl.constexpr,  # KV heads that share a list
    GROUP: tl.constexpr,       # query heads per KV head
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,     # GROUP rounded up to what a product needs
    BLOCK_D: tl.constexpr,     # HEAD_DIM rounded up to a power of two
    BLOCK_P: tl.constexpr,     # places of a program, rounded up to a power of two
    BLOCK_T: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    # grid: (num_splits, num_kv_heads, batch)
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    offs_n = tl.arange(0, SLICE)
    offs_p = tl.arange(0, BLOCK_P)
    mask_m = offs_m < GROUP
    total_places = pool_size + NUM_NEAR
    first_place = total_places * split // tl.num_programs(0)
    num_places = total_places * (split + 1) // tl.num_programs(0) - first_place
    places = first_place + offs_p
    slot = tl.load(slots_ptr + batch).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + batch).to(tl.int32)
    table = load_table(page_table_ptr + batch * stride_pt_b, max_pages, BLOCK_T)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    offs_q = batch * stride_q_b + (kv_head * GROUP + offs_m)[:, None] * stride_q_h + offs_d[None, :]
    q = tl.load(q_ptr + offs_q, mask=mask_m[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0).to(TYPE)
    qk_scale *= load_scale(scale_ptr, kv_head, 0, HAS_SCALE, E4M3)
    pool_ptr = pools_ptr + slot * stride_p_s + (kv_head // NUM_GROUPS) * stride_p_l
    listed = tl.load(pool_ptr + places, mask=places < pool_size, other=-1)
    addresses, firsts, ends = locate_slices(
        places, listed, pool_size, seq_len, table, kv_head, window_size, sink_size,
        STORED, PAGE_SIZE, SLICE, HEAD_DIM, BLOCK_T,
    )  # fmt: skip
    spans = (ends << 16) | firsts
    row = batch * tl.num_programs(1) + kv_head

    for i in tl.range(0, num_places, num_stages=NUM_STAGES):
        base = row_pointer(entry(addresses, offs_p, i), STORED)
        span = entry(spans, offs_p, i)
        mask_n = (offs_n >= (span & 65535)) & (offs_n < (span >> 16))
        k = load_rows(base, offs_n, mask_n, offs_d, TYPE, E4M3, HEAD_DIM, BLOCK_D)  # [SLICE, BLOCK_D]
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * qk_scale
        logits = tl.where(mask_n[None, :], logits, float("-inf"))
        top = tl.maximum(tl.max(logits, 1), -1.0e30)
        weights = tl.exp2(logits - top[:, None])
        total = tl.sum(weights, 1)
        has_tokens = total > 0
        total = tl.where(has_tokens, total, 1.0)
        place = first_place + i
        offs_w = ((row * total_places + place) * GROUP + offs_m)[:, None] * SLICE + offs_n[None, :]
        tl.store(weights_ptr + offs_w, (weights * (1.0 / total)[:, None]).to(TYPE), mask=mask_m[:, None])
        lse = tl.where(has_tokens, top + tl.log2(total), -1.0e30)
        tl.store(lse_ptr + (row * GROUP + offs_m) * stride_lse_h + place, lse, mask=mask_m)


@triton.jit
def count_from(bits, first, second, third):
    """How many are at least `first`, `second` and `third`: three counts in one sum."""
    WIDE: tl.constexpr = bits.shape[0] > 512
    FIELD: tl.constexpr = 20 if WIDE else 10
    TYPE: tl.constexpr = tl.int64 if WIDE else tl.int32
    each = (bits >= first).to(TYPE) + ((bits >= second).to(TYPE) << FIELD) + ((bits >= third).to(TYPE) << (2 * FIELD))
    counts = tl.sum(each, 0)
    MASK: tl.constexpr = (1 << FIELD) - 1
    return (counts & MASK).to(tl.int32), (counts >> FIELD & MASK).to(tl.int32), (counts >> (2 * FIELD)).to(tl.int32)


@triton.jit
def take_largest(shares, is_candidate, count):
    """Which candidates have the `count` largest shares, or all if there are no more; of equal shares the first.

    The bits of positive floats order like the floats. The smallest share that is taken is found in them, two bits at a time,
    until a trial parts exactly `count` from the rest. It is looked for within eight powers of two below the largest share
    first, and only if what they part is too few from 0 on.
    """
    HALF_POWER: tl.constexpr = 1 << 22
    bits = tl.where(is_candidate, shares.to(tl.int32, bitcast=True), -1)
    largest = tl.max(bits, 0)
    far, near = tl.maximum(largest - 15 * HALF_POWER, 0), tl.maximum(largest - 7 * HALF_POWER, 0)
    num_candidates, num_far, num_near = count_from(bits, 0, far, near)
    count = tl.minimum(count, num_candidates)
    edge = tl.where(num_near >= count, near, tl.where(num_far >= count, far, 0))
    is_exact = (num_near == count) | ((num_near < count) & (num_far == count)) | (num_candidates == count)
    edge = tl.where(num_candidates == count, 0, edge)
    shift = tl.where(is_exact, -1, tl.where(num_far >= count, 23, 29))
    while shift >= 0:  # the edge is from `edge` on and below edge + (4 << shift)
        step = tl.full([], 1, tl.int32) << shift
        first, second, third = count_from(bits, edge + step, edge + 2 * step, edge + 3 * step)
        reached = (first >= count).to(tl.int32) + (second >= count).to(tl.int32) + (third >= count).to(tl.int32)
        edge += reached * step
        following = tl.where(shift > 0, tl.maximum(shift - 2, 0), -2)
        shift = tl.where((first == count) | (second == count) | (third == count), -1, following)
    taken = bits >= edge
    if shift == -2:  # several are equal to the smallest that is taken, and not all of them have a place
        above = bits > edge
        missing = count - tl.sum(above.to(tl.int32), 0)
        taken &= above | (tl.cumsum((bits == edge).to(tl.int32), 0) <= missing)
    return taken


@triton.jit
def _rerank_values_kernel(
    page_table_ptr, seq_lens_ptr, slots_ptr, pools_ptr, scale_ptr, weights_ptr, lse_ptr,
    chosen_ptr, parts_ptr, stats_ptr, arrivals_ptr, out_ptr,
    pool_size, top_k, window_size, sink_size, max_pages,
    stride_pt_b, stride_p_s, stride_p_l, stride_c_s, stride_c_l, stride_lse_h,
    STORED: tl.constexpr,
    TYPE: tl.constexpr,
    E4M3: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SLICE: tl.constexpr,       # tokens of a slice
    NUM_NEAR: tl.constexpr,    # the sink's slice and those that a window can touch
    NUM_GROUPS: tl.constexpr,  # KV heads that share a list
    NUM_SPLITS: tl.constexpr,
    GROUP: tl.constexpr,       # query heads per KV head
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,     # GROUP rounded up to what a product needs
    BLOCK_D: tl.constexpr,     # HEAD_DIM rounded up to a power of two
    BLOCK_S: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_L: tl.constexpr,     # pool_size + NUM_NEAR rounded up to a power of two
    BLOCK_K: tl.constexpr,     # top_k rounded up to a power of two
    BLOCK_P: tl.constexpr,     # kept slices of a split, rounded up to a power of two
    BLOCK_T: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    # grid: (num_splits, num_kv_heads, batch)
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    offs_n = tl.arange(0, SLICE)
    offs_l = tl.arange(0, BLOCK_L)
    offs_p = tl.arange(0, BLOCK_P)
    mask_m = offs_m < GROUP
    total_places = pool_size + NUM_NEAR
    slot = tl.load(slots_ptr + batch).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + batch).to(tl.int32)
    list_of_head = kv_head // NUM_GROUPS
    pool_ptr = pools_ptr + slot * stride_p_s + list_of_head * stride_p_l
    table = load_table(page_table_ptr + batch * stride_pt_b, max_pages, BLOCK_T)
    # before the first launch has ended: it lets this one begin only once the pool is there
    pool = tl.load(pool_ptr + offs_l, mask=offs_l < pool_size, other=-1)
    addresses, firsts, ends = locate_slices(
        offs_l, pool, pool_size, seq_len, table, kv_head, window_size, sink_size,
        STORED, PAGE_SIZE, SLICE, HEAD_DIM, BLOCK_T,
    )  # fmt: skip
    spans = (ends << 16) | firsts
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    # a head's say in the choice is the mass it has in the pool: one that looks at its window does not outvote the others
    shares = tl.zeros([BLOCK_L], tl.float32)
    offs_g = tl.arange(0, BLOCK_G)
    mask_g = offs_g < GROUP
    mask_l = mask_g[:, None] & (offs_l < stride_lse_h)[None, :]  # a multiple of what is loaded at once
    for group in tl.static_range(NUM_GROUPS):
        offs_h = ((batch * tl.num_programs(1) + list_of_head * NUM_GROUPS + group) * GROUP + offs_g) * stride_lse_h
        lse = tl.load(lse_ptr + offs_h[:, None] + offs_l[None, :], mask=mask_l, other=-1.0e30)  # [BLOCK_G, BLOCK_L]
        lse = tl.where((offs_l < total_places)[None, :], lse, -1.0e30)
        masses = tl.exp2(lse - tl.max(lse, 1)[:, None])
        shares += tl.sum(tl.where(mask_g[:, None], masses / tl.sum(masses, 1)[:, None], 0.0), 0)
    taken = take_largest(shares, pool >= 0, top_k)
    ranks = tl.where(taken, tl.cumsum(taken.to(tl.int32), 0), 0)  # 1, 2, ... for what is taken
    if (split == 0) & (kv_head % NUM_GROUPS == 0) & (seq_len > 0):
        list_ptr = chosen_ptr + slot * stride_c_s + list_of_head * stride_c_l
        offs_k = tl.arange(0, BLOCK_K)
        num_taken = tl.max(ranks, 0)
        tl.store(list_ptr + ranks - 1, pool, mask=taken != 0)
        tl.store(list_ptr + offs_k, tl.full([BLOCK_K], -1, tl.int32), mask=(offs_k >= num_taken) & (offs_k < top_k))

    first_kept = (NUM_NEAR + top_k) * split // NUM_SPLITS
    num_kept = (NUM_NEAR + top_k) * (split + 1) // NUM_SPLITS - first_kept
    kept = first_kept + offs_p  # numbers among what was chosen, then among what is near
    is_chosen = kept < top_k
    found = tl.max(tl.where(ranks[:, None] == kept[None, :] + 1, offs_l[:, None], -1), 0)
    places = tl.where(is_chosen, found, tl.minimum(pool_size + kept - top_k, total_places - 1))
    is_kept = places >= 0
    places = tl.maximum(places, 0)
    addresses = tl.gather(addresses, places, 0)
    spans = tl.where(is_kept, tl.gather(spans, places, 0), 0)
    row = batch * tl.num_programs(1) + kv_head
    lse_ptr += (row * GROUP + offs_m) * stride_lse_h

    # what is left of a head that was outvoted may be nothing beside its whole mass: shares are relative to what is kept
    top = tl.full([BLOCK_M], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    following = tl.load(lse_ptr + entry(places, offs_p, 0), mask=mask_m & (entry(spans, offs_p, 0) > 0), other=-1.0e30)
    for i in tl.range(0, num_kept, num_stages=NUM_STAGES):
        base = row_pointer(entry(addresses, offs_p, i), STORED) + PAGE_SIZE * HEAD_DIM
        span = entry(spans, offs_p, i)
        place = entry(places, offs_p, i)
        mask_n = (offs_n >= (span & 65535)) & (offs_n < (span >> 16))
        v = load_rows(base, offs_n, mask_n, offs_d, TYPE, E4M3, HEAD_DIM, BLOCK_D)  # [SLICE, BLOCK_D]
        offs_w = ((row * total_places + place) * GROUP + offs_m)[:, None] * SLICE + offs_n[None, :]
        weights = tl.load(weights_ptr + offs_w, mask=mask_m[:, None], other=0.0)  # [BLOCK_M, SLICE]
        own = following
        following = tl.load(
            lse_ptr + entry(places, offs_p, i + 1), mask=mask_m & (entry(spans, offs_p, i + 1) > 0), other=-1.0e30
        )
        new_top = tl.maximum(top, own)
        factor, share = tl.exp2(top - new_top), tl.where(own > -1.0e30, tl.exp2(own - new_top), 0.0)
        total = total * factor + share
        acc = acc * factor[:, None] + share[:, None] * tl.dot(weights, v, input_precision=PRECISION)
        top = new_top

    finish_split(
        acc, top, total, load_scale(scale_ptr, kv_head, 1, HAS_SCALE, E4M3), row, split,
        parts_ptr, stats_ptr, arrivals_ptr, out_ptr,
        NUM_SPLITS, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D, BLOCK_S, BLOCK_G, BLOCK_C,
    )  # fmt: skip


def rerank_decode(
    q: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    slots: torch.Tensor,
    pools: torch.Tensor,
    chosen: torch.Tensor,
    *,
    top_k: int,
    kv: PagedKV,
    num_kv_heads: int,
    slice_size: int,
    sink_size: int,
    window_size: int,
    sm_scale: float,
    score_splits: int = 32,
    score_warps: int = 2,
    score_stages: int = 3,
    value_splits: int = 16,
    value_warps: int = 2,
    value_stages: int = 3,
    overlaps: bool | None = None,
) -> torch.Tensor:
    """Choose `top_k` slices of each pool and attend to sink, window and these; no token twice.

    Args:
        q:          [batch, num_q_heads, head_dim]
        page_table: int64 [batch, max_pages], address of each page `[num_kv_heads][K|V][page_size][head_dim]` of this layer;
                    entries of pages that are not attended are not read through.
        seq_lens:   int32 or int64 [batch], the query's token included; 0 for a row that attends to nothing.
        slots:      int32 or int64 [batch], which pool and list are a row's.
        pools:      int32 [slots, num_kv_heads or 1, pool_size], rising, padded with -1.
        chosen:     int32 [slots, num_kv_heads or 1, top_k], written for rows that attend: rising, padded with -1.
        overlaps:   start each launch before the one before it has ended; None: on cards that can, from Hopper on. What the
                    launch before writes may be q, K, V and pools, but not page_table, seq_lens or slots.

    Returns:
        [batch, num_q_heads, head_dim]; zeros for a row that attends to nothing.
    """
    batch, num_q_heads, head_dim = check_decode(q, page_table, seq_lens, kv, num_kv_heads)
    check_lists(slots, pools, kv, num_kv_heads, slice_size, sink_size, batch)
    check_tensor("chosen", chosen, (None, pools.shape[1], top_k), (torch.int32,), q.device)
    if top_k < 1 or chosen.stride(2) != 1:
        raise ValueError(f"top_k must be at least 1 and chosen contiguous in its last axis, got {top_k}")
    pool_size, num_near = pools.shape[2], num_near_slices(window_size, slice_size)
    num_places, num_kept = pool_size + num_near, top_k + num_near
    score_splits, value_splits = min(score_splits, num_places), min(value_splits, num_kept)
    heads = head_constants(num_q_heads, num_kv_heads, head_dim, value_splits, value_warps)
    group, rows, device = heads["GROUP"], batch * num_kv_heads, q.device
    weights = torch.empty(rows, num_places, group, slice_size, dtype=product_type(kv), device=device)
    lse = torch.empty(rows, group, triton.cdiv(num_places, 16) * 16, dtype=torch.float32, device=device)
    parts, stats, arrivals = split_workspace(rows, value_splits, group, head_dim, device)
    out = torch.empty(batch, num_q_heads, head_dim, dtype=q.dtype, device=device)
    scale = q if kv.scale is None else kv.scale
    shared: dict[str, Any] = dict(
        SLICE=slice_size, NUM_NEAR=num_near, NUM_GROUPS=num_kv_heads // pools.shape[1], BLOCK_T=table_block(page_table),
        **kv_constants(kv, device), **launch_overlap(overlaps, device),
    )  # fmt: skip
    _rerank_scores_kernel[(score_splits, num_kv_heads, batch)](
        q, page_table, seq_lens, slots, pools, scale, weights, lse,
        pool_size, window_size, sink_size, sm_scale * LOG2_E, page_table.shape[1],
        q.stride(0), q.stride(1), page_table.stride(0), *pools.stride()[:2], lse.stride(1),
        GROUP=group, HEAD_DIM=head_dim, BLOCK_M=heads["BLOCK_M"], BLOCK_D=heads["BLOCK_D"],
        BLOCK_P=triton.next_power_of_2(triton.cdiv(num_places, score_splits)),
        NUM_STAGES=score_stages, num_warps=score_warps, **shared,
    )  # fmt: skip
    _rerank_values_kernel[(value_splits, num_kv_heads, batch)](
        page_table, seq_lens, slots, pools, scale, weights, lse, chosen, parts, stats, arrivals, out,
        pool_size, top_k, window_size, sink_size, page_table.shape[1],
        page_table.stride(0), *pools.stride()[:2], *chosen.stride()[:2], lse.stride(1),
        BLOCK_L=triton.next_power_of_2(num_places), BLOCK_K=triton.next_power_of_2(top_k),
        BLOCK_P=triton.next_power_of_2(triton.cdiv(num_kept, value_splits)),
        NUM_STAGES=value_stages, num_warps=value_warps,
        **shared, **heads,
    )  # fmt: skip
    return out


class RerankDecode(Operator):
    """rerank_decode on a GPU."""

    def init(self, **sizes: Any) -> None:
        """Nothing is kept between calls: what the launches hand on comes from torch's allocator."""

    forward = staticmethod(rerank_decode)


register("rerank_decode", "triton", RerankDecode)
