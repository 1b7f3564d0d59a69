"""Reference of selection_figures: one layer and row at a time, with Python's sets."""

from __future__ import annotations

import math

import torch

NUM_FIGURES = 5  # of a layer and row


def selection_figures_ref(
    chosen: torch.Tensor,
    previous: torch.Tensor,
    edges: torch.Tensor,
    slots: list[int],
    seq_lens: list[int],
    *,
    slice_size: int,
    sink_size: int,
    window_size: int,
) -> torch.Tensor:
    """Figures [num_layers, batch, 5] of one step, and `previous` as it is for the next one. See selection_figures."""
    num_layers, _, lists, top_k = chosen.shape
    out = torch.zeros(num_layers, len(slots), NUM_FIGURES, dtype=torch.float64)
    for layer in range(num_layers):
        for row, (slot, seq_len) in enumerate(zip(slots, seq_lens)):
            window_start = max(0, seq_len - window_size)
            if seq_len and -(-window_start // slice_size) <= top_k:
                previous[layer, slot] = -1
            elif seq_len:
                for place in range(lists):
                    now = {index for index in chosen[layer, slot, place].tolist() if index >= 0}
                    tokens = [
                        max(0, min((index + 1) * slice_size, window_start) - max(index * slice_size, sink_size))
                        for index in now
                    ]
                    kept, dropped = edges[layer, slot, place].tolist()
                    gap = math.log(kept / dropped) if dropped > 0 else 0.0
                    known = now & set(previous[layer, slot, place].tolist())
                    out[layer, row] += torch.tensor([sum(tokens) / lists, gap, dropped > 0, len(now), len(known)])
                previous[layer, slot] = chosen[layer, slot]
    return out
