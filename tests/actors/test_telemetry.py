"""StageStats from a clock and a transport: what of a stage's time was work, waiting and transfer."""

from types import SimpleNamespace

import pytest

from qsa.actors.stage_clock import StageClock
from qsa.actors.telemetry import stage_stats
from qsa.memory.pool_stats import PoolStats

COUNTS = dict(stage=0, layers=(0, 1), device="cpu", pid=1, weight_bytes=0, steps=1, tokens=1, running_s=0.0, sent_bytes=4096)


def stats_of(clock, link):
    return stage_stats(clock, link, pool=PoolStats(1, 1, 1), **COUNTS)


def test_times_by_kind_and_what_is_in_flight():
    clock = StageClock()
    for kind, seconds in (("compute", 2.0), ("chunk", 3.0), ("sample", 1.0), ("wait", 3.0), ("send", 0.5), ("receive", 0.5)):
        clock.add(kind, 0, 0, 100.0, 100.0 + seconds)
    link = SimpleNamespace(name="p2p", stats=SimpleNamespace(in_flight=2))

    stats = stats_of(clock, link)

    assert (stats.busy_s, stats.wait_s, stats.transfer_s) == pytest.approx((6.0, 3.0, 1.0))
    assert stats.idle_share == pytest.approx(0.3)
    assert (stats.in_flight, stats.sent_bytes, stats.transport) == (2, 4096, "p2p")


def test_a_stage_that_did_nothing_is_not_idle():
    stats = stats_of(StageClock(), None)
    assert stats.idle_share == 0.0 and stats.transport == "" and stats.in_flight == 0
