"""What selection remembers on a device between decode steps, which layers scan when, and figures that come back unawaited."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from qsa.kernels.registry import SparseConfig
from qsa.model.attention_plan import num_candidates
from qsa.model.decode_graph import STEPS_IN_FLIGHT, DecodeRows, HostFigures
from qsa.model.selection import SlotSelection, add_selections


class DeviceSelection:
    """Per layer and slot of one sparse configuration: the proposed pool and the latest list, in tensors of fixed size.

    Attributes:
        pools:    int32 [num_layers, max_sequences, lists, max_pool_size], rising, padded with -1; see `pool`.
        edges:    float32 [num_layers, max_sequences, lists, 2], shares of the last proposed and the first dropped slice.
        chosen:   int32 [num_layers, max_sequences, lists, top_k_fine]; the same tensor as `pools` without a rerank.
        previous: like chosen, those of the step before.
    """

    def __init__(
        self, config: SparseConfig, num_layers: int, max_sequences: int, num_kv_heads: int, device: torch.device
    ) -> None:
        shape = (num_layers, max_sequences, num_kv_heads if config.list_per == "kv_head" else 1)
        self.pools = torch.full((*shape, config.max_pool_size), -1, dtype=torch.int32, device=device)
        self.edges = torch.zeros(*shape, 2, device=device)
        self.previous = torch.full((*shape, config.top_k_fine), -1, dtype=torch.int32, device=device)
        self.chosen = self.pools if config.rerank == "none" else self.previous.clone()

    def pool(self, local: int, size: int) -> torch.Tensor:
        """Pools [max_sequences, lists, size] of a layer that proposes `size` slices; where that is a list's size, its lists."""
        lists = self.chosen if size == self.chosen.shape[-1] else self.pools
        return lists[local, :, :, :size]

    def reset(self, slot: int) -> None:
        """Forget the slot's pools and lists."""
        for lists in (self.pools, self.chosen, self.previous):
            lists[:, slot] = -1
        self.edges[:, slot] = 0.0


class ScanClock:
    """Which layers scan in a decode step. The state: decode steps of every slot from its first scan on."""

    def __init__(self, config: SparseConfig, first_layer: int, num_layers: int) -> None:
        self._config = config
        self._intervals = np.array([[config.scan_interval(first_layer + layer)] for layer in range(num_layers)])
        self._scanned: dict[int, int] = {}

    @property
    def is_rare(self) -> np.ndarray:
        """bool [num_layers], layers that scan less often than others."""
        return (self._intervals > self._intervals.min())[:, 0]

    def forget(self, slot: int) -> None:
        """The slot's next decode step counts as its first."""
        self._scanned.pop(slot, None)

    def tick(self, slots: Sequence[int], seq_lens: Sequence[int]) -> np.ndarray:
        """One step of some slots: int32 [num_layers, len(slots)], 1 where a layer scans.

        While all candidates fit the pool every layer scans at every step, which makes the pool hold all of them, and the
        clock stands still.
        """
        fits = [num_candidates(self._config, seq_len) <= self._config.max_pool_size for seq_len in seq_lens]
        steps = [self._scanned.get(slot, 0) for slot in slots]
        for slot, step, every in zip(slots, steps, fits):
            self._scanned[slot] = step if every else step + 1
        return (np.array(fits) | (np.array(steps) % self._intervals == 0)).astype(np.int32)

    def tick_back(self, slots: Sequence[int], seq_lens: Sequence[int]) -> None:
        """Take the last `tick` of these slots back."""
        for slot, seq_len in zip(slots, seq_lens):
            if num_candidates(self._config, seq_len) > self._config.max_pool_size:
                self._scanned[slot] -= 1


class SelectionFigures:
    """What selection did for every slot since it was last asked. The state: sums, and figures on their way from the device."""

    def __init__(self) -> None:
        self._sums: dict[int, SlotSelection] = {}
        self._awaited: list[tuple[SparseConfig, DecodeRows, HostFigures, set[int]]] = []  # with slots to leave out

    def add(self, figures: SlotSelection) -> None:
        known = self._sums.get(figures.slot)
        self._sums[figures.slot] = figures if known is None else add_selections(known, figures)

    def add_later(self, config: SparseConfig, rows: DecodeRows, figures: HostFigures) -> None:
        """Count a decode step once its figures are there and somebody asks; their memory is used again STEPS_IN_FLIGHT steps
        later. Others may be counted here only where that is near: whoever calls this has a card waiting."""
        self._awaited.append((config, rows, figures, set()))
        while len(self._awaited) >= STEPS_IN_FLIGHT:
            self._count_oldest()

    def forget(self, slot: int) -> None:
        """Drop what is known of a slot, also what is still on its way."""
        for _, _, _, left_out in self._awaited:
            left_out.add(slot)
        self._sums.pop(slot, None)

    def take(self) -> list[SlotSelection]:
        """The sums since the last call, one entry a slot that was computed. A step that is not done yet counts next time."""
        while self._awaited and self._awaited[0][2].is_ready:
            self._count_oldest()
        sums, self._sums = list(self._sums.values()), {}
        return sums

    def _count_oldest(self) -> None:
        """Count the step that was added first, waiting for its figures."""
        config, rows, figures, left_out = self._awaited.pop(0)
        for one in slot_figures(figures.wait(), config, rows):
            if one.slot not in left_out:
                self.add(one)


def slot_figures(figures: torch.Tensor, config: SparseConfig, rows: DecodeRows) -> list[SlotSelection]:
    """Figures of one decode step from those of its layers, float32 [num_layers, batch, 5] of selection_figures."""
    num_layers = len(figures)
    near = config.sink_size + config.window_size
    sums = figures.sum(0, dtype=torch.float64).tolist()
    found = []
    for slot, seq_len, (far, gaps, num_gaps, selected, known) in zip(rows.slots, rows.seq_lens, sums):
        context = float(num_layers * seq_len)
        if num_candidates(config, seq_len) <= config.top_k_fine:
            found.append(SlotSelection(slot, context, context))
        else:
            margin = gaps / max(num_gaps, 1.0)
            found.append(SlotSelection(slot, num_layers * near + far, context, int(selected), int(selected - known), margin))
    return found
