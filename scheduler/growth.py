"""How many chunks a sequence takes now and will take next: exact page arithmetic, and the predicted sparse growth.

The prediction is the rule `hit rate x block size x bytes`: of the tokens that a list selects, the share that selection
will newly hit in the next step is kept free for it. A sequence never takes more than its pages at its final length.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qsa.kernels.registry import SparseConfig
from qsa.memory.layout import CHUNK_BYTES, KVLayout, SummaryLayout, cdiv
from qsa.scheduler.plan import SelectionStats

PRIOR_HIT_RATE = 0.25  # neighbouring steps share 0.76 to 0.82 of their slices


@dataclass(frozen=True)
class StageCapacity:
    """What one stage can hold. `summaries`: the summary layout of every sparse configuration, by id."""

    num_layers: int
    num_chunks: int
    kv: KVLayout
    summaries: Mapping[int, SummaryLayout]


class ChunkMeter:
    """Chunks that a sequence takes on every stage; the same arithmetic as the stages' own, with its constants kept."""

    def __init__(self, stages: Sequence[StageCapacity], sparse: Mapping[int, SparseConfig] | None = None) -> None:
        if not stages:
            raise ValueError("at least one stage is needed, got none")
        ids = [set(stage.summaries) for stage in stages]
        if any(known != ids[0] for known in ids):
            raise ValueError(f"every stage must know the same sparse ids, got {[sorted(known) for known in ids]}")
        self.pools = tuple(stage.num_chunks for stage in stages)
        self._nothing = (0,) * len(stages)
        self._grids = {
            sparse_id: tuple((s.num_layers, s.kv.page_size, _tokens_per_chunk(s.summaries[sparse_id])) for s in stages)
            for sparse_id in ids[0]
        }
        self._grid = {  # chunks are added only where a multiple of this many tokens is passed
            sparse_id: math.gcd(*(tokens for _, page, summary in grids for tokens in (page, summary or page)))
            for sparse_id, grids in self._grids.items()
        }
        self._listed_bytes = {  # bytes of K and V that the lists of a stage's layers select, all heads
            sparse_id: tuple(_listed_tokens(sparse, sparse_id) * s.kv.token_bytes * s.num_layers for s in stages)
            for sparse_id in ids[0]
        }

    @property
    def sparse_ids(self) -> tuple[int, ...]:
        return tuple(sorted(self._grids))

    def chunks(self, sparse_id: int, seq_len: int) -> tuple[int, ...]:
        """Chunks of a sequence with room for `seq_len` tokens, one number a stage."""
        return tuple(
            layers * (cdiv(seq_len, page) + (cdiv(seq_len, summary) if summary else 0))
            for layers, page, summary in self._grids[sparse_id]
        )

    def growth(self, sparse_id: int, held: Sequence[int], planned_len: int, end: int) -> tuple[int, ...]:
        """Chunks that a sequence with `held` for `planned_len` tokens lacks for `end` tokens."""
        grid = self._grid[sparse_id]
        if (planned_len - 1) // grid == (end - 1) // grid:
            return self._nothing
        return tuple(need - have for need, have in zip(self.chunks(sparse_id, end), held, strict=True))

    def predicted(self, sparse_id: int, seq_len: int, final_len: int, hit_rate: float) -> tuple[int, ...]:
        """Chunks to keep for a sequence until it has `seq_len` tokens: its pages, and what selection will newly hit.

        While all pages stay on the device the sum is bounded by the pages of its final length.
        """
        bound = self.chunks(sparse_id, final_len)
        grown = self.chunks(sparse_id, min(seq_len, final_len))
        newly_hit = (math.ceil(hit_rate * listed / CHUNK_BYTES) for listed in self._listed_bytes[sparse_id])
        return tuple(min(most, now + extra) for most, now, extra in zip(bound, grown, newly_hit, strict=True))


class HitRate:
    """An upper quantile of the share of selected slices that were new, over the last steps of one sequence."""

    QUANTILE = 0.9
    STEPS = 32

    def __init__(self, prior: float = PRIOR_HIT_RATE) -> None:
        self._prior = prior
        self._recent: deque[float] = deque(maxlen=self.STEPS)

    def add(self, rate: float) -> None:
        self._recent.append(min(1.0, max(0.0, rate)))

    @property
    def value(self) -> float:
        """The prior until the first report."""
        if not self._recent:
            return self._prior
        ordered = sorted(self._recent)
        return ordered[min(len(ordered) - 1, int(self.QUANTILE * len(ordered)))]


def merge_selection(selection: Sequence[SelectionStats]) -> dict[str, SelectionStats]:
    """One entry a sequence: what its stages report is added up."""
    merged: dict[str, SelectionStats] = {}
    for new in selection:
        old = merged.get(new.request_id)
        merged[new.request_id] = (
            new
            if old is None
            else SelectionStats(
                new.request_id,
                old.attended + new.attended,
                old.context + new.context,
                old.num_selected + new.num_selected,
                old.newly_hit + new.newly_hit,
                (old.margin + new.margin) / 2,
            )
        )
    return merged


def _tokens_per_chunk(summary: SummaryLayout) -> int:
    return summary.slice_size * summary.slices_per_chunk if summary.slice_bytes else 0


def _listed_tokens(sparse: Mapping[int, SparseConfig] | None, sparse_id: int) -> int:
    config = sparse.get(sparse_id) if sparse else None
    return 0 if config is None or config.dense else config.top_k_fine * config.block_size_fine
