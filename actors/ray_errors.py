"""From Ray's exceptions back to the engine's own: the original error where there is one, else one clear line."""

from __future__ import annotations

from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    NodeDiedError,
    ObjectLostError,
    RayActorError,
    RayError,
    RayTaskError,
)

from qsa.errors import EngineDeadError, QSAError


def original_error(error: BaseException) -> BaseException:
    """What the remote method itself raised; `error` when it did not raise at all."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException) and error.cause is not error:
        error = error.cause
    return error


def is_actor_death(error: BaseException) -> bool:
    """Whether a call failed because its actor, or one whose result it waited for, or that result, is gone."""
    return isinstance(original_error(error), (RayActorError, ObjectLostError, NodeDiedError))


def is_final_death(error: BaseException) -> bool:
    """Whether its actor is gone and Ray will not start it again: somebody has ended it with `ray.kill`."""
    return isinstance(original_error(error), ActorDiedError)


def is_lost(error: BaseException) -> bool:
    """Whether a call failed because nobody answered it, and not because the one who was asked said no."""
    return isinstance(original_error(error), (RayError, TimeoutError))


def is_card_fault(message: str) -> bool:
    """Whether a step failed because of a fault after which its process cannot use the card any more. Full memory is none."""
    return "CUDA error" in message


def engine_error(error: BaseException, who: str) -> QSAError:
    """The error to raise to a caller for a failed call to `who`, without Ray's traceback blob."""
    cause = original_error(error)
    if isinstance(cause, QSAError):
        return cause
    if isinstance(cause, ActorUnavailableError):  # it is being started again; Ray says no more than that
        return EngineDeadError(f"{who} has died")
    if isinstance(cause, RayActorError):
        return EngineDeadError(f"{who} has died: {_first_line(cause)}")
    if isinstance(cause, (GetTimeoutError, TimeoutError)):
        return EngineDeadError(f"{who} has not answered in time")
    if isinstance(cause, RayError):
        return EngineDeadError(f"{who} cannot be reached: {_first_line(cause)}")
    return EngineDeadError(f"{who} failed: {describe(cause)}")


def describe(error: BaseException) -> str:
    """An unexpected error in one line."""
    cause = original_error(error)
    return f"{type(cause).__name__}: {_first_line(cause)}"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
