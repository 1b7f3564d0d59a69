"""Connections between stages: strangers, silence and impostors are refused, whoever waits is woken, frames of any size pass."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time

import pytest
from transport_peers import Caught

from qsa.actors.transport import TransportClosed
from qsa.actors.transport_link import CHUNKS, FRAMES, Listener, call, watch

HOST, SECRET = "127.0.0.1", b"known to both"


@pytest.fixture
def listener():
    made = Listener(HOST, SECRET, 3, [(FRAMES, 0)])
    yield made
    made.close()


def dial(listener, stage=0, purpose=FRAMES, epoch=3, secret=SECRET):
    return call(listener.address, 1, purpose, epoch, secret, stage, HOST, time.monotonic() + 2)


@pytest.fixture
def ends(listener):
    near = dial(listener)
    far = listener.links(time.monotonic() + 2)[FRAMES]
    yield near, far
    near.close()
    far.close()


@pytest.mark.parametrize("wrong", [{"secret": b"a guess"}, {"epoch": 2}, {"stage": 2}, {"purpose": CHUNKS}], ids=str)
def test_who_is_not_expected_is_refused_and_keeps_nobody_waiting(wrong, listener):
    with (
        socket.create_connection(listener.address.split(":")) as silent,
        socket.create_connection(listener.address.split(":")) as noisy,
    ):
        noisy.sendall(os.urandom(4096))
        with pytest.raises(ConnectionRefusedError, match="refused stage"):
            dial(listener, **wrong)
        link = dial(listener)
        assert list(listener.links(time.monotonic() + 2)) == [FRAMES]
        assert silent.recv(4) == b"qsa "
        link.close()
    with pytest.raises(ConnectionRefusedError):
        dial(listener)  # nothing listens any more


@pytest.mark.parametrize(("greeting", "error"), [(b"qsa stages 1", "does not know the secret"), (bytes(12), "is no stage")])
def test_a_listener_that_does_not_know_the_secret_is_not_spoken_to(greeting, error):
    with socket.create_server((HOST, 0)) as impostor:

        def answer():
            connection, _ = impostor.accept()
            connection.sendall(greeting + bytes(32))
            connection.recv(4096)
            connection.sendall(bytes(32))

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(ConnectionRefusedError, match=error):
            call(f"{HOST}:{impostor.getsockname()[1]}", 1, FRAMES, 3, SECRET, 0, HOST, time.monotonic() + 2)


def test_frames_of_any_size_and_signals_against_them(ends):
    near, far = ends
    payloads = [b"", os.urandom(1), os.urandom(100_000), os.urandom(20_000_000)]

    def send():
        for number, payload in enumerate(payloads):
            near.send(5, number, number + 1, payload[:70_000], memoryview(payload) if payload else None)

    sender = Caught(send)
    for number, payload in enumerate(payloads):
        frame = far.read()
        got = bytearray(frame.payload_bytes)
        far.read_into(memoryview(got))
        assert (frame.kind, frame.lane, frame.rows) == (5, number, number + 1)
        assert frame.header == payload[:70_000] and got == payload
        far.signal(number)
    assert sender.ended(5) and sender.error is None
    signals = b""
    while len(signals) < len(payloads):
        signals += near.read_signals(wait=True)
    assert signals == bytes(range(len(payloads))) and near.read_signals(wait=False) == b""


def test_an_end_wakes_both_sides_and_who_watches(ends):
    near, far = ends
    hung_up = threading.Event()
    watch([near], hung_up.set)
    readers = [Caught(near.read), Caught(far.read)]
    time.sleep(0.05)
    assert not hung_up.is_set()
    far.shutdown()
    assert hung_up.wait(1)
    for caught in readers:
        assert caught.ended(1) and isinstance(caught.error, TransportClosed)
    with pytest.raises(TransportClosed, match="the connection to stage"):
        far.signal(0)


def test_an_end_wakes_who_sends_more_than_is_read(ends):
    near, _ = ends
    sender = Caught(lambda: [near.send(0, payload=memoryview(bytes(1 << 22))) for _ in range(100)])
    assert not sender.ended(0.2)
    near.shutdown()
    assert sender.ended(0.1) and isinstance(sender.error, TransportClosed)


def test_a_stranger_who_talks_slowly_is_sent_away(listener, monkeypatch):
    monkeypatch.setattr("qsa.actors.transport_link.HANDSHAKE_S", 0.3)
    with socket.create_connection(listener.address.split(":")) as slow:
        began = time.monotonic()

        def talk():
            while time.monotonic() < began + 2:
                slow.sendall(b"x")
                time.sleep(0.05)

        with pytest.raises(ConnectionError):
            talk()
        assert time.monotonic() < began + 1


def test_a_listener_outlives_a_moment_without_file_descriptors(listener):
    time.sleep(0.05)  # until it listens
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    last = os.dup(0)
    os.close(last)
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1, hard))
    try:
        stranger = socket.create_connection(listener.address.split(":"))  # takes the last one
        time.sleep(0.1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with stranger:
        link = dial(listener)
        assert list(listener.links(time.monotonic() + 2)) == [FRAMES]
        link.close()


def test_whoever_looks_out_sees_what_comes_and_the_end_and_gives_up_in_time(ends):
    near, far = ends
    began = time.monotonic()
    near.look_out(0.05)
    assert 0.05 <= time.monotonic() - began < 2 and not near.has_something
    for action in (lambda: far.send(1, header=b"x"), far.close):
        timer = threading.Timer(0.05, action)
        timer.start()
        began = time.monotonic()
        near.look_out(10)
        assert near.has_something and time.monotonic() - began < 5
        timer.join()
        if action != far.close:
            assert near.read().header == b"x"
    with pytest.raises(TransportClosed):
        near.read()
