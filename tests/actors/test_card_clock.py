"""CardClock: steps that a card computes while the host waits, on a card of the test's own."""

import time

import pytest

from qsa.actors.card_clock import CardClock


class Card:
    """A stream whose work takes the time that is put into it."""

    def __init__(self):
        self.free_at = 0.0

    def work(self, seconds):
        self.free_at = max(self.free_at, time.perf_counter()) + seconds

    def event(self):
        return Event(self)


class Event:
    made = 0

    def __init__(self, card):
        self.card = card
        Event.made += 1

    def record(self):
        self.at = max(self.card.free_at, time.perf_counter())

    def query(self):
        return time.perf_counter() >= self.at

    def synchronize(self):
        time.sleep(max(0.0, self.at - time.perf_counter()))

    def elapsed_time(self, other):
        return (other.at - self.at) * 1e3


@pytest.fixture
def card():
    return Card()


def test_a_step_takes_as_long_as_the_card_needs_and_a_wait_what_is_left(card):
    clock = CardClock(card.event)
    clock.start_trace()
    began = time.time()
    with clock.span("compute", 0, 7):
        card.work(0.05)
    with clock.span("send", 0, 7):
        pass
    with clock.span("wait", 0, 7):
        time.sleep(0.08)

    seconds = clock.seconds()
    assert seconds["compute"] == pytest.approx(0.05, abs=0.01)
    assert seconds["wait"] == pytest.approx(0.03, abs=0.01), "the card stood still for the rest of the host's wait"
    assert seconds["send"] < 0.001

    spans = {span.kind: span for span in clock.take_trace()}
    assert spans["compute"].begin_s == pytest.approx(began, abs=0.01)
    assert (spans["compute"].lane, spans["compute"].step) == (0, 7)
    assert spans["wait"].seconds == pytest.approx(0.08, abs=0.01), "a trace shows what the host did"


def test_two_lanes_keep_the_card_busy_and_nothing_waits(card):
    clock = CardClock(card.event)
    for lane in (0, 1):
        with clock.span("compute", lane, 0):
            card.work(0.02)
    for step in range(1, 4):
        for lane in (0, 1):
            with clock.span("wait", lane, step):
                time.sleep(0.019)
            with clock.span("compute", lane, step):
                card.work(0.02)
    time.sleep(0.06)
    with clock.span("sample", 0, 4):
        pass

    seconds = clock.seconds()
    assert seconds["compute"] == pytest.approx(8 * 0.02, rel=0.1)
    assert seconds["wait"] < 0.02


def test_a_step_under_way_counts_later(card):
    clock = CardClock(card.event)
    with clock.span("compute", 0, 0):
        card.work(0.03)
    with clock.span("send", 0, 0):
        pass
    assert set(clock.seconds().values()) == {0.0}
    time.sleep(0.04)
    with clock.span("send", 1, 0):
        pass
    assert clock.seconds()["compute"] == pytest.approx(0.03, abs=0.01)


def test_chunks_are_the_hosts_and_events_are_used_again(card):
    clock = CardClock(card.event)
    with clock.span("chunk", 0, 0):
        time.sleep(0.01)
    assert clock.seconds()["chunk"] >= 0.01
    for step in range(20):
        with clock.span("compute", 0, step):
            pass
        with clock.span("wait", 0, step):
            pass
    assert len(clock._events) <= 4 and clock.seconds()["compute"] < 0.01
