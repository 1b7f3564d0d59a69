"""Chunks over one connection, beside the steps: a thread sends, a thread of the other side receives, two buffers on each.

A message carries a ticket; the bytes go meanwhile. What is sent has been computed, and with NCCL the two sides launch their
transfer only when both are ready, so that no kernel of it waits on a card.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import torch

from qsa.actors.transport import TransportClosed, TransportSpec
from qsa.actors.transport_link import Frame, Link
from qsa.actors.transport_wire import Groups, as_bytes, closed_by_torch, mark, on_side, side_stream
from qsa.link_needs import IN_FLIGHT

CHUNK = 2
_READY = 1


@dataclass(frozen=True)
class ChunkTicket:
    """What a message carries for a chunk: its number on this connection, and its rows."""

    number: int
    rows: int


class _ChunkEnd:
    """What both ends have: two buffers, a thread, a condition, and why it ended."""

    def __init__(self, link: Link, groups: Groups | None, spec: TransportSpec, device: torch.device, name: str) -> None:
        self._link, self._groups, self._device = link, groups, device
        shape = (IN_FLIGHT, spec.prefill_chunk, spec.hidden_size)
        dtype = getattr(torch, spec.dtype)
        self._row_bytes = spec.hidden_size * dtype.itemsize
        self._buffers = torch.empty(shape, dtype=dtype, device=device)
        self._pinned: torch.Tensor | None = None
        if groups is None and device.type == "cuda":
            self._pinned = torch.empty(shape, dtype=dtype, pin_memory=True)
        self._changed = threading.Condition()
        self._closed: str | None = None
        self._stream = side_stream(device)
        self._thread = threading.Thread(target=self._run, name=f"qsa-chunks-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a thread begins with card 0
            while True:
                self._move_one()
        except (TransportClosed, RuntimeError) as error:
            self.close(str(error).splitlines()[0])

    def _move_one(self) -> None:
        raise NotImplementedError

    def _finish(self) -> None:
        """Wait, in the chunks' thread, for what its stream does."""
        if self._stream is not None:
            self._stream.synchronize()

    def _check(self) -> None:
        if self._closed is not None:
            raise TransportClosed(self._closed)

    def close(self, reason: str) -> None:
        with self._changed:
            if self._closed is None:
                self._closed = reason
            self._changed.notify_all()

    def join(self, timeout_s: float) -> None:
        if self._thread.is_alive():
            self._thread.join(timeout_s)


class ChunkSender(_ChunkEnd):
    """State: chunks that were packed and have not gone yet, and their buffers."""

    def __init__(self, link: Link, groups: Groups | None, spec: TransportSpec, device: torch.device) -> None:
        super().__init__(link, groups, spec, device, "out")
        self._queue: deque[tuple[ChunkTicket, torch.cuda.Event | None]] = deque()
        self._num = 0
        self._num_gone = 0

    @property
    def in_flight(self) -> int:
        return self._num - self._num_gone

    def pack(self, hidden: torch.Tensor) -> ChunkTicket:
        """Wait for a buffer, copy [n, hidden_size] to it, and let it go."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed is not None or self.in_flight < IN_FLIGHT)
            self._check()
        ticket = ChunkTicket(self._num, len(hidden))
        self._buffers[ticket.number % IN_FLIGHT, : ticket.rows].copy_(hidden)
        ready = mark(self._device)
        with self._changed:
            self._num += 1
            self._queue.append((ticket, ready))
            self._changed.notify_all()
        return ticket

    def _move_one(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed is not None or bool(self._queue))
            self._check()
            ticket, ready = self._queue.popleft()
        if ready is not None:
            ready.synchronize()
        slot = ticket.number % IN_FLIGHT
        buffer = self._buffers[slot, : ticket.rows]
        if self._groups is None:
            if self._pinned is not None:
                with on_side(self._stream, ready):
                    self._pinned[slot, : ticket.rows].copy_(buffer, non_blocking=True)
                self._finish()
                buffer = self._pinned[slot, : ticket.rows]
            self._link.send(CHUNK, 0, ticket.rows, payload=as_bytes(buffer))
        else:
            self._link.send(CHUNK, 0, ticket.rows)
            self._link.read_signals(wait=True)  # the other side has a buffer for it
            with closed_by_torch(), on_side(self._stream, ready):
                self._groups.send(0, buffer).wait()
            self._finish()
        with self._changed:
            self._num_gone += 1
            self._changed.notify_all()


class ChunkReceiver(_ChunkEnd):
    """State: chunks that came and were not taken; the one that is being read; when its buffer is free again."""

    def __init__(self, link: Link, groups: Groups | None, spec: TransportSpec, device: torch.device) -> None:
        super().__init__(link, groups, spec, device, "in")
        self._max_rows = spec.prefill_chunk
        self._num_come = 0
        self._first_held = 0  # chunks before it have been read, and their buffers are free
        self._free: torch.cuda.Event | None = None  # the point where the readers of the last freed buffer were done

    def unpack(self, ticket: ChunkTicket) -> torch.Tensor:
        """The chunk of this ticket, waiting for it; chunks before it, read or not, are dropped."""
        with self._changed:
            if self._first_held < ticket.number:
                self._first_held, self._free = ticket.number, mark(self._device)
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed is not None or self._num_come > ticket.number)
            self._check()
        return self._buffers[ticket.number % IN_FLIGHT, : ticket.rows]

    def _move_one(self) -> None:
        frame = self._link.read()
        if frame.kind != CHUNK or frame.rows > self._max_rows:
            raise TransportClosed(f"a chunk of kind {frame.kind} and {frame.rows} rows was not expected")
        with self._changed:
            self._changed.wait_for(lambda: self._closed is not None or self._num_come - self._first_held < IN_FLIGHT)
            self._check()
            free = self._free
        self._fill(self._num_come % IN_FLIGHT, frame, free)
        with self._changed:
            self._num_come += 1
            self._changed.notify_all()

    def _fill(self, slot: int, frame: Frame, free: torch.cuda.Event | None) -> None:
        buffer = self._buffers[slot, : frame.rows]
        if self._groups is not None:
            with closed_by_torch(), on_side(self._stream, free):
                self._link.signal(_READY)
                self._groups.receive(0, buffer).wait()
            self._finish()
            return
        if frame.payload_bytes != frame.rows * self._row_bytes:
            raise TransportClosed(f"{frame.rows} rows came as {frame.payload_bytes} bytes")
        landing = buffer if self._pinned is None else self._pinned[slot, : frame.rows]
        self._link.read_into(as_bytes(landing))
        if self._pinned is not None:
            with on_side(self._stream, free):
                buffer.copy_(landing, non_blocking=True)
            self._finish()
