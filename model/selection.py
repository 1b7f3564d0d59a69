"""What selection remembers of every slot between decode steps, and the figures that it reports."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qsa.kernels.registry import SparseConfig
from qsa.kernels.sparse_decode import num_near_slices


@dataclass(frozen=True)
class SlotSelection:
    """What selection did for one slot since it was last asked, summed over the stage's layers.

    Attributes:
        attended:     tokens attended, summed over queries and layers (mean over heads).
        context:      tokens of context, summed over the same queries and layers.
        num_selected: slices in the lists of decode steps.
        newly_hit:    of these, slices that the slot's previous decode step had not selected.
        margin:       mean gap between the last kept and the first dropped score of the latest scans, in nats; 0 if none.
    """

    slot: int
    attended: float = 0.0
    context: float = 0.0
    num_selected: int = 0
    newly_hit: int = 0
    margin: float = 0.0


class SelectionState:
    """Per layer and slot of one sparse configuration: the proposed pool, where its slices lie, the latest list.

    A scan replaces a pool; between scans the lists are chosen from it. The tensors' sizes do not depend on the context.
    `pool_size` is that of the layer that proposes the most; the pools of others end before it.

    Attributes:
        masked:   int64 [num_layers, max_sequences, lists, num_near + pool_size], the near slices, then the pool, as rows
                  of a step's mask (mask_rows of qsa.kernels.sparse_decode).
        key_rows: int64 [num_layers, max_sequences, num_kv_heads, num_near + pool_size], rows of K of the same slices.
        chosen:   int64 [num_layers, max_sequences, lists, top_k_fine], the latest lists.
        edges:    float32 [num_layers, max_sequences, lists, 2], shares of the last proposed and the first dropped slice.
    """

    def __init__(self, config: SparseConfig, num_layers: int, max_sequences: int, num_kv_heads: int) -> None:
        lists = num_kv_heads if config.list_per == "kv_head" else 1
        self.pool_size = config.max_pool_size
        self.num_near = num_near_slices(config.window_size, config.block_size_fine)
        shape, width = (num_layers, max_sequences), self.num_near + self.pool_size
        self.masked = torch.zeros((*shape, lists, width), dtype=torch.int64)
        self.masked[..., : self.num_near] = torch.arange(self.num_near)
        self.key_rows = torch.zeros((*shape, num_kv_heads, width), dtype=torch.int64)
        self.chosen = torch.zeros((*shape, lists, config.top_k_fine), dtype=torch.int64)
        self.edges = torch.zeros((*shape, lists, 2))

    def reset(self, slot: int) -> None:
        """Forget the slot's pools and lists."""
        self.masked[:, slot, :, self.num_near :] = self.num_near
        self.chosen[:, slot] = -1
        self.edges[:, slot] = 0.0

    def pools(self, slots: torch.Tensor) -> torch.Tensor:
        """Proposed slices int64 [num_layers, len(slots), lists, pool_size], padded with -1."""
        return self.masked[:, slots, :, self.num_near :] - (self.num_near + 1)


def count_decode(
    chosen: torch.Tensor,
    before: torch.Tensor,
    edges: torch.Tensor,
    config: SparseConfig,
    slots: list[int],
    seq_lens: list[int],
) -> list[SlotSelection]:
    """Figures of one decode step of a batch.

    Args:
        chosen, before: int64 [num_layers, batch, lists, top_k], this step's lists and those of the step before.
        edges:          float32 [num_layers, batch, lists, 2]
    """
    num_layers, batch, lists, _ = chosen.shape
    real = chosen >= 0
    known = (chosen.unsqueeze(-1) == before.unsqueeze(-2)).any(-1) & real
    window_starts = torch.tensor(seq_lens).view(1, batch, 1, 1) - config.window_size
    first = chosen * config.block_size_fine
    tokens = torch.minimum(first + config.block_size_fine, window_starts) - first.clamp(min=config.sink_size)
    far = (tokens.clamp(min=0) * real).sum((0, 2, 3)) / lists
    scanned = edges[..., 1] > 0
    gaps = (edges[..., 0] / edges[..., 1]).log().masked_fill(~scanned, 0.0).sum((0, 2)) / scanned.sum((0, 2)).clamp(min=1)
    near = num_layers * (config.sink_size + config.window_size)
    counts = torch.stack((far, gaps, real.sum((0, 2, 3)), known.sum((0, 2, 3)))).t().tolist()
    return [
        SlotSelection(slot, near + far, float(num_layers * seq_len), int(selected), int(selected - kept), gap)
        for slot, seq_len, (far, gap, selected, kept) in zip(slots, seq_lens, counts)
    ]


def add_selections(first: SlotSelection, second: SlotSelection) -> SlotSelection:
    """Figures of two steps of one slot; the margin is the later one's if it has one."""
    return SlotSelection(
        first.slot,
        first.attended + second.attended,
        first.context + second.context,
        first.num_selected + second.num_selected,
        first.newly_hit + second.newly_hit,
        second.margin or first.margin,
    )
