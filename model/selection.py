"""What selection remembers of every slot between decode steps, and the figures that it reports."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qsa.kernels.registry import SparseConfig


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
    """Per layer and slot of one sparse configuration: the proposed pool, the latest list, and its margin.

    A scan replaces a pool; between scans the lists are chosen from it. The tensors' sizes do not depend on the context.
    """

    def __init__(self, config: SparseConfig, num_layers: int, max_sequences: int, num_kv_heads: int) -> None:
        lists = num_kv_heads if config.list_per == "kv_head" else 1
        self.pool_size = config.top_k_fine * (config.candidate_factor if config.rerank == "exact" else 1)
        shape = (num_layers, max_sequences)
        self.pools = torch.full((*shape, lists, self.pool_size), -1, dtype=torch.int64)
        self.pool_rows = torch.zeros((*shape, num_kv_heads, self.pool_size), dtype=torch.int64)
        self.chosen = torch.full((*shape, lists, config.top_k_fine), -1, dtype=torch.int64)
        self.margins = torch.full((*shape, lists), torch.inf)

    def reset(self, slot: int) -> None:
        """Forget the slot's pools and lists."""
        self.pools[:, slot] = -1
        self.chosen[:, slot] = -1
        self.margins[:, slot] = torch.inf


def count_decode(
    chosen: torch.Tensor,
    before: torch.Tensor,
    margins: torch.Tensor,
    config: SparseConfig,
    slots: list[int],
    seq_lens: list[int],
) -> list[SlotSelection]:
    """Figures of one decode step of a batch.

    Args:
        chosen, before: int64 [num_layers, batch, lists, top_k], this step's lists and those of the step before.
        margins:        float32 [num_layers, batch, lists]
    """
    num_layers, batch, lists, _ = chosen.shape
    real = chosen >= 0
    known = (chosen.unsqueeze(-1) == before.unsqueeze(-2)).any(-1) & real
    window_starts = torch.tensor(seq_lens).view(1, batch, 1, 1) - config.window_size
    first = chosen * config.block_size_fine
    tokens = torch.minimum(first + config.block_size_fine, window_starts) - first.clamp(min=config.sink_size)
    far = (tokens.clamp(min=0) * real).sum((0, 2, 3)) / lists
    selected, kept = real.sum((0, 2, 3)).tolist(), known.sum((0, 2, 3)).tolist()
    finite = torch.isfinite(margins)
    gaps = (margins.masked_fill(~finite, 0.0).sum((0, 2)) / finite.sum((0, 2)).clamp(min=1)).tolist()
    near = num_layers * (config.sink_size + config.window_size)
    return [
        SlotSelection(
            slots[row], near + tokens, float(num_layers * seq_lens[row]), selected[row], selected[row] - kept[row], gaps[row]
        )
        for row, tokens in enumerate(far.tolist())
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
