"""What handing hidden states over takes of a stage's memory: static buffers, and what NCCL keeps. Arithmetic only."""

from __future__ import annotations

from qsa.config import EngineConfig

IN_FLIGHT = 2  # frames a lane, and chunks, that may be sent and not taken yet
LANDING = 3  # buffers a lane of a receiver: two that may be read, and one into which the next frame comes meanwhile
NCCL_GROUP_BYTES = 96 << 20  # of a group of two processes, on the safe side: channels between two cards, and its own buffers


def buffer_rows(*, is_first: bool, is_last: bool, lanes: int, max_rows: int, prefill_chunk: int) -> int:
    """Rows of hidden states in the static buffers of one stage under p2p."""
    chunks = IN_FLIGHT * prefill_chunk
    rows = 0 if is_first else chunks + LANDING * lanes * max_rows
    return rows + (0 if is_last else chunks + IN_FLIGHT * lanes * max_rows)


def link_bytes(config: EngineConfig, *, is_first: bool, is_last: bool, lanes: int, prefill_chunk: int, row_bytes: int) -> int:
    """Memory of one stage's links, on the card where it computes on one: as p2p takes it, wherever p2p may be chosen.

    Args:
        lanes, prefill_chunk: as they have been settled.
        row_bytes:            of one token's hidden state.
    """
    if config.pipeline.transport not in ("auto", "p2p"):
        return 0
    max_rows = config.limits.max_sequences
    rows = buffer_rows(is_first=is_first, is_last=is_last, lanes=lanes, max_rows=max_rows, prefill_chunk=prefill_chunk)
    groups = (lanes + 1) * ((not is_first) + (not is_last)) if config.pipeline.device == "cuda" else 0
    return rows * row_bytes + groups * NCCL_GROUP_BYTES
