"""The exceptions a caller is meant to catch. Every message says what was wanted, what was found and what to change."""

from __future__ import annotations


class QSAError(Exception):
    """Base of everything QSA raises on purpose."""


class ConfigError(QSAError):
    """A setting, or a combination of settings, that cannot work."""


class CheckpointError(QSAError):
    """A model file that is missing, damaged or incomplete; the message names the file and the tensor."""


class UnsupportedModelError(CheckpointError):
    """A model, tensor type or scaling kind that QSA does not run, refused by name before weights are read."""


class OutOfChunksError(QSAError):
    """The chunk pool has fewer free chunks than were asked for; the pool is unchanged."""


class BudgetError(QSAError):
    """A device or host does not have the memory that a budget asks for; raised before weights are read."""


class RequestError(QSAError):
    """A request that is wrong in itself (HTTP 400).

    Attributes:
        param: name of the offending field, or None.
        code:  machine-readable reason, or None.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code

    def __reduce__(self) -> tuple[type[RequestError], tuple[str, str | None, str | None]]:
        return type(self), (str(self), self.param, self.code)


class ContextLengthError(RequestError):
    """Prompt, or prompt and `max_tokens`, longer than the model's context."""


class CapacityError(RequestError):
    """A request that can never fit the chunk pools, even alone; the message holds the numbers."""


class OverloadedError(QSAError):
    """The queue is full (HTTP 429). `retry_after_s` is an estimate from the current load."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[type[OverloadedError], tuple[str, float]]:
        return type(self), (str(self), self.retry_after_s)


class EngineDeadError(QSAError):
    """A stage or the scheduler is gone or not ready (HTTP 503)."""


class EngineRecoveringError(EngineDeadError):
    """Not now: the engine is starting, or being brought back after a loss (HTTP 503 with Retry-After)."""


class StageLostError(QSAError):
    """A stage's process has nothing loaded: it was started again in the place of one that has died."""
