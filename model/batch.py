"""Which tokens of which sequences a stage computes together: the model's view of a step plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """Tokens [start, end) of the sequence in `slot`, computed in one step under the sparse configuration `sparse_id`."""

    slot: int
    start: int
    end: int
    sparse_id: int
    is_prefill: bool

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise ValueError(f"a segment needs 0 <= start < end, got [{self.start}, {self.end})")
        if not self.is_prefill and self.extend_len != 1:
            raise ValueError(f"a decode segment has one token, got {self.extend_len}")

    @property
    def extend_len(self) -> int:
        """Tokens computed in this step."""
        return self.end - self.start


def split_groups(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Cut a step into groups that run together: all decode segments, then each prefill segment by itself.

    A prefill segment's shapes then depend on its own sequence alone, so its results do not change with its company.
    """
    decode = [segment for segment in segments if not segment.is_prefill]
    prefill = [[segment] for segment in segments if segment.is_prefill]
    return ([decode] if decode else []) + prefill
