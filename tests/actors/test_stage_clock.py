"""StageClock: sums by kind, spans for a trace, and a price that a step does not notice."""

import threading
import time

import pytest

from qsa.actors.stage import StageActor
from qsa.actors.stage_clock import KINDS, Span, StageClock, unpack_spans


def test_a_span_counts_for_its_kind_alone():
    clock = StageClock()
    with clock.span("compute", 0, 1):
        time.sleep(0.02)

    seconds = clock.seconds()

    assert set(seconds) == set(KINDS)
    assert seconds.pop("compute") >= 0.02
    assert set(seconds.values()) == {0.0}


def test_an_inner_span_takes_its_time_from_the_outer_one():
    clock = StageClock()
    began = time.perf_counter()
    with clock.span("chunk", 0, 1):
        with clock.span("receive", 0, 1):
            time.sleep(0.15)
        with clock.span("sample", 0, 1), clock.span("send", 0, 1):
            time.sleep(0.01)
    elapsed = time.perf_counter() - began

    seconds = clock.seconds()

    assert seconds["receive"] >= 0.15 and seconds["send"] >= 0.01
    assert seconds["chunk"] < 0.1 and seconds["sample"] < 0.1
    assert sum(seconds.values()) == pytest.approx(elapsed, abs=0.05)


def test_a_span_that_fails_counts_and_passes_the_error_on():
    clock = StageClock()
    with pytest.raises(ValueError, match="no"), clock.span("send", 1, 2):
        raise ValueError("no")
    assert clock.seconds()["send"] > 0


def test_reset_begins_at_zero():
    clock = StageClock()
    with clock.span("wait", 0, 0):
        pass
    clock.reset()
    assert set(clock.seconds().values()) == {0.0}


def test_a_trace_has_the_spans_of_its_time_on_the_common_clock():
    clock = StageClock()
    with clock.span("compute", 0, 1):
        pass
    before = time.time()
    clock.start_trace(10)
    with clock.span("compute", 1, 2):
        time.sleep(0.01)
    clock.add("wait", 0, 3, before, before + 0.5)

    trace = clock.take_trace()

    assert [(span.kind, span.lane, span.step) for span in trace] == [("compute", 1, 2), ("wait", 0, 3)]
    assert before <= trace[0].begin_s <= trace[0].end_s <= time.time() + 0.001
    assert trace[0].seconds >= 0.01 and trace[1].seconds == pytest.approx(0.5)
    assert clock.seconds()["wait"] == pytest.approx(0.5)
    assert clock.take_trace() == []


def test_a_trace_keeps_the_newest_spans():
    clock = StageClock()
    clock.start_trace(3)
    for step in range(10):
        with clock.span("compute", 0, step):
            pass
    assert [span.step for span in clock.take_trace()] == [7, 8, 9]


def test_a_trace_is_taken_while_the_step_thread_goes_on():
    clock = StageClock()
    stop = threading.Event()

    def work() -> None:
        step = 0
        while not stop.is_set():
            with clock.span("compute", 0, step):
                step += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(50):
            clock.start_trace(1000)
            time.sleep(0.002)
            clock.seconds()
            assert all(isinstance(span, Span) for span in clock.take_trace())
    finally:
        stop.set()
        thread.join()


def test_a_trace_travels_as_bytes():
    """As objects a full one would hold up the scheduler for seconds, and with it every stream."""
    actor = StageActor(None)
    actor.start_trace()
    for step, kind in enumerate(KINDS):
        actor._clock.add(kind, step % 3 - 1, step, 1.7e9 + step / 7, 1.7e9 + step / 6)
    spans = list(actor._clock._trace)
    data = actor.take_trace()
    assert isinstance(data, bytes) and unpack_spans(data) == spans and len(spans) == len(KINDS)
    assert unpack_spans(actor.take_trace()) == []


def test_a_span_costs_microseconds():
    clock = StageClock()
    clock.start_trace(1000)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for step in range(2000):
            with clock.span("compute", 0, step):
                pass
        best = min(best, (time.perf_counter() - began) / 2000)
    assert best < 10e-6  # about 1 us; a shared machine may be slow, a list that grows would be slower
