"""What selection did in one decode step, counted on the device: one launch for all layers, nothing waits for it.

A slice counts as known when the same list of the slot's previous decode step had it. The lists of this step then take the
place of the previous ones.

Reference: kernels/selection_figures_ref.py
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qsa.kernels.checks import check_tensor
from qsa.kernels.registry import Operator, register
from qsa.kernels.selection_figures_ref import NUM_FIGURES


@triton.jit
def _selection_figures_kernel(
    chosen_ptr, previous_ptr, edges_ptr, slots_ptr, seq_lens_ptr, out_ptr,
    window_size, sink_size,
    stride_c_l, stride_c_s, stride_p_l, stride_p_s, stride_e_l, stride_e_s,
    SLICE: tl.constexpr,
    LISTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,     # TOP_K rounded up to a power of two
    BLOCK_P: tl.constexpr,     # places of the previous list compared at a time
):  # fmt: skip
    # grid: (batch, num_layers)
    row = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + row).to(tl.int32)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    window_start = tl.maximum(seq_len - window_size, 0)
    is_counted = tl.cdiv(window_start, SLICE) > TOP_K
    offs_k = tl.arange(0, BLOCK_K)
    offs_p = tl.arange(0, BLOCK_P)
    far = 0.0
    gaps = 0.0
    num_gaps = 0.0
    num_selected = 0.0
    num_known = 0.0
    if seq_len > 0:
        for place in tl.range(0, LISTS):
            base = layer * stride_p_l + slot * stride_p_s + place * TOP_K
            now = tl.full([BLOCK_K], -1, tl.int32)
            if is_counted:
                offs_c = layer * stride_c_l + slot * stride_c_s + place * TOP_K + offs_k
                now = tl.load(chosen_ptr + offs_c, mask=offs_k < TOP_K, other=-1)
                is_known = tl.zeros([BLOCK_K], tl.int32)
                for first in tl.range(0, TOP_K, BLOCK_P):
                    before = tl.load(previous_ptr + base + first + offs_p, mask=first + offs_p < TOP_K, other=-1)
                    is_known += tl.sum((now[:, None] == before[None, :]).to(tl.int32), 1)
                is_real = now >= 0
                tokens = tl.minimum(now * SLICE + SLICE, window_start) - tl.maximum(now * SLICE, sink_size)
                far += tl.sum(tl.where(is_real, tl.maximum(tokens, 0), 0), 0).to(tl.float32)
                num_selected += tl.sum(is_real.to(tl.float32), 0)
                num_known += tl.sum(tl.where(is_real, is_known, 0).to(tl.float32), 0)
                offs_e = layer * stride_e_l + slot * stride_e_s + place * 2
                kept = tl.load(edges_ptr + offs_e)
                dropped = tl.load(edges_ptr + offs_e + 1)
                if dropped > 0:
                    gaps += tl.log(kept / dropped)
                    num_gaps += 1.0
            tl.debug_barrier()  # all of the previous list has been read
            tl.store(previous_ptr + base + offs_k, now, mask=offs_k < TOP_K)
    out = out_ptr + (layer * tl.num_programs(0) + row) * 5
    tl.store(out, far / LISTS)
    tl.store(out + 1, gaps)
    tl.store(out + 2, num_gaps)
    tl.store(out + 3, num_selected)
    tl.store(out + 4, num_known)


def selection_figures(
    chosen: torch.Tensor,
    previous: torch.Tensor,
    edges: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    slice_size: int,
    sink_size: int,
    window_size: int,
) -> torch.Tensor:
    """Count what the lists of a step hold, and remember them.

    Args:
        chosen:   int32 [num_layers, max_sequences, lists, top_k], the lists, padded with -1.
        previous: int32, same shape, those of the step before; of the batch's slots replaced by `chosen`, or by nothing
                  where a sequence has no more candidates than `top_k` and so nothing was chosen.
        edges:    float32 [num_layers, max_sequences, lists, 2], shares of the last proposed and the first dropped slice.
        slots:    int32 [batch]
        seq_lens: int32 [batch], the query's token included; 0 for a row that is not used.

    Returns:
        float32 [num_layers, batch, 5]: far tokens attended (mean over lists), gaps log(kept / dropped) summed over the
        lists that have one, the number of these, slices in the lists, and how many of them the previous lists had.
    """
    num_layers, max_sequences, lists, top_k = chosen.shape
    check_tensor("chosen", chosen, (num_layers, max_sequences, lists, top_k), (torch.int32,))
    check_tensor("previous", previous, (num_layers, max_sequences, lists, top_k), (torch.int32,), chosen.device)
    check_tensor("edges", edges, (num_layers, max_sequences, lists, 2), (torch.float32,), chosen.device)
    check_tensor("slots", slots, (None,), (torch.int32,), chosen.device)
    check_tensor("seq_lens", seq_lens, (len(slots),), (torch.int32,), chosen.device)
    for name, tensor in (("chosen", chosen), ("previous", previous), ("edges", edges)):
        if tensor.stride()[2:] != (tensor.shape[3], 1):
            raise ValueError(f"the lists of {name} must be contiguous")
    out = torch.empty(num_layers, len(slots), NUM_FIGURES, dtype=torch.float32, device=chosen.device)
    block_k = max(16, triton.next_power_of_2(top_k))
    _selection_figures_kernel[(len(slots), num_layers)](
        chosen, previous, edges, slots, seq_lens, out, window_size, sink_size,
        *chosen.stride()[:2], *previous.stride()[:2], *edges.stride()[:2],
        SLICE=slice_size, LISTS=lists, TOP_K=top_k, BLOCK_K=block_k, BLOCK_P=min(block_k, max(16, 8192 // block_k)),
        num_warps=4,
    )  # fmt: skip
    return out


class SelectionFigures(Operator):
    """selection_figures on a GPU."""

    forward = staticmethod(selection_figures)


register("selection_figures", "triton", SelectionFigures)
