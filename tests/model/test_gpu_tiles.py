"""Tiles planned for a card are the CPU's, for chunks that begin and end anywhere."""

from __future__ import annotations

import pytest
import torch
from stage_attention import SMALL, Sequence, make_attention, run_prompt

from qsa.kernels.registry import SparseConfig
from qsa.kernels.sparse_prefill import first_sparse_tile, plan_tiles
from qsa.model.attention import sum_of_lengths
from qsa.model.batch import Segment
from qsa.model.gpu_tiles import near_tokens, plan_gpu_tiles


@pytest.mark.parametrize(("tile", "sample_every"), [(32, 4), (16, 4), (32, 8), (2, 2), (64, 64)])
def test_tiles_are_those_of_the_cpu(tile, sample_every):
    config = SparseConfig(**{**SMALL, "prefill_tile": tile, "prefill_samples": tile // sample_every})
    list_size = config.prefill_factor * config.top_k_fine
    num_sparse = 0
    for start in (0, 300, 351, 352, 353, 480, 496, 511):
        for length in (1, 2, 15, 16, 33, 100, 200):
            segment = Segment(0, start, start + length, 1, True)
            begin, got = plan_gpu_tiles(segment, config, torch.device("cpu"))
            first = first_sparse_tile(start, tile, 64, 32, list_size)
            assert begin == min(max(first, start), segment.end)
            if begin == segment.end:
                assert got is None
                continue
            num_sparse += 1
            want = plan_tiles(
                first,
                begin,
                segment.end,
                tile_size=tile,
                window_size=64,
                slice_size=32,
                sample_every=sample_every,
                dtype=torch.float32,
            )
            assert got.first == want.first and got.num_slices == int(want.window_slices[-1])
            assert torch.equal(got.window_slices.long(), want.window_slices)
            assert torch.equal(got.sampled, want.sampled) and torch.equal(got.weights, want.weights)
    assert num_sparse > 20


def test_near_tokens_are_those_of_the_masks():
    config = SparseConfig(**SMALL, summary="mean")
    attention = make_attention({1: config}, torch.float32)
    attention.open(0, 1)
    run_prompt(attention, 0, Sequence.random(613, 0, torch.float32), 613, 1, chunk=613)
    (figures,) = attention.take_stats()
    begin = first_sparse_tile(0, config.prefill_tile, 64, 32, 8)
    far = 8 * 32 * (613 - begin)
    assert figures.attended == 2 * (sum_of_lengths(0, begin) + far + near_tokens(begin, 613, config))
