"""Choose slices by their scores on a GPU: softmax over slices a head, sum over the heads of a list, top-k in rising order.

One program a list holds all its slices in registers. The k-th largest share is found bit by bit (the bits of positive
floats order like the floats), so nothing is sorted; of equal shares the first slices win.

Reference: kernels/block_select_ref.py
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qsa.kernels.checks import check_tensor
from qsa.kernels.registry import Operator, register

WIDE = 4096  # slices of which all heads of a group are held at once; beyond, one head at a time


@triton.jit
def _block_select_kernel(
    scores_ptr, seq_lens_ptr, indices_ptr, edge_ptr,
    window_size, stride_b, stride_h,
    SLICE: tl.constexpr,       # tokens of a slice
    NUM_SELECTED: tl.constexpr,
    GROUP: tl.constexpr,       # query heads of a KV head
    NUM_GROUPS: tl.constexpr,  # KV heads that share a list
    ROWS: tl.constexpr,        # heads held at once
    BLOCK_N: tl.constexpr,     # slices, rounded up to a power of two
    BLOCK_K: tl.constexpr,     # NUM_SELECTED rounded up to a power of two
):  # fmt: skip
    # grid: (lists, batch)
    place = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + batch).to(tl.int32)
    num_slices = tl.cdiv(tl.maximum(seq_len - window_size, 0), SLICE)
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = offs_n < num_slices
    share = tl.zeros([BLOCK_N], tl.float32)
    first_head = place * NUM_GROUPS * GROUP
    for first in tl.range(first_head, first_head + NUM_GROUPS * GROUP, ROWS):
        heads = first + tl.arange(0, ROWS)
        mask = (heads < first_head + NUM_GROUPS * GROUP)[:, None] & mask_n[None, :]
        offs = batch * stride_b + heads[:, None] * stride_h + offs_n[None, :]
        scores = tl.load(scores_ptr + offs, mask=mask, other=float("-inf"))  # [ROWS, BLOCK_N]
        top = tl.maximum(tl.max(scores, 1), -3.0e38)  # finite for a row of no head
        weights = tl.where(mask, tl.exp(scores - top[:, None]), 0.0)
        total = tl.sum(weights, 1)
        share += tl.sum(weights / tl.where(total > 0, total, 1.0)[:, None], 0)

    bits = tl.where(mask_n, share.to(tl.int32, bitcast=True), -1)
    edge = tl.full([], 0, tl.int32)  # becomes the bits of the NUM_SELECTED-th largest share
    for bit in tl.range(0, 31):
        trial = edge | (1 << (30 - bit))
        count = tl.sum((bits >= trial).to(tl.int32), 0)
        edge = tl.where(count >= NUM_SELECTED, trial, edge)
    above = bits > edge
    equal = bits == edge
    missing = NUM_SELECTED - tl.sum(above.to(tl.int32), 0)
    taken = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= missing))
    rank = tl.cumsum(taken.to(tl.int32), 0)
    num_taken = tl.sum(taken.to(tl.int32), 0)
    row = batch * tl.num_programs(0) + place
    tl.store(indices_ptr + row * NUM_SELECTED + rank - 1, offs_n, mask=taken)
    offs_k = tl.arange(0, BLOCK_K)
    padding = tl.full([BLOCK_K], -1, tl.int32)
    tl.store(indices_ptr + row * NUM_SELECTED + offs_k, padding, mask=(offs_k >= num_taken) & (offs_k < NUM_SELECTED))
    dropped = tl.max(tl.where(taken, -1, bits), 0)
    tl.store(edge_ptr + row * 2, tl.where(dropped >= 0, edge, 0).to(tl.float32, bitcast=True))
    tl.store(edge_ptr + row * 2 + 1, tl.maximum(dropped, 0).to(tl.float32, bitcast=True))


def block_select(
    slice_scores: torch.Tensor,
    seq_lens: torch.Tensor,
    num_selected: int,
    *,
    num_kv_heads: int,
    slice_size: int,
    window_size: int,
    per_layer: bool = False,
    num_warps: int = 16,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select among the slices that begin before the window.

    Args:
        slice_scores: float32 [batch, num_q_heads, max_slices], in nats; columns that are no candidates are not read.
        seq_lens:     int32 or int64 [batch], the query's token included.
        num_selected: slices to select.
        per_layer:    one list for all KV heads instead of one each.

    Returns:
        slice_indices int32 [batch, num_kv_heads or 1, num_selected], rising, padded with -1.
        edge float32 [batch, num_kv_heads or 1, 2], shares of the last kept and the first dropped slice; 0 if all were kept.
    """
    batch, num_q_heads, max_slices = slice_scores.shape
    if slice_scores.dtype != torch.float32:
        raise ValueError(f"slice_scores must be float32, got {slice_scores.dtype}: half-precision scores choose wrongly")
    check_tensor("seq_lens", seq_lens, (batch,), (torch.int32, torch.int64), slice_scores.device)
    if num_q_heads % num_kv_heads:
        raise ValueError(f"num_q_heads ({num_q_heads}) must be a multiple of num_kv_heads ({num_kv_heads})")
    if slice_scores.stride(2) != 1:
        raise ValueError("slice_scores must be contiguous in its last axis")
    lists = 1 if per_layer else num_kv_heads
    group = num_q_heads // num_kv_heads
    block_n = max(16, triton.next_power_of_2(max_slices))
    indices = torch.empty(batch, lists, num_selected, dtype=torch.int32, device=slice_scores.device)
    edge = torch.empty(batch, lists, 2, dtype=torch.float32, device=slice_scores.device)
    _block_select_kernel[(lists, batch)](
        slice_scores, seq_lens, indices, edge, window_size, *slice_scores.stride()[:2],
        SLICE=slice_size, NUM_SELECTED=num_selected, GROUP=group, NUM_GROUPS=num_kv_heads // lists,
        ROWS=triton.next_power_of_2(group) if block_n <= WIDE else 1, BLOCK_N=block_n,
        BLOCK_K=triton.next_power_of_2(num_selected), num_warps=num_warps if block_n >= 2048 else 4,
    )  # fmt: skip
    return indices, edge


class BlockSelect(Operator):
    """block_select of decode queries on a GPU, `propose="slices"`."""

    forward = staticmethod(block_select)


register("block_select", "triton", BlockSelect)
