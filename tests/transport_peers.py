"""Transports of several stages in one process, connected, for tests; and stand-ins for the actor handles they call."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from qsa.actors.transport import Transport, TransportSpec
from qsa.actors.transport_p2p import P2PTransport
from qsa.actors.transport_store import ObjectStoreTransport

KINDS = ["object_store", "sockets", "gloo"]
HIDDEN_SIZE, MAX_ROWS, PREFILL_CHUNK = 48, 5, 64


def make_spec(kind: str, stage: int, num_stages: int = 2, **changes: Any) -> TransportSpec:
    values = {
        "name": kind,
        "stage": stage,
        "num_stages": num_stages,
        "dtype": "float32",
        "device": "cpu",
        "hidden_size": HIDDEN_SIZE,
        "lanes": 2,
        "max_rows": MAX_ROWS,
        "prefill_chunk": PREFILL_CHUNK,
        "epoch": 7,
        "secret": b"known to all stages",
    }
    return TransportSpec(**values | changes)


class LocalStage:
    """Stands in for a stage's actor handle: calls of `deliver` run one after the other in a thread of their own."""

    def __init__(self, transport: ObjectStoreTransport) -> None:
        self._transport = transport
        self._thread = ThreadPoolExecutor(1)
        self.error: Exception | None = None  # what every call raises from now on
        self.deliver = self

    def options(self, **options: Any) -> LocalStage:
        assert options == {"concurrency_group": "link"}
        return self

    def remote(self, epoch: int, kind: str, header: bytes, packed: Any) -> _Ref:
        if packed is not None:
            packed = packed.copy()
            packed.flags.writeable = False  # as it comes out of the object store
        return _Ref(self._thread.submit(self._call, epoch, kind, header, packed))

    def _call(self, *args: Any) -> bool:
        if self.error is not None:
            raise self.error
        return self._transport.deliver(*args)


class _Ref:
    def __init__(self, call: Future[bool]) -> None:
        self._call = call

    def future(self) -> Future[bool]:
        return self._call


def make_transport(kind: str, spec: TransportSpec) -> Any:
    """kind: object_store, p2p, or what shall carry the hidden states of p2p."""
    if kind == "object_store":
        return ObjectStoreTransport(spec)
    return P2PTransport(spec, "127.0.0.1", None if kind == "p2p" else kind)


def connect_all(transports: list[Any], handles: list[Any] | None = None, timeout_s: float = 20.0) -> None:
    """Let all transports of a pipeline connect, each in a thread."""
    handles = handles or [LocalStage(t) if isinstance(t, ObjectStoreTransport) else None for t in transports]
    addresses = [t.address() for t in transports]
    with ThreadPoolExecutor(len(transports)) as threads:
        calls = [
            threads.submit(
                t.connect,
                addresses,
                handles[stage + 1] if stage + 1 < len(transports) else None,
                handles[0] if stage else None,
                timeout_s,
            )
            for stage, t in enumerate(transports)
        ]
        for call in calls:
            call.result()


def make_pipeline(kind: str, num_stages: int = 2, **changes: Any) -> list[Transport]:
    transports = [make_transport(kind, make_spec(kind, stage, num_stages, **changes)) for stage in range(num_stages)]
    connect_all(transports)
    return transports


class Caught(threading.Thread):
    """A call in a thread: its result or what it raised, when it has ended."""

    def __init__(self, call: Any, *args: Any) -> None:
        super().__init__(daemon=True)
        self._call, self._args = call, args
        self.result: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._call(*self._args)
        except BaseException as error:
            self.error = error

    def ended(self, timeout_s: float) -> bool:
        self.join(timeout_s)
        return not self.is_alive()
