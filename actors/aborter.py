"""Aborter: one thread that tells the scheduler which requests nobody reads any more.

A call that an actor makes while it answers something is a child of what it answers. When a client leaves, Ray Serve
cancels the answer and, with it, its children, the abort among them: the request would run on for nobody. A call from a
thread of its own is nobody's child.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

import ray

TRIES = 3

logger = logging.getLogger(__name__)


class Aborter:
    """State: the aborts that have not been sent. The thread starts with the first one."""

    def __init__(self, abort: Callable[..., Any], timeout_s: float, name: str) -> None:
        """`abort(request_id, *unanswered)` sends the call and returns its reference."""
        self._abort, self._timeout_s, self._name = abort, timeout_s, name
        self._requests: queue.SimpleQueue[tuple[str, tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, request_id: str, unanswered: tuple[Any, ...]) -> None:
        """Abort a request. `unanswered`: its submission's reference while that has not answered: Ray could run the abort
        first, unless it needs that one's result."""
        self._requests.put((request_id, unanswered))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"{self._name} aborts", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread after what is already waiting. Calling it again does nothing."""
        self._requests.put(None)

    def _run(self) -> None:
        while (item := self._requests.get()) is not None:
            request_id, arguments = item
            for _ in range(TRIES):
                try:
                    ray.get(self._abort(request_id, *arguments), timeout=self._timeout_s)
                    break
                except Exception as error:  # the submission was refused or cancelled, or the scheduler is gone
                    logger.debug("abort of %s: %s", request_id, error)
                    arguments = ()
