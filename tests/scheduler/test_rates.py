"""Rates: what is learned from chunks and bursts."""

from __future__ import annotations

import pytest

from qsa.scheduler.rates import Rates, RecentLow


def test_small_chunks_say_nothing_about_full_ones():
    rates = Rates()
    rates.add_chunk_time(10, 5.0, 1024)
    rates.add_chunk_time(1024, 0.0, 1024)
    assert rates.chunk_ms.value is None
    rates.add_chunk_time(2048, 60.0, 1024)
    assert rates.chunk_ms.value == pytest.approx(30.0), "as a chunk of the size that is used beside decodes"


def test_a_burst_that_had_to_wait_does_not_count_much():
    rates = Rates()
    rates.add_burst_time(300.0, 3)
    assert rates.decode_ms.value == 100.0
    rates.add_burst_time(0.0, 3)
    rates.add_burst_time(9.0, 0)
    rates.add_burst_time(30.0, 6)
    assert rates.decode_ms.value == 5.0


def test_recent_low_forgets():
    low = RecentLow()
    for value in [1.0, *[7.0] * 8]:
        low.add(value)
    assert low.value == 7.0
