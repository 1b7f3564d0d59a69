"""What carries the bytes of hidden states beside a connection's frames: the connection itself, or torch.distributed groups.

Groups are made without a global group, two processes each, so any number of engines can be in a process's life, one after
another. NCCL serialises what is sent and received in one communicator, so each lane and the chunks have a group of their own.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from qsa.actors.transport import TransportClosed
from qsa.actors.transport_link import Link

dist: Any = torch.distributed  # its annotations know nothing of groups that are not global
SETUP = 255  # kind of the frames that are exchanged before anything else
SOCKET, GLOO, NCCL = "sockets", "gloo", "nccl"


def negotiate(link: Link, device: torch.device, backend: str | None) -> str:
    """Agree with the other side on what carries the bytes.

    NCCL where both sides have a card each, and not the same one, which NCCL refuses; else the connection itself. backend: what
    to take where that is asked for.
    """
    own = backend or _card(device)
    link.send(SETUP, header=own.encode())
    other = link.read().header.decode()
    if backend is not None:
        return backend if other == own else SOCKET
    return NCCL if own and other and own != other else SOCKET


def _card(device: torch.device) -> str:
    if device.type != "cuda" or not dist.is_nccl_available():
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


class Groups:
    """`count` process groups of two, for one direction: rank 0 sends, rank 1 receives."""

    def __init__(
        self, backend: str, link: Link, *, is_sender: bool, host: str, count: int, device: torch.device, timeout_s: float
    ) -> None:
        """Make the groups together with the other side, and send something through each of them.

        Raises:
            RuntimeError: torch.distributed could not.
        """
        self.backend, self._rank, self._device = backend, 0 if is_sender else 1, device
        timeout = timedelta(seconds=timeout_s)
        self._store = _rendezvous(link, is_sender, host, timeout)
        self._groups = [self._make(dist.PrefixStore(f"group{i}", self._store), host, timeout) for i in range(count)]
        probe = torch.full((1, 8), 7.0 if is_sender else 0.0, device=device)
        for index in range(count):  # connections are made at the first use, which takes long
            (self.send if is_sender else self.receive)(index, probe).wait()
            self._settle(timeout_s)
        if not bool((probe == 7.0).all()):
            raise RuntimeError(f"{backend} delivered something else than was sent")

    def _settle(self, timeout_s: float) -> None:
        """Wait for the current stream, for some time only: a transfer whose other side is gone would last for ever."""
        done, deadline = mark(self._device), time.monotonic() + timeout_s
        while done is not None and not done.query():
            if time.monotonic() > deadline:
                self.abort()
                raise RuntimeError(f"{self.backend} has not delivered anything for {timeout_s:.0f} s")
            time.sleep(0.001)

    def _make(self, store: Any, host: str, timeout: timedelta) -> Any:
        if self.backend == GLOO:
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = timeout
            return dist.ProcessGroupGloo(store, self._rank, 2, options)
        # A peer that has died is noticed by its connection, and the group is aborted then: NCCL's own watchdog would end this
        # process with it. Multicast is of no use between two.
        for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
            os.environ.setdefault(name, "0")
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):  # no diary of every transfer: it takes time
            os.environ.setdefault(name, "0")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        options.is_high_priority_stream = True  # a transfer is short, and somebody waits for it
        return dist.ProcessGroupNCCL(store, self._rank, 2, options)

    def send(self, index: int, tensor: torch.Tensor) -> Any:
        return self._groups[index].send([tensor], 1, 0)

    def receive(self, index: int, tensor: torch.Tensor) -> Any:
        return self._groups[index].recv([tensor], 0, 0)

    def abort(self) -> None:
        """End what is under way, from any thread; NCCL only, gloo has no way to."""
        for group in list(self._groups):
            with contextlib.suppress(RuntimeError):
                group.abort()

    def close(self) -> None:
        """Drop the groups; the other side does so too, or is gone."""
        self._groups.clear()


def _rendezvous(link: Link, is_sender: bool, host: str, timeout: timedelta) -> Any:
    """A store that both sides see. The receiving side has it, on a port of its own at this node's address."""
    if is_sender:
        port = int(link.read().header)
        return dist.TCPStore(link.peer_host, port, 2, False, timeout, wait_for_workers=False)
    listener = socket.create_server((host, 0), backlog=8)
    port = listener.getsockname()[1]
    store = dist.TCPStore(host, port, 2, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())
    link.send(SETUP, header=str(port).encode())
    return store


@contextlib.contextmanager
def closed_by_torch() -> Iterator[None]:
    """What torch.distributed says when the other side is gone, as TransportClosed."""
    try:
        yield
    except RuntimeError as error:
        raise TransportClosed(f"torch.distributed: {str(error).splitlines()[0]}") from None


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, without a copy."""
    return tensor.view(torch.uint8).view(-1).numpy().data


def mark(device: torch.device) -> torch.cuda.Event | None:
    """The point that the current stream's work has come to; nothing on the CPU, where work is done when a call returns."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None


@contextlib.contextmanager
def on_side(stream: torch.cuda.Stream | None, after: torch.cuda.Event | None) -> Iterator[None]:
    """Work of this block goes to `stream`, behind `after` and nothing else of the current stream."""
    if stream is None:
        yield
        return
    if after is not None:
        stream.wait_event(after)
    with torch.cuda.stream(stream):
        yield
