"""Prometheus names of the engine's statistics: units spelled out, a label for the stage, words as `_info`."""

import dataclasses

from qsa.actors.telemetry import EngineStats, StageStats
from qsa.memory.pool_stats import PoolStats
from qsa.scheduler.counters import SchedulerCounters
from qsa.serve_app.metrics import COUNTERS, HttpMetrics, with_unit


def stage(number: int) -> StageStats:
    return StageStats(
        stage=number,
        layers=(0, 15),
        device="cpu",
        pid=1,
        pool=PoolStats(8, 5, 4),
        weight_bytes=100,
        busy_s=1.5,
        steps=7,
        tokens=9,
        wait_s=0.5,
        transfer_s=0.25,
        idle_share=0.125,
        in_flight=2,
        sent_bytes=4096,
        transport="p2p",
    )


def test_a_stage_has_its_times_in_seconds_and_its_transport():
    text = HttpMetrics().render({"stages": [stage(0), stage(1)], "uptime_s": 3.0, "tokens_per_s": 4.0}).decode()
    for line in (
        'qsa_engine_stages_busy_seconds_total{stage="1"} 1.5',
        'qsa_engine_stages_wait_seconds_total{stage="0"} 0.5',
        'qsa_engine_stages_transfer_seconds_total{stage="0"} 0.25',
        'qsa_engine_stages_idle_share{stage="0"} 0.125',
        'qsa_engine_stages_in_flight{stage="0"} 2.0',
        'qsa_engine_stages_sent_bytes_total{stage="0"} 4096.0',
        'qsa_engine_stages_transport_info{stage="1",transport="p2p"} 1.0',
        'qsa_engine_stages_pool_num_free{stage="0"} 5.0',
        "qsa_engine_uptime_seconds 3.0",
        "qsa_engine_tokens_per_second 4.0",
    ):
        assert line in text, text
    assert "# HELP qsa_engine_stages_idle_share Waiting, as a share" in text
    assert "# TYPE qsa_engine_stages_idle_share gauge" in text and "# TYPE qsa_engine_stages_tokens_total counter" in text


def test_every_counter_is_a_number_of_the_statistics():
    fields = {f"scheduler_{with_unit(field.name)}" for field in dataclasses.fields(SchedulerCounters)}
    fields |= {f"stages_{with_unit(field.name)}" for field in dataclasses.fields(StageStats)}
    fields |= {field.name for field in dataclasses.fields(EngineStats)}
    assert fields >= COUNTERS


def test_a_unit_is_spelled_once():
    assert [with_unit(name) for name in ("busy_s", "tokens_per_s", "steps", "sent_bytes", "seconds")] == [
        "busy_seconds",
        "tokens_per_second",
        "steps",
        "sent_bytes",
        "seconds",
    ]
