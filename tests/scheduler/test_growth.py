"""Growth: the meter agrees with the cache's own arithmetic, and the prediction with the article's rule."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scheduler_loads import KV, SUMMARIES, make_stages

from qsa.kernels.registry import SparseConfig
from qsa.memory.kv_cache import KVCache
from qsa.memory.layout import CHUNK_BYTES, sequence_chunks
from qsa.scheduler.growth import ChunkMeter, HitRate, StageCapacity, merge_selection
from qsa.scheduler.plan import SelectionStats


@given(st.integers(0, 5000), st.sampled_from([0, 1]))
def test_meter_agrees_with_the_layout(seq_len, sparse_id):
    stages = [StageCapacity(3, 10, KV, SUMMARIES), StageCapacity(5, 10, KV, SUMMARIES)]
    expected = tuple(sequence_chunks(KV, SUMMARIES[sparse_id], s.num_layers, seq_len) for s in stages)
    assert ChunkMeter(stages).chunks(sparse_id, seq_len) == expected


@given(st.integers(0, 3000), st.integers(1, 700), st.sampled_from([0, 1]))
def test_growth_is_the_difference_of_two_lengths(planned_len, more, sparse_id):
    meter = ChunkMeter([StageCapacity(3, 10, KV, SUMMARIES), StageCapacity(5, 10, KV, SUMMARIES)])
    held, needed = meter.chunks(sparse_id, planned_len), meter.chunks(sparse_id, planned_len + more)
    growth = meter.growth(sparse_id, held, planned_len, planned_len + more)
    assert growth == tuple(a - b for a, b in zip(needed, held, strict=True))


def test_meter_agrees_with_a_real_cache():
    cache = KVCache(
        KV, torch.float32, num_layers=2, num_chunks=40, max_sequences=1, max_seq_len=1000, device=torch.device("cpu")
    )
    meter = ChunkMeter(make_stages(40, layers=2))
    cache.open(0, SUMMARIES[1])
    for seq_len in (1, 127, 128, 129, 256, 257, 640, 1000):
        cache.extend(0, seq_len)
        assert meter.chunks(1, seq_len) == (cache.held(0),)


def test_prediction_is_pages_plus_hit_rate_times_listed_bytes():
    sparse = {0: SparseConfig(dense=True), 1: SparseConfig(top_k_fine=16, block_size_fine=64)}
    meter = ChunkMeter(make_stages(100, layers=2), sparse)
    listed = 16 * 64 * KV.token_bytes * 2 / CHUNK_BYTES  # 16 chunks
    assert meter.predicted(1, 500, 4000, hit_rate=0.0) == meter.chunks(1, 500)
    assert meter.predicted(1, 500, 4000, hit_rate=0.25)[0] == meter.chunks(1, 500)[0] + listed / 4
    assert meter.predicted(0, 500, 4000, hit_rate=0.25) == meter.chunks(0, 500)  # dense selects nothing
    assert meter.predicted(1, 500, 510, hit_rate=1.0) == meter.chunks(1, 510)  # never more than its final pages
    assert meter.predicted(1, 9999, 510, hit_rate=0.0) == meter.chunks(1, 510)


def test_hit_rate_is_an_upper_quantile_of_recent_steps():
    rate = HitRate(prior=0.4)
    assert rate.value == 0.4
    for i in range(100):
        rate.add(0.1 if i % 4 else 0.3)
    assert rate.value == pytest.approx(0.3)
    for _ in range(HitRate.STEPS):
        rate.add(0.05)
    assert rate.value == pytest.approx(0.05)


def test_reports_of_several_stages_add_up():
    merged = merge_selection([
        SelectionStats("a", 100, 400, 16, 4), SelectionStats("b", 1, 1, 1, 1), SelectionStats("a", 50, 200, 16, 12)
    ])  # fmt: skip
    assert (merged["a"].attended, merged["a"].context, merged["a"].hit_rate) == (150, 600, 0.5)


def test_stages_must_agree_on_ids():
    with pytest.raises(ValueError, match="same sparse ids"):
        ChunkMeter([StageCapacity(1, 1, KV, SUMMARIES), StageCapacity(1, 1, KV, {0: SUMMARIES[0]})])
    with pytest.raises(ValueError, match="at least one stage"):
        ChunkMeter([])
