"""The cut of a trace that the timeline's figure shows."""

import sys

import pytest

from benchmarks.plot_timeline import choose_window, main
from qsa.actors.stage_clock import Span
from qsa.trace import write_trace


def rounds_with_chunks(num_rounds):
    """Bursts of two steps and two lanes, and after each a chunk on both stages."""
    stages, now = ([], []), 0.0
    for number in range(num_rounds):
        for step in (2 * number, 2 * number + 1):
            for lane in (0, 1):
                stages[0].append(Span("compute", lane, step, now, now + 0.01))
                stages[1].append(Span("compute", lane, step, now + 0.01, now + 0.02))
                now += 0.01
        now += 0.01
        for spans in stages:
            spans.append(Span("chunk", 0, 100 + number, now, now + 0.05))
        now += 0.05
    return stages


def test_the_figure_is_cut_out_around_a_chunk_between_decode_steps(tmp_path):
    trace = rounds_with_chunks(6)
    begin, end = choose_window(trace, 2)
    inside = [span for span in trace[1] if begin <= span.begin_s and span.end_s <= end and span.kind == "chunk"]
    assert len(inside) == 1
    assert end - begin == pytest.approx(0.01 + 0.05 + 0.08)

    write_trace(tmp_path / "trace.json", trace)
    main([str(tmp_path / "trace.json"), "--output", str(tmp_path / "figure.png")])
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_a_trace_without_both_says_so():
    decode_only = [[span for span in spans if span.kind == "compute"] for spans in rounds_with_chunks(3)]
    with pytest.raises(ValueError, match="no chunk of a prompt"):
        choose_window(decode_only, 2)


def test_without_matplotlib_it_is_one_line(tmp_path, monkeypatch):
    write_trace(tmp_path / "trace.json", rounds_with_chunks(6))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="pip install matplotlib"):
        main([str(tmp_path / "trace.json"), "--output", str(tmp_path / "figure.png")])
