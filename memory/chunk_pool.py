"""One buffer cut in chunks of 1 MiB: take, give back, reference counts, and the figures that show fragmentation.

Any n free chunks serve any request for n, so the pool cannot fragment inside; the largest free run is reported all the
same, because a second pool beside it can fragment and because operators ask for it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from qsa.errors import BudgetError, OutOfChunksError
from qsa.memory.layout import CHUNK_BYTES
from qsa.memory.pool_stats import PoolStats

ALIGNMENT = 4096  # bytes; a chunk starts on a memory page, and so on every cache line and DMA boundary


class ChunkPool:
    """Chunks of one device. The state: which chunks are free, and how many owners each of the others has.

    The buffer is allocated but not written, so on a CPU a chunk takes memory only once it has been used.
    """

    def __init__(self, num_chunks: int, device: torch.device) -> None:
        """Allocate the buffer.

        Raises:
            ValueError:  num_chunks is not positive.
            BudgetError: the device does not have that much memory.
        """
        if num_chunks < 1:
            raise ValueError(f"num_chunks must be at least 1, got {num_chunks}")
        self.num_chunks = num_chunks
        size = num_chunks * CHUNK_BYTES
        try:
            memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device=device)
        except (RuntimeError, MemoryError):  # torch.OutOfMemoryError is a RuntimeError
            raise BudgetError(
                f"cannot allocate {num_chunks} MiB of KV chunks on {device}; lower cache.device_bytes or limits.max_sequences"
            ) from None
        skip = -memory.data_ptr() % ALIGNMENT
        self.buffer = memory[skip : skip + size].view(num_chunks, CHUNK_BYTES)
        self._base = self.buffer.data_ptr()
        self._ref_counts = [0] * num_chunks
        self._free = list(range(num_chunks - 1, -1, -1))  # a stack: chunks used last are warm and come first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def largest_free_run(self) -> int:
        """Length of the longest run of neighbouring free chunks. Walks the whole pool."""
        longest = run = 0
        for count in self._ref_counts:
            run = 0 if count else run + 1
            longest = max(longest, run)
        return longest

    def allocate(self, count: int) -> list[int]:
        """Take `count` chunks, all or none, each with one owner.

        Returns:
            Chunk numbers, not necessarily contiguous. Their bytes are uninitialised.

        Raises:
            OutOfChunksError: fewer than `count` chunks are free; the pool is unchanged.
        """
        if count < 0:
            raise ValueError(f"count must not be negative, got {count}")
        if count > len(self._free):
            raise OutOfChunksError(
                f"asked for {count} chunks, {len(self._free)} of {self.num_chunks} are free;"
                " raise cache.device_bytes or lower limits.max_sequences"
            )
        chunks = [self._free.pop() for _ in range(count)]
        for chunk in chunks:
            self._ref_counts[chunk] = 1
        return chunks

    def retain(self, chunks: Iterable[int]) -> None:
        """Add an owner to each chunk; a chunk that nobody owns cannot be retained."""
        for chunk in chunks:
            assert self._ref_counts[chunk] > 0, f"chunk {chunk} is free and cannot be retained"
            self._ref_counts[chunk] += 1

    def free(self, chunks: Iterable[int]) -> None:
        """Take an owner from each chunk; the ones without an owner are free again, the first given is taken first."""
        for chunk in reversed(list(chunks)):
            assert self._ref_counts[chunk] > 0, f"chunk {chunk} is freed twice"
            self._ref_counts[chunk] -= 1
            if self._ref_counts[chunk] == 0:
                self._free.append(chunk)

    def ref_count(self, chunk: int) -> int:
        """Owners of a chunk; 0 when it is free."""
        return self._ref_counts[chunk]

    def address(self, chunk: int) -> int:
        """Address of the chunk's first byte, a multiple of 4096."""
        assert 0 <= chunk < self.num_chunks, f"no chunk {chunk} in a pool of {self.num_chunks}"
        return self._base + chunk * CHUNK_BYTES

    def stats(self, num_sequences: int = 0) -> PoolStats:
        return PoolStats(self.num_chunks, self.num_free, self.largest_free_run, num_sequences)

    def close(self) -> None:
        """Give the buffer back; views on it keep it alive. Calling it again does nothing."""
        self.buffer = self.buffer[:0].clone()
        self._free = []
        self._ref_counts = []
