"""PoolStats: what a chunk pool holds now. Apart from the pool, so that a process without torch can read it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PoolStats:
    """What a pool holds now. `largest_free_run`: neighbouring free chunks, at most `num_free`."""

    num_chunks: int
    num_free: int
    largest_free_run: int
    num_sequences: int = 0
