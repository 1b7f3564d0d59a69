"""The summary of results: bars, rows that stay, and medians."""

from __future__ import annotations

import json

import pytest

from benchmarks.bench_engine import summarise
from benchmarks.summary import Line, record
from benchmarks.timing import timing_of


def test_bars_have_two_directions():
    assert Line("a", 2.0, "ratio", ">= 2.0").met is True
    assert Line("a", 1.99, "ratio", ">= 2.0").met is False
    assert Line("a", 0.01, "nats", "<= 0.010").met is True
    assert Line("a", 0.011, "nats", "<= 0.010").met is False
    assert Line("a", 1.0, "s").met is None
    with pytest.raises(ValueError, match="bar of a"):
        _ = Line("a", 1.0, "s", "about 3").met


def test_rows_are_replaced_by_name_and_others_stay(tmp_path):
    path = tmp_path / "summary.json"
    record([Line("model.b", 1.0, "ratio", ">= 2.0"), Line("kernel.a", 3.14159265, "us")], "first", path)
    record([Line("model.b", 2.5, "ratio", ">= 2.0")], "second", path)
    rows = json.loads(path.read_text())
    assert [row["name"] for row in rows] == ["kernel.a", "model.b"]
    assert (rows[0]["command"], rows[0]["value"], rows[0]["met"]) == ("first", 3.1416, None)
    assert (rows[1]["command"], rows[1]["value"], rows[1]["met"]) == ("second", 2.5, True)
    assert set(rows[1]) == {"name", "value", "unit", "bar", "met", "machine", "commit", "command"}


def test_medians_and_spread():
    timing = timing_of([1.0, 3.0, 2.0])
    assert (timing.median, timing.spread) == (2.0, 1.0)


def test_a_missed_bar_is_a_row_too():
    rows = []
    for context in ("128", "4k", "8k"):
        for ratio in (0.4, 0.45, 0.9):
            row = {"context": context, "prefill_s": 4.0, "decode_ms": 20.0, "prefill_ratio": 3.0, "decode_ratio": ratio}
            rows.append(row | {"llamacpp_prefill_s": 12.0, "llamacpp_decode_ms": 9.0})
    lines = {line.name: line for line in summarise(rows, stage=[15.0, 16.0, 17.0], streams=120.0)}
    assert lines["model.decode_128_vs_llamacpp"].met is False and lines["model.decode_128_vs_llamacpp"].value == 0.45
    assert lines["model.prefill_vs_llamacpp"].met is True
    assert lines["model.prefill_4k"].value == 1024 and lines["model.decode_8k"].value == 50
    assert lines["model.ray_and_http_ms_per_token"].value == 4.0
