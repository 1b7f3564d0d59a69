"""Connections between stages: TCP with a shared secret, frames in their order, and a close that wakes whoever waits.

Both sides prove that they know the secret (HMAC-SHA256 of the other's random number) before anything else is read, and the
one that calls says for what: epoch, its stage and the purpose. What follows is neither encrypted nor signed: stages belong
on a network of their own.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

from qsa.actors.transport import TransportClosed

HANDSHAKE_S = 5.0
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED)  # a later connection can be taken
_PASSING_S = 0.05
_MAGIC = b"qsa stages 1"
_NONCE = 32
_HELLO = struct.Struct("!QHH")  # epoch, stage, purpose
_FRAME = struct.Struct("!BHIIQ")  # kind, lane, rows, bytes of the header, of the payload

FRAMES, CHUNKS, ANSWERS = range(3)  # purposes of a connection


class Frame:
    """The head of a frame as it was read; its payload, if any, is still to be read."""

    __slots__ = ("header", "kind", "lane", "payload_bytes", "rows")

    def __init__(self, kind: int, lane: int, rows: int, header: bytes, payload_bytes: int) -> None:
        self.kind, self.lane, self.rows, self.header, self.payload_bytes = kind, lane, rows, header, payload_bytes


class Link:
    """One connection: one thread sends and one reads, any thread may close it."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._peer = connection, peer
        self.peer_host: str = connection.getpeername()[0]
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def set_timeout(self, seconds: float | None) -> None:
        """Longest wait of a single call, after which the connection counts as closed; None: no limit."""
        self._socket.settimeout(seconds)

    def send(self, kind: int, lane: int = 0, rows: int = 0, header: bytes = b"", payload: memoryview | None = None) -> int:
        """Send a frame and wait until the system has it; returns its bytes."""
        num_bytes = 0 if payload is None else payload.nbytes
        head = _FRAME.pack(kind, lane, rows, len(header), num_bytes) + header
        try:
            if payload is None:
                self._socket.sendall(head)
            else:
                sent = self._socket.sendmsg([head, payload])  # one call of the system for what fits
                if sent < len(head):
                    self._socket.sendall(head[sent:])
                if sent < len(head) + num_bytes:
                    self._socket.sendall(payload[max(0, sent - len(head)) :])
        except OSError as error:
            raise self._gone(error) from None
        return len(head) + num_bytes

    def read(self) -> Frame:
        """The next frame's head, waiting for it."""
        kind, lane, rows, header_bytes, payload_bytes = _FRAME.unpack(self.read_exactly(_FRAME.size))
        return Frame(kind, lane, rows, self.read_exactly(header_bytes) if header_bytes else b"", payload_bytes)

    def read_exactly(self, count: int) -> bytes:
        data = bytearray(count)
        self.read_into(memoryview(data))
        return bytes(data)

    def read_into(self, view: memoryview) -> None:
        """Fill `view`, waiting for all of it."""
        done = 0
        try:
            while done < len(view):
                got = self._socket.recv_into(view[done:], 0, socket.MSG_WAITALL)
                if got == 0:
                    raise self._gone(None)
                done += got
        except OSError as error:
            raise self._gone(error) from None

    @property
    def has_something(self) -> bool:
        """Whether a read finds something, if only that the connection has ended. Other threads may run meanwhile."""
        return bool(self._poll.poll(0))

    def look_out(self, seconds: float) -> None:
        """Wait for `has_something` without sleeping, at most so long. (A thread that sleeps, be it for 0 s, wakes 0.1 ms late.)

        So the thread keeps a core to itself meanwhile.
        """
        deadline = time.perf_counter() + seconds
        while not self.has_something and time.perf_counter() < deadline:
            pass

    def read_signals(self, wait: bool) -> bytes:
        """Single bytes that the other side has sent with `signal`: all that are there; with `wait`, at least one."""
        try:
            data = self._socket.recv(4096, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""
        except OSError as error:
            raise self._gone(error) from None
        if not data:
            raise self._gone(None)
        return data

    def signal(self, value: int) -> None:
        """Send a single byte against the direction of the frames."""
        try:
            self._socket.sendall(bytes([value]))
        except OSError as error:
            raise self._gone(error) from None

    def shutdown(self) -> None:
        """End it in both directions; whoever waits in it returns at once, here and there."""
        with contextlib.suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shutdown()
        self._socket.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    def _gone(self, error: OSError | None) -> TransportClosed:
        return TransportClosed(f"the connection to {self._peer} is closed" + (f": {error}" if error is not None else ""))


class Listener:
    """Takes the connections that the other stages make to this one, in a thread of its own, until it has all of them."""

    def __init__(self, host: str, secret: bytes, epoch: int, expected: Sequence[tuple[int, int]]) -> None:
        """expected: purpose and stage of every connection that belongs here; others are refused."""
        self._secret, self._epoch = secret, epoch
        self._missing = set(expected)
        self._links: dict[int, Link] = {}  # by purpose
        self._closed = False
        self._changed = threading.Condition()
        self._socket = socket.create_server((host, 0), backlog=64)
        self._host = host
        self._port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="qsa-listener", daemon=True)
        if self._missing:
            self._thread.start()

    @property
    def address(self) -> str:
        return f"{self._host}:{self._port}"

    def links(self, deadline: float) -> dict[int, Link]:
        """All connections by purpose, waiting for them until `deadline` (time.monotonic); then nothing listens any more.

        Raises:
            TimeoutError: some are missing.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._missing, max(0.0, deadline - time.monotonic()))
            missing = sorted({stage for _, stage in self._missing})
        self.close()
        if missing:
            raise TimeoutError(f"stage {' and '.join(map(str, missing))} did not connect to {self.address}")
        return self._links

    def _accept(self) -> None:
        while self._missing:
            try:
                connection, peer = self._socket.accept()
            except OSError as error:
                if error.errno not in _PASSING:
                    return  # closed
                time.sleep(_PASSING_S)
                continue
            # one thread each, so that a stranger who says nothing keeps nobody waiting
            try:
                threading.Thread(target=self._greet, args=(connection, f"{peer[0]}:{peer[1]}"), daemon=True).start()
            except RuntimeError:  # no more threads can be started
                connection.close()

    def _greet(self, connection: socket.socket, peer: str) -> None:
        try:
            deadline = time.monotonic() + HANDSHAKE_S
            connection.settimeout(HANDSHAKE_S)
            nonce = secrets.token_bytes(_NONCE)
            connection.sendall(_MAGIC + nonce)
            message = _read_handshake(connection, _NONCE + _HELLO.size + 32, deadline)
            other, hello, proof = message[:_NONCE], message[_NONCE:-32], message[-32:]
            epoch, stage, purpose = _HELLO.unpack(hello)
            if not hmac.compare_digest(proof, _proof(self._secret, b"calls", nonce + other + hello)):
                raise ConnectionRefusedError("another secret")
            if epoch != self._epoch:
                raise ConnectionRefusedError("another epoch")
            with self._changed:
                if (purpose, stage) not in self._missing:
                    raise ConnectionRefusedError("nobody expected")
                connection.sendall(_proof(self._secret, b"called", other + nonce + hello))
                self._links[purpose] = Link(connection, f"stage {stage} at {peer}")
                self._missing.discard((purpose, stage))
                self._changed.notify_all()
        except (OSError, struct.error):
            connection.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def call(address: str, stage: int, purpose: int, epoch: int, secret: bytes, own: int, host: str, deadline: float) -> Link:
    """Connect to the listener of `stage`; own: the stage that calls, host: its address, which it calls from.

    Raises:
        OSError: it cannot be reached until `deadline`, or does not know the secret, or expects someone else.
    """
    name, _, port = address.rpartition(":")
    left = max(0.1, deadline - time.monotonic())
    connection = socket.create_connection((name, int(port)), timeout=left, source_address=(host, 0))
    try:
        connection.settimeout(min(left, HANDSHAKE_S))
        deadline = time.monotonic() + min(left, HANDSHAKE_S)
        greeting = _read_handshake(connection, len(_MAGIC) + _NONCE, deadline)
        if not greeting.startswith(_MAGIC):
            raise ConnectionRefusedError(f"what listens at {address} is no stage")
        nonce, other = greeting[len(_MAGIC) :], secrets.token_bytes(_NONCE)
        hello = _HELLO.pack(epoch, own, purpose)
        connection.sendall(other + hello + _proof(secret, b"calls", nonce + other + hello))
        try:
            proof = _read_handshake(connection, 32, deadline)
        except ConnectionError:
            raise ConnectionRefusedError(f"stage {stage} at {address} refused stage {own}") from None
        if not hmac.compare_digest(proof, _proof(secret, b"called", other + nonce + hello)):
            raise ConnectionRefusedError(f"what listens at {address} does not know the secret")
    except BaseException:
        connection.close()
        raise
    return Link(connection, f"stage {stage} at {address}")


def _proof(secret: bytes, role: bytes, message: bytes) -> bytes:
    return hmac.new(secret, role + message, hashlib.sha256).digest()


def _read_handshake(connection: socket.socket, count: int, deadline: float) -> bytes:
    """So many bytes until `deadline` (time.monotonic), also from somebody who sends one now and then."""
    data = b""
    while len(data) < count:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionResetError("closed in the middle of the handshake")
        data += more
    return data


def watch(links: Sequence[Link], on_hangup: Callable[[], None]) -> threading.Thread:
    """Call `on_hangup` as soon as one of the connections ends, whoever ended it; from a thread that then ends too.

    links: at least one; without any it would never end.
    """
    poll = select.poll()
    for link in links:
        poll.register(link.fileno(), select.POLLRDHUP)  # and, always, errors

    def wait() -> None:
        poll.poll()
        on_hangup()

    thread = threading.Thread(target=wait, name="qsa-hangups", daemon=True)
    thread.start()
    return thread
