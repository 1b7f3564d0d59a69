"""ClientDesk: which process sent which request, what it has not been told yet, and whether it still asks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from qsa.scheduler.request import RequestOutput

POLL_S = 3.0  # longest silence of a poll; then it returns empty
FORGET_LEASES = 20  # a client that has not polled for so many leases is forgotten


@dataclass
class _Client:
    """One process that sends requests. `request_ids`: those that have not ended."""

    seen_at: float
    request_ids: set[str] = field(default_factory=set)
    outputs: list[RequestOutput] = field(default_factory=list)
    waiter: asyncio.Future[None] | None = None


class ClientDesk:
    """Outputs wait here until their client polls. All calls from one event loop."""

    def __init__(self, lease_s: float) -> None:
        """lease_s: a client that has not polled for so long is gone."""
        self._lease_s = lease_s
        self._clients: dict[str, _Client] = {}
        self._owners: dict[str, _Client] = {}  # by request id

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._owners)

    @property
    def num_clients(self) -> int:
        """Clients that are remembered."""
        return len(self._clients)

    def open(self, client_id: str, request_id: str) -> None:
        """A client has sent a request."""
        client = self._client(client_id)
        client.seen_at = time.monotonic()
        client.request_ids.add(request_id)
        self._owners[request_id] = client

    def deliver(self, outputs: Sequence[RequestOutput]) -> None:
        """Hand outputs to whom they are for; those of nobody are dropped."""
        for output in outputs:
            client = self._owners.get(output.request_id)
            if client is None:
                continue
            client.outputs.append(output)
            if output.finish_reason is not None:
                del self._owners[output.request_id]
                client.request_ids.discard(output.request_id)
            _wake(client.waiter)

    async def poll(self, client_id: str, *, wait: bool) -> list[RequestOutput]:
        """Everything for a client since its last poll; with `wait`, waits for the first one, at most POLL_S.

        A client that polls again before it was answered has given the earlier poll up: that one takes nothing.
        """
        client = self._client(client_id)
        client.seen_at = time.monotonic()
        if not client.outputs and wait:
            loop = asyncio.get_running_loop()
            waiter = client.waiter = loop.create_future()
            timer = loop.call_later(POLL_S, _wake, waiter)
            await waiter
            timer.cancel()
            if client.waiter is not waiter:
                return []
        outputs, client.outputs = client.outputs, []
        return outputs

    def close(self) -> None:
        """Nothing more will come: whoever waits stops waiting."""
        self._owners.clear()
        for client in self._clients.values():
            client.request_ids.clear()
            _wake(client.waiter)

    def expire(self, abort: Callable[[str], None]) -> None:
        """Abort the requests of clients that no longer poll. A client is forgotten later, so that one which was only
        asleep, and comes back, hears how its requests ended."""
        now = time.monotonic()
        for client_id, client in list(self._clients.items()):
            if now - client.seen_at > self._lease_s:
                for request_id in list(client.request_ids):
                    abort(request_id)
            if now - client.seen_at > FORGET_LEASES * self._lease_s:
                del self._clients[client_id]

    def _client(self, client_id: str) -> _Client:
        client = self._clients.get(client_id)
        if client is None:
            client = self._clients[client_id] = _Client(time.monotonic())
        return client


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
