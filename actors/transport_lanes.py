"""Frames of a burst over one connection: what a sending and a receiving stage keep for them, static buffers a lane."""

from __future__ import annotations

import threading
from typing import Any

import torch

from qsa.actors.transport import TransportClosed, TransportSpec
from qsa.actors.transport_link import Link
from qsa.actors.transport_wire import Groups, as_bytes, closed_by_torch, mark, on_side, side_stream
from qsa.link_needs import IN_FLIGHT, LANDING

FRAME = 1


class FrameSender:
    """Sends frames; two a lane are under way at most. State: what was sent in each lane, and what the other side took.

    With groups the hidden states are copied to one of two static buffers a lane and go from there on a side stream, so that
    the host goes on at once; over the connection itself they are gone when `send` returns.
    """

    def __init__(self, link: Link, groups: Groups | None, spec: TransportSpec, device: torch.device) -> None:
        self._link, self._groups, self._device = link, groups, device
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        self._sent, self._taken = [0] * spec.lanes, [0] * spec.lanes
        self._counting = threading.Lock()  # of `_taken` and whoever reads for it
        shape = (spec.lanes, IN_FLIGHT, spec.max_rows, spec.hidden_size)
        is_card = device.type == "cuda"
        self._buffers: torch.Tensor | None = None
        if groups is not None:
            self._buffers = torch.empty(shape, dtype=self._dtype, device=device)
        elif is_card:
            self._buffers = torch.empty(shape, dtype=self._dtype, pin_memory=True)
        self._works: dict[tuple[int, int], Any] = {}
        self._streams = [side_stream(device) for _ in range(spec.lanes)]

    @property
    def in_flight(self) -> int:
        """Frames that were sent and not taken. Any thread."""
        if self._counting.acquire(blocking=False):  # else the step's thread is waiting for what this would read
            try:
                self._hear_taken(wait=False)
            except TransportClosed:
                pass
            finally:
                self._counting.release()
        return sum(self._sent) - sum(self._taken)

    def send(self, lane: int, header: bytes, hidden: torch.Tensor | None) -> int:
        """Returns the bytes that were sent."""
        self._count_taken(lane)
        slot = self._sent[lane] % IN_FLIGHT
        self._sent[lane] += 1
        if hidden is None:
            return self._link.send(FRAME, lane, 0, header)
        rows = len(hidden)
        if self._groups is None:
            payload = as_bytes(self._on_host(lane, slot, hidden))
            return self._link.send(FRAME, lane, rows, header, payload)
        assert self._buffers is not None
        buffer = self._buffers[lane, slot, :rows]
        before = self._works.get((lane, slot))
        with closed_by_torch():
            if before is not None:
                before.wait()  # on a card only its stream waits
            buffer.copy_(hidden)
            ready = mark(self._device)
            sent = self._link.send(FRAME, lane, rows, header)
            with on_side(self._streams[lane], ready):
                self._works[lane, slot] = self._groups.send(lane, buffer)
        return sent + buffer.nbytes

    def _on_host(self, lane: int, slot: int, hidden: torch.Tensor) -> torch.Tensor:
        if self._buffers is None:
            return hidden.to(self._dtype).contiguous()
        buffer = self._buffers[lane, slot, : len(hidden)]
        buffer.copy_(hidden, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()
        return buffer

    def _count_taken(self, lane: int) -> None:
        """Hear what was taken; wait while two frames of the lane have not been."""
        with self._counting:
            self._hear_taken(wait=False)
            while self._sent[lane] - self._taken[lane] >= IN_FLIGHT:
                self._hear_taken(wait=True)

    def _hear_taken(self, *, wait: bool) -> None:
        for lane in self._link.read_signals(wait=wait):
            self._taken[lane] += 1


class FrameReceiver:
    """Receives frames in their order. State: how many tensors came in each lane, and where their readers are."""

    def __init__(self, link: Link, groups: Groups | None, spec: TransportSpec, device: torch.device) -> None:
        self._link, self._groups, self._device = link, groups, device
        self._max_rows = spec.max_rows
        shape = (spec.lanes, LANDING, spec.max_rows, spec.hidden_size)
        dtype = getattr(torch, spec.dtype)
        self._row_bytes = spec.hidden_size * dtype.itemsize
        self._buffers = torch.empty(shape, dtype=dtype, device=device)
        self._pinned = None
        if groups is None and device.type == "cuda":
            self._pinned = torch.empty(shape, dtype=dtype, pin_memory=True)
        self._num = [0] * spec.lanes
        self._copied: dict[tuple[int, int], torch.cuda.Event | None] = {}
        self._marks: list[torch.cuda.Event | None] = [None] * spec.lanes
        self._streams = [side_stream(device) for _ in range(spec.lanes)]

    @property
    def has_frame(self) -> bool:
        return self._link.has_something

    def receive(self) -> tuple[bytes, torch.Tensor | None]:
        frame = self._link.read()
        if frame.kind != FRAME or frame.lane >= len(self._num) or frame.rows > self._max_rows:
            raise TransportClosed(f"a frame of kind {frame.kind}, lane {frame.lane} and {frame.rows} rows was not expected")
        tensor = self._receive_rows(frame.lane, frame.rows, frame.payload_bytes) if frame.rows else None
        self._link.signal(frame.lane)
        return frame.header, tensor

    def _receive_rows(self, lane: int, rows: int, payload_bytes: int) -> torch.Tensor:
        slot = self._num[lane] % LANDING
        self._num[lane] += 1
        buffer = self._buffers[lane, slot, :rows]
        if self._groups is not None:
            # The buffer's reader was done when this lane's `receive` before this one was called: only that point is waited
            # for, so bytes arrive while the stage computes.
            with closed_by_torch():
                with on_side(self._streams[lane], self._marks[lane]):
                    work = self._groups.receive(lane, buffer)
                self._marks[lane] = mark(self._device)
                work.wait()  # on a card only its stream waits
            return buffer
        if payload_bytes != rows * self._row_bytes:
            raise TransportClosed(f"{rows} rows came as {payload_bytes} bytes, not {rows * self._row_bytes}")
        if self._pinned is None:
            self._link.read_into(as_bytes(buffer))
            return buffer
        copied = self._copied.get((lane, slot))
        if copied is not None:
            copied.synchronize()
        pinned = self._pinned[lane, slot, :rows]
        self._link.read_into(as_bytes(pinned))
        buffer.copy_(pinned, non_blocking=True)
        self._copied[lane, slot] = mark(self._device)
        return buffer
