"""The transport over connections of the stages' own: no Ray call in the way of a token or of a chunk's bytes.

Frames and answers go over TCP. Hidden states go with their frame where stages compute on the CPU or share a card, and from
card to card by NCCL otherwise (transport_wire.py). Each stage calls the next one twice, for frames and for chunks, and the
last one calls stage 0, for answers. When any connection ends, the stages at both of its ends close all of theirs: a stage
that dies is noticed by all, at once. A stage that stands still is not noticed here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from qsa.actors.transport import LOCALHOST, TransportClosed, TransportSpec, TransportStats
from qsa.actors.transport_chunks import ChunkReceiver, ChunkSender, ChunkTicket
from qsa.actors.transport_lanes import FrameReceiver, FrameSender
from qsa.actors.transport_link import ANSWERS, CHUNKS, FRAMES, Link, Listener, call, watch
from qsa.actors.transport_wire import GLOO, SOCKET, Groups, negotiate
from qsa.errors import ConfigError

ANSWER = 3
LOOK_OUT_S = 0.05  # longer than the other stages' steps take
_JOIN_S = 2.0


class P2PTransport:
    """State: the connections, what uses them, and why they were closed."""

    name = "p2p"

    def __init__(self, spec: TransportSpec, host: str = LOCALHOST, backend: str | None = None) -> None:
        """Open the listener, at this node's address `host`.

        backend: what carries hidden states, `sockets`, `gloo` or `nccl`; default: what suits the two stages. gloo is here to
            compare with: nothing ends a wait in it but the other side's death or its time limit.
        """
        self._spec, self._host, self._backend = spec, host, backend
        self._device = torch.device(spec.device)
        if self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        expected = [] if spec.is_first else [(FRAMES, spec.stage - 1), (CHUNKS, spec.stage - 1)]
        if spec.is_first and not spec.is_last:
            expected.append((ANSWERS, spec.num_stages - 1))
        self._listener = Listener(host, spec.secret, spec.epoch, expected)
        self._links: list[Link] = []
        self._groups: list[Groups] = []
        self._frames_out: FrameSender | None = None
        self._frames_in: FrameReceiver | None = None
        self._chunks_out: ChunkSender | None = None
        self._chunks_in: ChunkReceiver | None = None
        self._answers: Link | None = None
        self._aborting: list[threading.Thread] = []
        self._closing = threading.Lock()
        self._closed: str | None = None
        self._stats = TransportStats()
        self.wires: tuple[str, ...] = ()

    def address(self) -> str:
        return self._listener.address

    @property
    def stats(self) -> TransportStats:
        ends = (self._frames_out, self._chunks_out)
        self._stats.in_flight = sum(end.in_flight for end in ends if end is not None)
        return self._stats

    # setting up

    def connect(self, addresses: Sequence[str], next_stage: Any, first_stage: Any, timeout_s: float) -> None:
        spec, deadline = self._spec, time.monotonic() + timeout_s
        try:
            self._connect(addresses, deadline)
        except (OSError, RuntimeError, TransportClosed) as error:
            with self._closing:
                abandoned = self._closed
            self.close()
            if abandoned is not None:
                raise TransportClosed(abandoned) from None
            raise ConfigError(
                f"pipeline.transport is p2p, but stage {spec.stage} at {self._host} is not connected to the others after"
                f" {timeout_s:g} s: {str(error).splitlines()[0]}; let the stages' machines reach each other on any port, or set"
                " pipeline.transport to object_store"
            ) from None

    def _connect(self, addresses: Sequence[str], deadline: float) -> None:
        spec = self._spec

        def dial(stage: int, purpose: int) -> Link:
            link = call(addresses[stage], stage, purpose, spec.epoch, spec.secret, spec.stage, self._host, deadline)
            return self._own(link)

        frames, chunks = (None, None) if spec.is_last else (dial(spec.stage + 1, FRAMES), dial(spec.stage + 1, CHUNKS))
        if spec.is_last and not spec.is_first:
            self._answers = dial(0, ANSWERS)
        called = self._listener.links(deadline)
        for link in called.values():
            self._own(link)
        self._answers = called.get(ANSWERS, self._answers)
        # from the first stage to the last: where groups are made, each stage waits for the one before
        if FRAMES in called:
            groups, chunk_groups = self._wire(called[FRAMES], False, deadline)
            self._frames_in = FrameReceiver(called[FRAMES], groups, spec, self._device)
            self._chunks_in = ChunkReceiver(called[CHUNKS], chunk_groups, spec, self._device)
            self._chunks_in.start()
        if frames is not None and chunks is not None:
            groups, chunk_groups = self._wire(frames, True, deadline)
            self._frames_out = FrameSender(frames, groups, spec, self._device)
            self._chunks_out = ChunkSender(chunks, chunk_groups, spec, self._device)
            self._chunks_out.start()
        with self._closing:
            links = list(self._links)
        for link in links:
            link.set_timeout(None)
        if links:
            watch(links, lambda: self.abandon("the connection to another stage has ended"))
        self._check()  # it may have been abandoned since its last connection was made

    def _own(self, link: Link) -> Link:
        """Keep a new connection; it ends at once where the transport was abandoned meanwhile."""
        with self._closing:
            self._links.append(link)
            if self._closed is not None:
                link.shutdown()
        return link

    def _wire(self, link: Link, is_sender: bool, deadline: float) -> tuple[Groups | None, Groups | None]:
        """What carries hidden states of frames and of chunks between this stage and the other one of `link`."""
        left = max(1.0, deadline - time.monotonic())
        link.set_timeout(left)
        backend = negotiate(link, self._device, self._backend)
        self.wires = (*self.wires, backend)
        if backend == SOCKET:
            return None, None
        groups = []
        for count in (self._spec.lanes, 1):
            made = Groups(backend, link, is_sender=is_sender, host=self._host, count=count, device=self._device, timeout_s=left)
            groups.append(made)
            self._groups.append(made)
        return groups[0], groups[1]

    # chunks and bursts

    def pack(self, hidden: torch.Tensor) -> ChunkTicket:
        with self._counted("send_s"):
            assert self._chunks_out is not None, "there is no next stage"
            ticket = self._chunks_out.pack(hidden)
        self._count(len(hidden) * hidden.shape[1] * hidden.element_size())
        return ticket

    def unpack(self, packed: ChunkTicket) -> torch.Tensor:
        with self._counted("wait_s"):
            assert self._chunks_in is not None, "there is no stage before"
            return self._chunks_in.unpack(packed)

    def send(self, lane: int, header: bytes, hidden: torch.Tensor | None) -> None:
        with self._counted("send_s"):
            assert self._frames_out is not None, "there is no next stage"
            sent = self._frames_out.send(lane, header, hidden)
        self._count(sent)

    def has_frame(self) -> bool:
        return self._frames_in is not None and self._frames_in.has_frame

    def receive(self) -> tuple[bytes, torch.Tensor | None]:
        with self._counted("wait_s"):
            assert self._frames_in is not None, "there is no stage before"
            return self._frames_in.receive()

    def answer(self, data: bytes) -> None:
        with self._counted("send_s"):
            assert self._answers is not None, "one stage answers nobody"
            sent = self._answers.send(ANSWER, header=data)
        self._count(sent)

    def take_answer(self) -> bytes:
        with self._counted("wait_s"):
            assert self._answers is not None, "one stage is answered by nobody"
            if self._device.type == "cuda":  # which does nothing until its host has heard the tokens
                self._answers.look_out(LOOK_OUT_S)
            return self._answers.read().header

    def deliver(self, epoch: int, kind: str, header: bytes, packed: Any) -> bool:
        return False  # nothing comes by way of Ray

    @contextmanager
    def _counted(self, kind: str) -> Iterator[None]:
        """Time a call; once closed, raise why, whatever it was that failed."""
        began = time.perf_counter()
        self._check()
        try:
            yield
        except TransportClosed:
            self._check()
            raise
        setattr(self._stats, kind, getattr(self._stats, kind) + time.perf_counter() - began)

    def _check(self) -> None:
        if self._closed is not None:
            raise TransportClosed(self._closed)

    def _count(self, num_bytes: int) -> None:
        self._stats.sent_bytes += num_bytes
        self._stats.num_sent += 1

    # the end

    def abandon(self, reason: str = "abandoned") -> None:
        with self._closing:
            if self._closed is not None:
                return
            self._closed = f"the transport of stage {self._spec.stage} was closed: {reason}"
            links = list(self._links)
        self._listener.close()
        for link in links:
            link.shutdown()
        for end in (self._chunks_out, self._chunks_in):
            if end is not None:
                end.close(self._closed)
        for groups in self._groups:
            if groups.backend != GLOO:  # it may take its time, which only `close` has to wait for
                thread = threading.Thread(target=groups.abort, name="qsa-abort", daemon=True)
                self._aborting.append(thread)
                thread.start()

    def close(self) -> None:
        self.abandon("closed")
        assert self._closed is not None
        for end in (self._chunks_out, self._chunks_in):
            if end is not None:  # made since the transport was abandoned
                end.close(self._closed)
        for ending in (*self._aborting, self._chunks_out, self._chunks_in):
            if ending is not None:
                ending.join(_JOIN_S)
        with self._closing:
            links, self._links = self._links, []
        for link in links:
            link.close()
        for groups in self._groups:
            groups.close()
        self._groups.clear()
