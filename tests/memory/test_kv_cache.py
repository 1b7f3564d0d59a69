"""KVCache: pages and summary chunks appear when tokens need them, tables agree with the page table, all comes back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qsa.errors import OutOfChunksError
from qsa.memory.kv_cache import KVCache
from qsa.memory.layout import CHUNK_BYTES, KVLayout, SummaryLayout, sequence_chunks

CPU = torch.device("cpu")
KV = KVLayout(num_kv_heads=2, head_dim=256, element_bytes=4)  # page_size 256
NO_SUMMARY = SummaryLayout(slice_size=64, slice_bytes=0)
WIDE = SummaryLayout(slice_size=64, slice_bytes=300_000)  # 2 slices a chunk, so 128 tokens


def make_cache(num_chunks: int = 12, num_layers: int = 2, max_sequences: int = 3, max_seq_len: int = 1000) -> KVCache:
    return KVCache(
        KV, torch.float32, num_layers=num_layers, num_chunks=num_chunks, max_sequences=max_sequences,
        max_seq_len=max_seq_len, device=CPU,
    )  # fmt: skip


def test_pages_view_matches_the_chunk_layout():
    cache = make_cache()
    assert cache.pages.shape == (12, 2, 2, 256, 256)
    assert cache.pages.stride(0) * 4 == CHUNK_BYTES
    assert cache.pages[3].data_ptr() == cache.pool.address(3)
    cache.pages[3, 1, 0, 5, 7] = 42.0
    offset = (((1 * 2 + 0) * 256 + 5) * 256 + 7) * 4  # [num_kv_heads][K|V][page_size][head_dim]
    assert cache.pool.buffer[3, offset : offset + 4].view(torch.float32).item() == 42.0


def test_page_smaller_than_its_chunk_keeps_the_stride():
    kv = KVLayout(num_kv_heads=3, head_dim=64, element_bytes=2)  # 768 bytes a token: 1024 tokens in 768 KiB
    cache = KVCache(kv, torch.bfloat16, num_layers=1, num_chunks=2, max_sequences=1, max_seq_len=2048, device=CPU)
    assert cache.pages.shape == (2, 3, 2, 1024, 64)
    assert cache.pages[1].data_ptr() - cache.pages[0].data_ptr() == CHUNK_BYTES


def test_extend_takes_pages_and_summaries_at_their_boundaries():
    cache = make_cache(num_chunks=40)
    cache.open(1, WIDE)
    assert cache.held(1) == 0
    for seq_len, pages, summaries in ((1, 1, 1), (128, 1, 1), (129, 1, 2), (256, 1, 2), (257, 2, 3)):
        cache.extend(1, seq_len)
        assert cache.held(1) == 2 * (pages + summaries) == sequence_chunks(KV, WIDE, 2, seq_len)
        assert cache.seq_len(1) == seq_len
        for layer in range(2):
            assert (cache.page_chunks[layer, 1] >= 0).sum() == pages
            assert (cache.summary_chunks[layer, 1] >= 0).sum() == summaries
    cache.extend(1, 100)  # room is never taken away
    assert cache.seq_len(1) == 257
    owned = torch.cat([cache.page_chunks[:, 1].flatten(), cache.summary_chunks[:, 1].flatten()])
    owned = owned[owned >= 0].tolist()
    assert len(owned) == len(set(owned)) == cache.held(1)
    chunk = int(cache.page_chunks[1, 1, 1])
    assert int(cache.page_table[1, 1, 1]) == cache.pool.address(chunk)
    assert int(cache.summary_table[0, 1, 2]) == cache.pool.address(int(cache.summary_chunks[0, 1, 2]))


def test_extend_is_all_or_none():
    cache = make_cache(num_chunks=5)
    cache.open(0, NO_SUMMARY)
    cache.extend(0, 300)
    with pytest.raises(OutOfChunksError):
        cache.extend(0, 600)
    assert (cache.seq_len(0), cache.held(0), cache.pool.num_free) == (300, 4, 1)
    assert cache.page_chunks[0, 0].tolist()[2:] == [-1, -1]
    with pytest.raises(ValueError, match="exceeds max_seq_len 1000"):
        cache.extend(0, 1001)


def test_release_gives_everything_back():
    cache = make_cache(num_chunks=20)
    cache.open(0, WIDE)
    cache.open(2, NO_SUMMARY)
    cache.extend(0, 300)
    cache.extend(2, 10)
    assert cache.stats().num_sequences == 2
    cache.release(0)
    cache.release(0)
    cache.release(1)  # never opened
    assert cache.held(2) == 2 and cache.pool.num_free == 18
    cache.release(2)
    stats = cache.stats()
    assert (stats.num_free, stats.largest_free_run, stats.num_sequences) == (20, 20, 0)
    for table, empty in ((cache.page_chunks, -1), (cache.page_table, 0), (cache.summary_chunks, -1), (cache.summary_table, 0)):
        assert (table == empty).all()


def test_summary_tables_grow_and_keep_what_they_held():
    cache = make_cache(num_chunks=40)
    narrow = SummaryLayout(slice_size=64, slice_bytes=65536)  # 16 slices a chunk: one chunk for 1000 tokens
    cache.open(0, narrow)
    cache.extend(0, 300)
    before = cache.summary_chunks[:, 0, :1].clone()
    cache.open(1, WIDE)
    cache.extend(1, 300)
    assert cache.summary_chunks.shape == cache.summary_table.shape == (2, 3, 8)
    assert torch.equal(cache.summary_chunks[:, 0, :1], before)


def test_announced_summaries_never_move_the_tables():
    cache = KVCache(
        KV,
        torch.float32,
        num_layers=1,
        num_chunks=4,
        max_sequences=1,
        max_seq_len=1000,
        device=CPU,
        summaries=[NO_SUMMARY, WIDE],
    )
    address = cache.summary_table.data_ptr()
    cache.open(0, WIDE)
    assert cache.summary_table.data_ptr() == address


def test_misuse_is_noticed():
    cache = make_cache()
    cache.open(0, NO_SUMMARY)
    with pytest.raises(AssertionError, match="already open"):
        cache.open(0, NO_SUMMARY)
    with pytest.raises(AssertionError, match="slot 1 is not open"):
        cache.extend(1, 5)
    with pytest.raises(AssertionError, match="outside the table"):
        cache.open(3, NO_SUMMARY)
    with pytest.raises(ValueError, match="4"):
        KVCache(KV, torch.bfloat16, num_layers=1, num_chunks=1, max_sequences=1, max_seq_len=8, device=CPU)
    cache.close()
    cache.close()


def test_fresh_chunks_are_uninitialised():
    """With the fixture of conftest.py a token that nobody wrote is NaN, so reading it cannot go unnoticed."""
    cache = make_cache(num_chunks=2)
    assert torch.isnan(cache.pages).all()


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["open", "extend", "release"]), st.integers(0, 2), st.integers(1, 1000)), max_size=30)
)
def test_tables_and_pool_always_agree(operations):
    cache = make_cache(num_chunks=16)
    for name, slot, seq_len in operations:
        if name == "open" and not cache.is_open(slot):
            cache.open(slot, WIDE if slot else NO_SUMMARY)
        elif name == "extend" and cache.is_open(slot):
            before = cache.held(slot), cache.seq_len(slot), cache.pool.num_free
            try:
                cache.extend(slot, seq_len)
            except OutOfChunksError:
                assert before == (cache.held(slot), cache.seq_len(slot), cache.pool.num_free)
        elif name == "release":
            cache.release(slot)
        owned = torch.cat([cache.page_chunks.flatten(), cache.summary_chunks.flatten()])
        owned = owned[owned >= 0].tolist()
        assert len(owned) == len(set(owned)) == 16 - cache.pool.num_free == sum(cache.held(s) for s in range(3))
