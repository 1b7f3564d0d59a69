"""Traces: Chrome's format, what a stage waited for, and shares in which a moment counts once."""

import json

import pytest

from qsa.actors.stage_clock import Span
from qsa.trace import chrome_trace, name_waits, read_trace, shares_table, span_name, stage_share, work_window, write_trace

TRACE = [
    [
        Span("chunk", 0, 3, 100.0, 101.0),
        Span("send", 0, 3, 101.0, 101.1),
        Span("compute", 0, 4, 102.0, 102.2),
        Span("send", 0, 4, 102.2, 102.25),
        Span("compute", 1, 4, 102.25, 102.45),
        Span("wait", 0, 4, 102.5, 102.6),
    ],
    [
        Span("receive", 0, 3, 101.1, 101.2),
        Span("chunk", 0, 3, 101.2, 102.0),
        Span("wait", -1, -1, 102.0, 102.3),
        Span("compute", 0, 4, 102.3, 102.5),
        Span("wait", -1, -1, 102.5, 102.55),
        Span("compute", 1, 4, 102.55, 102.7),
        Span("wait", -1, -1, 102.7, 102.8),
    ],
]


def test_a_wait_is_for_the_step_that_comes_next():
    waits = [(span.lane, span.step) for span in name_waits(TRACE[1]) if span.kind == "wait"]
    assert waits == [(0, 4), (1, 4), (0, -1)], "the last one ended with the burst"
    assert [span_name(span) for span in TRACE[0][:3]] == ["chunk 3", "send lane 0 step 3", "lane 0 step 4"]


def test_chrome_trace_has_a_process_a_stage_and_rows_of_computing_and_lanes():
    events = chrome_trace(TRACE, ["layers 0 to 13", "layers 14 to 27"])["traceEvents"]
    names = {
        (e["pid"], e.get("tid", 0), e["name"]): e["args"]["name"] for e in events if e["ph"] == "M" and "name" in e["args"]
    }
    assert names[0, 0, "process_name"] == "stage 0: layers 0 to 13"
    assert names[1, 0, "thread_name"] == "computing"
    assert names[1, 2, "thread_name"] == "lane 1: transfers and waits"

    work = {(e["pid"], e["name"]): e for e in events if e["ph"] == "X"}
    assert work[0, "chunk 3"]["ts"] == 0 and work[0, "chunk 3"]["dur"] == pytest.approx(1e6)
    assert work[1, "lane 1 step 4"]["tid"] == 0
    assert work[1, "wait lane 1 step 4"]["tid"] == 2
    assert work[1, "lane 0 step 4"]["ts"] == pytest.approx(2.3e6)

    arrows = [e for e in events if e["ph"] in "sf"]
    assert len(arrows) == 2 * 3, "a chunk and two steps go from stage 0 to stage 1"
    assert all(e["ts"] >= 0 for e in arrows)


def test_a_written_trace_is_strict_json_and_reads_back(tmp_path):
    write_trace(tmp_path / "out.json", TRACE)
    json.loads((tmp_path / "out.json").read_text(), parse_constant=lambda word: pytest.fail(word))
    back = read_trace(tmp_path / "out.json")
    assert [len(spans) for spans in back] == [6, 7]
    span = min(back[1], key=lambda span: span.begin_s)
    assert (span.kind, span.lane, span.step) == ("receive", 0, 3)
    assert (span.begin_s, span.end_s) == pytest.approx((1.1, 1.2))


def test_an_empty_trace_is_a_trace(tmp_path):
    write_trace(tmp_path / "out.json", [[], []])
    assert read_trace(tmp_path / "out.json") == []
    assert work_window([[], []], "chunk") is None


def test_shares_add_up_and_count_a_moment_once():
    overlapping = [
        Span("compute", 0, 1, 10.0, 12.0),
        Span("wait", 0, 1, 11.0, 14.0),  # as on a card, where the host waits while the device computes
        Span("send", 0, 1, 13.0, 15.0),
        Span("compute", 0, 2, 18.0, 30.0),
    ]
    share = stage_share(overlapping, (10.0, 20.0))
    assert (share.seconds, share.busy, share.transfer, share.wait) == pytest.approx((10.0, 0.4, 0.2, 0.1))
    assert share.idle == pytest.approx(0.3)


def test_windows_and_table_of_prefill_and_decode():
    prefill, decode = work_window(TRACE, "chunk"), work_window(TRACE, "compute")
    assert prefill == (100.0, 102.0) and decode == (102.0, 102.7)
    rows = shares_table(TRACE, [("prefill", prefill), ("decode", decode)])
    assert rows[0] == ("phase", "stage", "time", "busy", "transfer", "wait", "idle")
    assert rows[1] == ("prefill", "0", "2.000 s", "50.0%", "5.0%", "0.0%", "45.0%")
    assert len(rows) == 5 and rows[4][:2] == ("decode", "1")
