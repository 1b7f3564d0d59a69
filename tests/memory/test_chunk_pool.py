"""The chunk pool: all or none, reference counts, alignment, and any n free chunks serving any request for n."""

from __future__ import annotations

import random

import pytest
import torch

from qsa.errors import OutOfChunksError
from qsa.memory.chunk_pool import ChunkPool
from qsa.memory.layout import CHUNK_BYTES

CPU = torch.device("cpu")


def test_chunks_are_distinct_aligned_and_come_back():
    pool = ChunkPool(5, CPU)
    first = pool.allocate(3)
    assert len(set(first)) == 3 and pool.num_free == 2
    for chunk in first:
        assert pool.address(chunk) % 4096 == 0
        assert pool.address(chunk) == pool.buffer[chunk].data_ptr()
    assert pool.address(1) - pool.address(0) == CHUNK_BYTES
    pool.free(first)
    assert pool.num_free == 5 and pool.allocate(3) == first  # warm chunks first, in the same order


def test_allocation_is_all_or_none_with_numbers():
    pool = ChunkPool(3, CPU)
    pool.allocate(2)
    with pytest.raises(OutOfChunksError, match=r"asked for 2 chunks, 1 of 3 are free; raise cache\.device_bytes"):
        pool.allocate(2)
    assert pool.num_free == 1
    assert pool.allocate(0) == []


def test_shared_chunks_are_free_after_their_last_owner():
    pool = ChunkPool(2, CPU)
    chunks = pool.allocate(1)
    pool.retain(chunks)
    pool.free(chunks)
    assert pool.num_free == 1 and pool.ref_count(chunks[0]) == 1
    pool.free(chunks)
    assert pool.num_free == 2
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(chunks)
    with pytest.raises(AssertionError, match="cannot be retained"):
        pool.retain(chunks)


def test_figures_show_fragmentation():
    pool = ChunkPool(6, CPU)
    chunks = sorted(pool.allocate(6))
    pool.free([chunks[0], chunks[2], chunks[3]])
    stats = pool.stats()
    assert (stats.num_chunks, stats.num_free, stats.largest_free_run) == (6, 3, 2)


def test_any_free_chunks_serve_any_request():
    """500 requests of random size: whatever is free can be had, however scattered it lies."""
    random.seed(0)
    pool = ChunkPool(40, CPU)
    held: list[list[int]] = []
    for _ in range(500):
        while held and random.random() < 0.5:
            pool.free(held.pop(random.randrange(len(held))))
        if pool.num_free:
            held.append(pool.allocate(random.randint(1, pool.num_free)))
        owned = [chunk for chunks in held for chunk in chunks]
        assert len(owned) == len(set(owned)) == pool.num_chunks - pool.num_free
    for chunks in held:
        pool.free(chunks)
    assert pool.stats().largest_free_run == pool.num_free == 40


def test_fresh_memory_is_not_touched():
    """A pool takes memory as it is used: 1 GiB allocated, resident memory hardly moves."""
    torch.utils.deterministic.fill_uninitialized_memory = False

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident()
    pool = ChunkPool(1024, CPU)
    pool.buffer[512].fill_(1)
    assert resident() - before < 64 << 20
    pool.close()
    pool.close()


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="num_chunks must be at least 1"):
        ChunkPool(0, CPU)
    with pytest.raises(ValueError, match="must not be negative"):
        ChunkPool(1, CPU).allocate(-1)
