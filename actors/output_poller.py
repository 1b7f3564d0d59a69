"""OutputPoller: one thread that fetches the outputs of all open requests and hands them to the event loops that wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

from qsa.actors.ray_errors import engine_error, is_lost
from qsa.errors import EngineDeadError, EngineRecoveringError, RequestError
from qsa.scheduler.request import RequestOutput

Item = RequestOutput | EngineDeadError


class _Mailbox:
    """Where one request's outputs arrive, in the loop that reads them."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[Item] = asyncio.Queue()


class OutputPoller:
    """Asks once for all requests of this process, whatever event loops and threads they were sent from.

    The thread sleeps while no request is open. When a poll is not answered the scheduler is lost, perhaps to come back:
    every open request is told so. When the scheduler answers that the engine is dead, it is dead for good.
    """

    def __init__(
        self, poll: Callable[[], Sequence[RequestOutput]], name: str, on_lost: Callable[[], bool] = lambda: False
    ) -> None:
        """
        Args:
            poll:    blocks until there are outputs, or returns none after a while.
            on_lost: told when a poll was not answered; returns whether somebody brings the scheduler back, and will call
                     `resume` or `fail`.
        """
        self._poll, self._name, self._on_lost = poll, name, on_lost
        self._mailboxes: dict[str, _Mailbox] = {}
        self._changed = threading.Condition()
        self._dead: str | None = None
        self._lost: str | None = None
        self._num_lost = 0
        self._thread: threading.Thread | None = None

    @property
    def dead_reason(self) -> str | None:
        """Why no output will come any more; None while all is well, or may become well again."""
        return self._dead

    @property
    def lost_reason(self) -> str | None:
        """Why no request is taken now; None while all is well."""
        lost = self._lost
        return None if lost is None else f"recovering: {lost}"

    def open(self, request_id: str) -> asyncio.Queue[Item]:
        """A queue in the running event loop for the request's outputs. Open it before the request is sent.

        Raises:
            EngineRecoveringError: not now.
            EngineDeadError:       nothing will come any more.
            RequestError:          a request of this id is open.
        """
        mailbox = _Mailbox()
        with self._changed:
            if self._dead is not None:
                raise EngineDeadError(self._dead)
            if self._lost is not None:
                raise EngineRecoveringError(self.lost_reason)
            if request_id in self._mailboxes:
                raise RequestError(f"request id {request_id} is in use; every request needs its own", param="request_id")
            self._mailboxes[request_id] = mailbox
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"{self._name} outputs", daemon=True)
                self._thread.start()
            self._changed.notify()
        return mailbox.queue

    def close(self, request_id: str) -> None:
        """Nobody reads the request's outputs any more."""
        with self._changed:
            self._mailboxes.pop(request_id, None)

    def interrupt(self, reason: str) -> None:
        """End every open request with EngineRecoveringError, and refuse new ones until `resume`."""
        _end(self._lose(reason), EngineRecoveringError, reason)

    def _lose(self, reason: str) -> list[_Mailbox]:
        """Refuse new requests until `resume`; the open ones, for whoever ends them."""
        with self._changed:
            if self._dead is not None or self._lost is not None:
                return []
            self._lost = reason
            self._num_lost += 1
            return self._take_mailboxes()

    def resume(self) -> None:
        """The scheduler is back: take requests again."""
        with self._changed:
            self._lost = None
            self._changed.notify()

    def fail(self, reason: str) -> None:
        """End every open request with EngineDeadError, and refuse new ones. Only the first reason counts."""
        with self._changed:
            if self._dead is not None:
                return
            self._dead = reason
            mailboxes = self._take_mailboxes()
            self._changed.notify()
        _end(mailboxes, EngineDeadError, reason)

    def _take_mailboxes(self) -> list[_Mailbox]:
        """All of them, and nothing is put in there any more."""
        mailboxes = list(self._mailboxes.values())
        self._mailboxes.clear()
        return mailboxes

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: (self._mailboxes and self._lost is None) or self._dead is not None)
                if self._dead is not None:
                    return
                num_lost = self._num_lost
            try:
                outputs = self._poll()
            except Exception as error:  # of whatever kind: without polls no request can go on
                if is_lost(error) and self._num_lost != num_lost:
                    continue  # the one that was polled is lost, which is known; its successor may be there already
                reason = str(engine_error(error, "the scheduler"))
                mailboxes = self._lose(reason) if is_lost(error) else []  # first: who is told now may `resume` at once
                if is_lost(error) and self._on_lost():
                    _end(mailboxes, EngineRecoveringError, reason)
                    continue
                self.fail(reason)
                _end(mailboxes, EngineDeadError, reason)
                return
            self._distribute(outputs)

    def _distribute(self, outputs: Sequence[RequestOutput]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Mailbox, Item]]] = {}
        with self._changed:
            for output in outputs:
                mailbox = self._mailboxes.get(output.request_id)
                if mailbox is not None:
                    by_loop.setdefault(mailbox.loop, []).append((mailbox, output))
        for loop, items in by_loop.items():
            _hand_over(loop, items)


def _end(mailboxes: Sequence[_Mailbox], error: type[EngineDeadError], reason: str) -> None:
    """Tell all of them, each with an error of its own."""
    for mailbox in mailboxes:
        _hand_over(mailbox.loop, [(mailbox, error(reason))])


def _hand_over(loop: asyncio.AbstractEventLoop, items: Sequence[tuple[_Mailbox, Item]]) -> None:
    """Put the items into their queues from another thread, waking the loop once."""

    def put() -> None:
        for mailbox, item in items:
            mailbox.queue.put_nowait(item)

    try:
        loop.call_soon_threadsafe(put)
    except RuntimeError:
        return  # the loop was closed with requests open: nobody reads them
