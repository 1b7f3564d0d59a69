"""Every transport against the same battery: bits and order, bounds, readers that are slow, ends that are not orderly."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
from fakes import wait_until
from transport_peers import (
    HIDDEN_SIZE,
    KINDS,
    MAX_ROWS,
    PREFILL_CHUNK,
    Caught,
    LocalStage,
    connect_all,
    make_pipeline,
    make_spec,
    make_transport,
)

from qsa.actors.transport import HiddenMessage, TransportClosed, TransportSpec, choose_transport
from qsa.actors.transport import make_transport as make_by_name
from qsa.actors.transport_lanes import FrameSender
from qsa.errors import ConfigError

DTYPES = ["float32", "bfloat16"]


@pytest.fixture
def pipeline():
    """make(kind, num_stages, **changes): connected transports, closed at the end."""
    made = []

    def make(*args, **changes):
        made.extend(make_pipeline(*args, **changes))
        return made[-(args[1] if len(args) > 1 else 2) :]

    yield make
    for transport in made:
        transport.close()


def rows_of(rng: random.Random, dtype: str) -> torch.Tensor:
    return torch.randn(rng.randint(1, MAX_ROWS), HIDDEN_SIZE).to(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_lane_steps_go_round_with_every_bit(kind, dtype, pipeline):
    first, last = pipeline(kind, dtype=dtype)
    rng = random.Random(0)
    sent = [(n % 2, f"step {n}".encode(), rows_of(rng, dtype)) for n in range(200)]

    def follow():
        got = []
        for _ in sent:
            header, hidden = last.receive()
            got.append((header, hidden.clone()))
            last.answer(b"answer to " + header)
        assert last.receive() == (b"end", None)
        return got

    follower = Caught(follow)
    for lane, header, hidden in sent[:2]:
        first.send(lane, header, hidden)
    for lane, header, hidden in sent[2:]:  # two lanes under way
        first.take_answer()
        scratch = hidden.clone()
        first.send(lane, header, scratch)
        scratch.zero_()  # it may be overwritten at once
    answers = [first.take_answer() for _ in range(2)]
    first.send(0, b"end", None)
    assert follower.ended(20) and follower.error is None
    for (_, header, hidden), (got_header, got) in zip(sent, follower.result, strict=True):
        assert header == got_header and got.dtype == hidden.dtype and torch.equal(got, hidden)
    assert answers == [b"answer to step 198", b"answer to step 199"]
    wait_until(lambda: first.stats.in_flight == 0)  # also when nothing more is sent
    assert first.stats.num_sent == 201 and last.stats.num_sent == 200
    assert first.stats.sent_bytes >= sum(hidden.nbytes for _, _, hidden in sent)
    assert first.stats.wait_s > 0 and last.stats.wait_s > 0 and first.stats.send_s > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_sender_runs_two_frames_ahead_and_no_further(kind, pipeline):
    first, last = pipeline(kind)
    tensors = [torch.full((MAX_ROWS, HIDDEN_SIZE), float(n)) for n in range(6)]
    for n in range(2):
        first.send(0, bytes([n]), tensors[n])
    sender = Caught(lambda: [first.send(0, bytes([n]), tensors[n]) for n in range(2, 6)])
    other = torch.ones(1, HIDDEN_SIZE)
    assert not sender.ended(0.15)
    assert first.stats.in_flight == (1 if kind == "object_store" else 2)  # it knows of what has been delivered
    held: list[torch.Tensor] = []
    for n in range(6):  # a slow reader: what it holds is not overwritten until its second next receive
        header, hidden = last.receive()
        assert header == bytes([n])
        held.append(hidden)
        time.sleep(0.05)
        for back in range(min(2, n + 1)):
            assert torch.equal(held[n - back], tensors[n - back])
    assert sender.ended(5) and sender.error is None
    first.send(1, b"other lane", other)
    assert torch.equal(last.receive()[1], other)
    assert torch.equal(held[5], tensors[5])  # whatever came for the other lane


@pytest.mark.parametrize("kind", KINDS)
def test_an_abandoned_transport_wakes_whoever_waits(kind, pipeline):
    first, last = pipeline(kind)
    waiting = [Caught(last.receive), Caught(first.take_answer)]
    assert not waiting[0].ended(0.1) and not waiting[1].ended(0.01)
    for transport, caught in zip((last, first), waiting, strict=True):
        began = time.monotonic()
        transport.abandon("as the test says")
        assert caught.ended(0.1), f"still waiting after {time.monotonic() - began:.3f} s"
        assert isinstance(caught.error, TransportClosed)
    for call in (first.take_answer, lambda: first.send(0, b"", None), last.receive, lambda: last.answer(b"late")):
        with pytest.raises(TransportClosed):
            call()


@pytest.mark.parametrize("kind", KINDS)
def test_an_abandoned_sender_that_waits_for_room_is_woken(kind, pipeline):
    first, _ = pipeline(kind)
    for _ in range(2):
        first.send(1, b"", torch.ones(1, HIDDEN_SIZE))
    sender = Caught(first.send, 1, b"", torch.ones(1, HIDDEN_SIZE))
    assert not sender.ended(0.1)
    first.abandon()
    assert sender.ended(0.1) and isinstance(sender.error, TransportClosed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_keep_every_bit_with_two_in_flight(kind, dtype, pipeline):
    first, last = pipeline(kind, dtype=dtype)
    rng = random.Random(1)
    chunks = [torch.randn(rng.randint(1, PREFILL_CHUNK), HIDDEN_SIZE).to(getattr(torch, dtype)) for _ in range(20)]
    under_way = []
    for number, chunk in enumerate(chunks):
        scratch = chunk.clone()
        packed = first.pack(scratch)
        under_way.append(packed.copy() if kind == "object_store" else packed)  # as Ray does, before the stage goes on
        scratch.zero_()
        if number % 3:
            continue  # now and then two and three wait
        while under_way:
            packed = under_way.pop(0)
            if hasattr(packed, "flags"):
                packed.flags.writeable = False  # as it comes out of the object store
            received = last.unpack(packed)
            expected = chunks[number - len(under_way)]
            assert torch.equal(received, expected) and received.dtype == expected.dtype
            time.sleep(0.002)
            assert torch.equal(received, expected)
            received.zero_()  # it is the reader's
    wait_until(lambda: first.stats.in_flight <= 2)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_object_store_keeps_every_bit_and_owns_what_it_unpacks(dtype, rng):
    transport = make_transport("object_store", make_spec("object_store", 0, dtype=dtype))
    hidden = torch.randn(5, HIDDEN_SIZE, generator=rng).to(getattr(torch, dtype))
    packed = transport.pack(hidden)
    packed.flags.writeable = False  # as it comes out of the object store
    received = transport.unpack(packed)
    assert torch.equal(received, hidden) and received.dtype == hidden.dtype
    received.zero_()
    assert torch.equal(transport.unpack(packed), hidden)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_object_store_between_cards_keeps_every_bit(dtype, rng):
    transport = make_transport("object_store", make_spec("object_store", 0, dtype=dtype, device="cuda"))
    hidden = torch.randn(300, 64, generator=rng).to(getattr(torch, dtype))
    messages = [transport.pack(hidden.cuda() * 2**shift) for shift in range(4)]  # each has memory of its own
    for shift, packed in enumerate(messages):
        packed.flags.writeable = False
        received = transport.unpack(packed)
        assert received.device.type == "cuda" and torch.equal(received.cpu(), hidden * 2**shift)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_stages_that_share_a_card_go_by_way_of_the_host(dtype, pipeline):
    first, last = pipeline("p2p", dtype=dtype, device="cuda")
    assert first.wires == ("sockets",) == last.wires
    for step in range(20):
        hidden = torch.randn(1 + step % MAX_ROWS, HIDDEN_SIZE, device="cuda").to(getattr(torch, dtype))
        first.send(step % 2, b"step", hidden)
        header, received = last.receive()
        assert header == b"step" and received.is_cuda and torch.equal(received, hidden)
        assert torch.equal(last.unpack(first.pack(hidden)), hidden)


@pytest.mark.parametrize("kind", ["sockets", "gloo"])
def test_chunks_that_nobody_takes_are_dropped(kind, pipeline):
    first, last = pipeline(kind)
    chunks = [torch.full((3, HIDDEN_SIZE), float(n)) for n in range(5)]
    tickets = []
    packer = Caught(lambda: [tickets.append(first.pack(chunk)) for chunk in chunks])
    wait_until(lambda: len(tickets) >= 4)
    assert torch.equal(last.unpack(tickets[3]), chunks[3])
    assert packer.ended(5) and torch.equal(last.unpack(tickets[4]), chunks[4])


@pytest.mark.parametrize("kind", ["sockets", "gloo"])
def test_an_abandoned_transport_packs_and_unpacks_no_more(kind, pipeline):
    first, last = pipeline(kind)
    ticket = first.pack(torch.ones(1, HIDDEN_SIZE))
    last.unpack(ticket)
    waiting = Caught(last.unpack, type(ticket)(ticket.number + 1, 1))
    assert not waiting.ended(0.1)
    last.abandon()
    assert waiting.ended(0.1) and isinstance(waiting.error, TransportClosed)
    wait_until(lambda: Caught(first.pack, torch.ones(1, HIDDEN_SIZE)).ended(1) and first._closed is not None)
    with pytest.raises(TransportClosed, match="connection to another stage has ended"):
        first.pack(torch.ones(1, HIDDEN_SIZE))


@pytest.mark.parametrize("kind", KINDS)
def test_three_stages_in_a_chain(kind, pipeline):
    first, middle, last = pipeline(kind, 3)

    def pass_on():
        while True:
            header, hidden = middle.receive()
            middle.send(header[0] % 2, header, None if hidden is None else hidden + 1)
            if hidden is None:
                return

    def follow():
        while True:
            header, hidden = last.receive()
            if hidden is None:
                return
            last.answer(header + str(hidden[0, 0].item()).encode())

    threads = [Caught(pass_on), Caught(follow)]
    for n in range(50):
        first.send(n % 2, bytes([n]), torch.full((n % MAX_ROWS + 1, HIDDEN_SIZE), float(n)))
        assert first.take_answer() == bytes([n]) + f"{n + 1.0}".encode()
    packed = middle.pack(middle.unpack(first.pack(torch.ones(4, HIDDEN_SIZE))) * 2)
    assert torch.equal(last.unpack(packed), torch.full((4, HIDDEN_SIZE), 2.0))
    first.send(0, b"\0", None)
    assert all(thread.ended(5) and thread.error is None for thread in threads)


def test_when_one_of_three_goes_all_hear_of_it(pipeline):
    first, middle, last = pipeline("sockets", 3)
    waiting = [Caught(first.take_answer), Caught(last.receive)]
    middle.close()
    for caught in waiting:
        assert caught.ended(1) and isinstance(caught.error, TransportClosed)


@pytest.mark.parametrize("kind", KINDS)
def test_close_twice_and_before_a_connection(kind):
    transport = make_transport(kind, make_spec(kind, 0))
    transport.close()
    transport.close()
    with pytest.raises(TransportClosed):
        transport.take_answer()


def own_threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("qsa-")}


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_closed_transport_leaves_no_thread(num_stages):
    before = own_threads()
    for transport in make_pipeline("sockets", num_stages):
        transport.close()
    wait_until(lambda: own_threads() <= before, 2)


def test_a_transport_that_is_abandoned_while_it_connects_says_so_and_leaves_nothing(monkeypatch):
    before = own_threads()
    transports = [make_transport("sockets", make_spec("sockets", stage)) for stage in range(2)]

    class Abandoned(FrameSender):
        def __init__(self, *args):
            super().__init__(*args)
            transports[0].abandon()

    monkeypatch.setattr("qsa.actors.transport_p2p.FrameSender", Abandoned)
    with pytest.raises(TransportClosed, match="stage 0 was closed: abandoned"):
        connect_all(transports)
    for transport in transports:
        transport.close()
    wait_until(lambda: own_threads() <= before, 2)


@pytest.mark.parametrize("change", [{"secret": b"another"}, {"epoch": 8}], ids=lambda change: next(iter(change)))
def test_another_secret_or_epoch_is_not_connected(change):
    transports = [
        make_transport("sockets", make_spec("sockets", 0)),
        make_transport("sockets", make_spec("sockets", 1, **change)),
    ]
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"pipeline\.transport is p2p, but stage 0 .* refused stage 0; .* object_store"):
        connect_all(transports, timeout_s=3.0)  # the other one listens so long, and a busy machine may start this one late
    assert time.monotonic() - began < 15


def test_a_stage_that_is_not_there_is_named_within_the_time_limit():
    transport = make_transport("sockets", make_spec("sockets", 1, 3))
    with pytest.raises(ConfigError, match=r"pipeline\.transport is p2p, but stage 1 at 127.0.0.1 .*refused"):
        transport.connect(["127.0.0.1:1", transport.address(), "127.0.0.1:1"], None, None, 1.0)
    last = make_transport("sockets", make_spec("sockets", 1, 2))
    first = make_transport("sockets", make_spec("sockets", 0, 2))
    with pytest.raises(ConfigError, match=r"stage 0 did not connect"):
        last.connect([first.address(), last.address()], None, None, 0.5)


def test_deliveries_of_another_epoch_are_dropped():
    transport = make_transport("object_store", make_spec("object_store", 1))
    assert not transport.deliver(6, "frame0", b"old", None)
    assert transport.deliver(7, "frame0", b"new", None)
    assert transport.receive() == (b"new", None)
    transport.close()
    assert not transport.deliver(7, "frame0", b"late", None)


def test_a_stage_that_has_died_or_gone_on_closes_the_object_store_transport():
    first = make_transport("object_store", make_spec("object_store", 0))
    handle = LocalStage(make_transport("object_store", make_spec("object_store", 1)))
    first.connect(["", ""], handle, None, 1.0)
    waiting = Caught(first.take_answer)
    handle.error = RuntimeError("the actor died")
    assert waiting.ended(1) and "another stage cannot be reached: RuntimeError: the actor died" in str(waiting.error)
    moved = make_transport("object_store", make_spec("object_store", 0))
    moved.connect(["", ""], LocalStage(make_transport("object_store", make_spec("object_store", 1, epoch=8))), None, 1.0)
    moved.send(0, b"", None)
    with pytest.raises(TransportClosed, match="not in this epoch"):
        moved.take_answer()


def test_one_stage_connects_to_nobody():
    for name in ("object_store", "p2p"):
        transport = make_by_name(make_spec(name, 0, 1))
        transport.connect([transport.address()], None, None, 1.0)
        transport.close()
    with pytest.raises(ValueError, match="got 'pigeon'"):
        make_by_name(make_spec("pigeon", 0, 1))


@pytest.mark.parametrize(
    ("arguments", "name", "reason"),
    [
        (("rdt", "cpu", 2, True), "rdt", "pipeline.transport"),
        (("auto", "cuda", 2, False), "p2p", "NCCL"),
        (("auto", "cpu", 2, True), "p2p", "one machine"),
        (("auto", "cpu", 3, False), "object_store", "several machines"),
        (("auto", "cuda", 1, True), "object_store", "one stage"),
    ],
)
def test_the_transport_is_chosen_with_a_reason(arguments, name, reason):
    chosen, why = choose_transport(*arguments)
    assert chosen == name and reason in why and "\n" not in why


def test_messages_and_specs_are_plain_values():
    ends = [make_spec("p2p", stage, 3).buffer_bytes for stage in range(3)]
    assert ends[0] + ends[2] == ends[1] and make_spec("p2p", 0, 1).buffer_bytes == 0
    assert ends[0] == 4 * HIDDEN_SIZE * (2 * PREFILL_CHUNK + 2 * 2 * MAX_ROWS)
    assert make_spec("object_store", 1, 3).buffer_bytes == 0
    assert HiddenMessage(0, 1, 0).hidden is None
    assert isinstance(make_spec("p2p", 0), TransportSpec) and make_spec("p2p", 0).is_first and make_spec("p2p", 1).is_last
