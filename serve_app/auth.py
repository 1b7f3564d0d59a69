"""API keys: bearer tokens compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})  # probes and scrapers carry no key


class KeyCheck:
    """The accepted keys, as digests."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def allows(self, path: str, authorization: str | None) -> bool:
        """Whether a request to `path` with this Authorization header may pass. Looks at every key, whichever fits."""
        if not self._digests or path in OPEN_PATHS:
            return True
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip())
        fits = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(fits) and scheme.lower() == "bearer"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
