"""SchedulerCounters: what the scheduler has now and what has happened so far, for statistics and metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulerCounters:
    """The first five return to zero when all work is done; the totals only grow.

    Attributes:
        num_slots:        slots in use, also by sequences that have ended and are in flight.
        held_chunks:      one number a stage, once every plan so far has run.
        generated_tokens: sampled tokens, each once.
        computed_tokens:  tokens computed, also of prompts, also again after a preemption.
        steps:            chunks and steps of a lane whose results have come.
    """

    num_waiting: int
    num_running: int
    num_in_flight: int
    num_slots: int
    held_chunks: tuple[int, ...]
    pool_chunks: tuple[int, ...]
    added: int
    finished: int
    aborted: int
    failed: int
    refused: int
    preempted: int
    generated_tokens: int
    computed_tokens: int
    steps: int
    tokens_per_s: float
