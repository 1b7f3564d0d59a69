"""The transport on Ray's object store: chunks as numpy in object refs, frames of a burst as calls into the receiver's inbox."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from qsa.actors.transport import TransportClosed, TransportSpec, TransportStats

SLICE_S = 0.05  # longest sleep of a wait that an abandoned transport must end
PROBE_S = 0.3  # a stage that has waited so long asks whether the others are still there
LINK = {"concurrency_group": "link"}
_NUMPY_VIEWS = {torch.bfloat16: torch.int16}  # types that numpy does not have, and a view of the same bytes


class Inbox:
    """What has been delivered and not taken: frames in their order, one waiting a lane, and answers.

    Consistent under its condition: the two queues, how many frames of each lane wait, and why it was closed.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._frames: deque[tuple[int, bytes, Any]] = deque()
        self._answers: deque[bytes] = deque()
        self._waiting: dict[int, int] = {}
        self._closed: str | None = None

    def put_frame(self, lane: int, header: bytes, packed: Any) -> bool:
        """Wait until no frame of the lane waits, then add this one; False when the inbox is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed is not None or not self._waiting.get(lane))
            if self._closed is not None:
                return False
            self._waiting[lane] = 1
            self._frames.append((lane, header, packed))
            self._changed.notify_all()
        return True

    def put_answer(self, data: bytes) -> bool:
        with self._changed:
            if self._closed is not None:
                return False
            self._answers.append(data)
            self._changed.notify_all()
        return True

    @property
    def has_frame(self) -> bool:
        return bool(self._frames) or self._closed is not None

    def take_frame(self, idle: Callable[[], None]) -> tuple[bytes, Any]:
        """The oldest frame; `idle` is called whenever it has not come for PROBE_S."""
        lane, header, packed = self._take(self._frames, idle)
        with self._changed:
            self._waiting[lane] = 0
            self._changed.notify_all()
        return header, packed

    def take_answer(self, idle: Callable[[], None]) -> bytes:
        return self._take(self._answers, idle)

    def _take(self, queue: deque[Any], idle: Callable[[], None]) -> Any:
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._closed is not None or bool(queue), PROBE_S):
                    self.check()
                    return queue.popleft()
            idle()

    def check(self) -> None:
        """Raise TransportClosed when it is."""
        if self._closed is not None:
            raise TransportClosed(self._closed)

    def close(self, reason: str) -> None:
        with self._changed:
            if self._closed is None:
                self._closed = reason
            self._changed.notify_all()


class ObjectStoreTransport:
    """Numpy views in Ray's object store: any number of hosts, no set-up, one copy on receipt.

    A tensor put in the store as such is copied ten times slower than a numpy view of its bytes. What comes out of the
    store is shared memory that others may read too, so `unpack` copies it before a layer can write to it. To and from a
    card the bytes pass through pinned memory, at the bus's full rate; PyTorch keeps that memory for the next time.

    A frame is a call of `deliver` on the next stage, an answer one on stage 0. A frame's call ends when the frame before it
    in its lane was taken, and the next one is sent only after that, so two are under way at most.
    """

    name = "object_store"
    wires: tuple[str, ...] = ()

    def __init__(self, spec: TransportSpec) -> None:
        self._spec = spec
        self._dtype, self._device = getattr(torch, spec.dtype), torch.device(spec.device)
        self._inbox = Inbox()
        self._next: Any = None
        self._first: Any = None
        self._calls: dict[int, Future[bool]] = {}  # the last frame of each lane
        self._probes: list[Future[bool]] = []
        self._counting = threading.Lock()
        self.stats = TransportStats()

    def address(self) -> str:
        return ""

    def connect(self, addresses: Sequence[str], next_stage: Any, first_stage: Any, timeout_s: float) -> None:
        self._next, self._first = next_stage, first_stage

    # chunks

    def pack(self, hidden: torch.Tensor) -> Any:
        """[n, hidden_size] as an array of the same bytes, all there when this returns."""
        with self._sending(hidden.nbytes):
            return self._to_array(hidden)

    def unpack(self, packed: Any) -> torch.Tensor:
        return self._from_array(packed)

    def _to_array(self, hidden: torch.Tensor) -> np.ndarray:
        hidden = hidden.to(self._dtype)
        if hidden.device.type == "cuda":
            pinned = torch.empty(hidden.shape, dtype=self._dtype, pin_memory=True)
            pinned.copy_(hidden, non_blocking=True)
            torch.cuda.current_stream(hidden.device).synchronize()
            hidden = pinned
        return hidden.contiguous().view(_NUMPY_VIEWS.get(self._dtype, self._dtype)).numpy()

    def _from_array(self, packed: np.ndarray) -> torch.Tensor:
        """[n, hidden_size] in memory of its own; on a card in the order of the stream's work."""
        if self._device.type != "cuda":
            return torch.from_numpy(packed.copy()).view(self._dtype)
        pinned = torch.empty(packed.shape, dtype=_NUMPY_VIEWS.get(self._dtype, self._dtype), pin_memory=True)
        np.copyto(pinned.numpy(), packed)
        return pinned.view(self._dtype).to(self._device, non_blocking=True)

    # bursts

    def send(self, lane: int, header: bytes, hidden: torch.Tensor | None) -> None:
        with self._sending(len(header) + (0 if hidden is None else hidden.nbytes)):
            before = self._calls.get(lane)
            if before is not None:
                self._wait(before)
            array = None if hidden is None else self._to_array(hidden)
            self._calls[lane] = self._call(self._next, f"frame{lane}", header, array)

    def has_frame(self) -> bool:
        if not self._inbox.has_frame:
            time.sleep(0)  # the thread that brings frames may run
        return self._inbox.has_frame

    def receive(self) -> tuple[bytes, torch.Tensor | None]:
        began = time.perf_counter()
        header, array = self._inbox.take_frame(self._probe)
        self.stats.wait_s += time.perf_counter() - began
        return header, None if array is None else self._from_array(array)

    def answer(self, data: bytes) -> None:
        with self._sending(len(data)):
            self._call(self._first, "answer", data, None)

    def take_answer(self) -> bytes:
        began = time.perf_counter()
        data = self._inbox.take_answer(self._probe)
        self.stats.wait_s += time.perf_counter() - began
        return data

    def deliver(self, epoch: int, kind: str, header: bytes, packed: Any) -> bool:
        if epoch != self._spec.epoch:
            return False
        if kind == "answer":
            return self._inbox.put_answer(header)
        if kind == "probe":
            return True
        assert kind.startswith("frame"), f"a delivery of the kind {kind!r}"
        return self._inbox.put_frame(int(kind.removeprefix("frame")), header, packed)

    def abandon(self, reason: str = "abandoned") -> None:
        self._inbox.close(f"the transport of stage {self._spec.stage} was closed: {reason}")

    def close(self) -> None:
        self.abandon("closed")
        self._next = self._first = None
        self._calls.clear()

    # calls of other stages

    def _call(self, stage: Any, kind: str, header: bytes, array: np.ndarray | None) -> Future[bool]:
        call: Future[bool] = stage.deliver.options(**LINK).remote(self._spec.epoch, kind, header, array).future()
        if kind.startswith("frame"):
            self._count_in_flight(1)
        call.add_done_callback(lambda done: self._ended(kind, done))
        return call

    def _ended(self, kind: str, call: Future[bool]) -> None:
        """A delivery came back: whoever waits here learns that the other stage is gone, or has gone on without us."""
        if kind.startswith("frame"):
            self._count_in_flight(-1)
        error = call.exception()
        if error is not None:
            self._inbox.close(f"another stage cannot be reached: {type(error).__name__}: {error}".split("\n")[0])
        elif not call.result():
            self._inbox.close("another stage is not in this epoch any more")

    def _wait(self, call: Future[bool]) -> None:
        while not call.done():
            self._inbox.check()
            try:
                call.exception(SLICE_S)
            except TimeoutError:
                continue
        self._inbox.check()

    def _probe(self) -> None:
        """Nothing has come for a while: ask the others whether they are there; `_ended` hears what becomes of it."""
        if all(probe.done() for probe in self._probes):
            self._probes = [self._call(stage, "probe", b"", None) for stage in (self._next, self._first) if stage is not None]

    def _count_in_flight(self, change: int) -> None:
        with self._counting:  # calls end in a thread of Ray's
            self.stats.in_flight += change

    @contextmanager
    def _sending(self, num_bytes: int) -> Iterator[None]:
        began, stats = time.perf_counter(), self.stats
        self._inbox.check()
        yield
        stats.sent_bytes += num_bytes
        stats.num_sent += 1
        stats.send_s += time.perf_counter() - began
