"""Admit, wait or refuse, against the pools of every stage. Pure functions over numbers.

A request that can never be answered is refused at once, with the numbers. Of the others, those are admitted, in order,
whose predicted need fits beside the predicted need of everything that runs; the rest waits.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from qsa.errors import CapacityError, ContextLengthError, RequestError
from qsa.scheduler.growth import ChunkMeter
from qsa.scheduler.request import Request

MAX_BYPASS = 16  # younger requests that may pass a blocked one
LOOKAHEAD = 8  # blocked requests that one look at the queue steps over
AGEING_S = 10.0  # waiting this long counts like one priority more

_LARGEST = sys.float_info.max
SAMPLING_RANGES = {  # smallest and largest value
    "temperature": (0.0, _LARGEST),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (sys.float_info.min, _LARGEST),
    "presence_penalty": (-_LARGEST, _LARGEST),
    "frequency_penalty": (-_LARGEST, _LARGEST),
}


def check_request(request: Request, max_model_len: int, meter: ChunkMeter) -> None:
    """Refuse what can never be answered.

    Raises:
        RequestError:       an empty prompt, max_tokens below 1, an unknown sparse id, a sampling parameter out of its range.
        ContextLengthError: prompt and max_tokens together exceed the model's context.
        CapacityError:      some stage's pool is smaller than the request at its final length.
    """
    prompt_len, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
    if prompt_len == 0:
        raise RequestError("the prompt has no tokens; send at least one", param="prompt")
    if max_tokens < 1:
        raise RequestError(f"max_tokens must be at least 1, got {max_tokens}", param="max_tokens")
    for name, (least, most) in SAMPLING_RANGES.items():
        value = getattr(request.sampling, name)
        if not least <= value <= most:  # also NaN, which would fail everybody's step, not only this request's
            raise RequestError(f"{name} must lie between {least:g} and {most:g}, got {value}", param=name)
    if request.sparse_id not in meter.sparse_ids:
        known = ", ".join(map(str, meter.sparse_ids))
        raise RequestError(f"sparse_id is {request.sparse_id}, but this server has {known}", param="sparse_id")
    if prompt_len + max_tokens > max_model_len:
        raise ContextLengthError(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested"
            f" {prompt_len + max_tokens} tokens ({prompt_len} in the prompt, {max_tokens} in the completion)."
            f" Please reduce the length of the prompt or max_tokens.",
            param="prompt" if prompt_len >= max_model_len else "max_tokens",
            code="context_length_exceeded",
        )
    final_len = prompt_len + max_tokens - 1
    needed = meter.chunks(request.sparse_id, final_len)
    if not fits(needed, meter.pools):
        stages = ", ".join(
            f"stage {stage}: {need} of {pool}" for stage, (need, pool) in enumerate(zip(needed, meter.pools, strict=True))
        )
        raise CapacityError(
            f"{prompt_len} prompt tokens and max_tokens {max_tokens} need more chunks of 1 MiB than the pools have"
            f" ({stages}); shorten the prompt, lower max_tokens, or raise cache.device_bytes",
            param="max_tokens",
            code="capacity_exceeded",
        )


def queue_key(
    priority: int, waited_s: float, arrival: int, *, is_protected: bool, must_replay: bool
) -> tuple[bool, int, bool, int]:
    """Order of the queue, the next one first: who was preempted too often, urgency with age, preempted, arrival."""
    return (not is_protected, priority - int(waited_s / AGEING_S), not must_replay, arrival)


@dataclass(frozen=True)
class Candidate:
    """A waiting sequence. `need` and `final`: predicted chunks, and chunks at its final length, one number a stage."""

    request_id: str
    need: tuple[int, ...]
    final: tuple[int, ...]
    needs_final: bool = False  # admitted only when everything that runs could also reach its final length
    is_passable: bool = True
    num_bypassed: int = 0


@dataclass(frozen=True)
class Admission:
    """Who is admitted, in order, and who was passed by how many of them."""

    admitted: tuple[str, ...] = ()
    bypassed: tuple[tuple[str, int], ...] = ()


def admit(
    queue: Iterable[Candidate], running: Sequence[int], running_final: Sequence[int], pools: Sequence[int], free_slots: int
) -> Admission:
    """Admit from the front of the queue while the predicted need of all fits every pool.

    A blocked candidate may be passed by smaller ones, at most MAX_BYPASS in its life; then everything waits for it.
    The queue is read only as far as needed.

    Args:
        running:       predicted chunks of everything that runs, one number a stage.
        running_final: the same at final lengths.
    """
    used, used_final = list(running), list(running_final)
    admitted: list[str] = []
    passed: dict[str, int] = {}
    limits: dict[str, int] = {}
    if free_slots == 0:
        return Admission()
    for candidate in queue:
        needed, base = (candidate.final, used_final) if candidate.needs_final else (candidate.need, used)
        if fits([a + b for a, b in zip(base, needed, strict=True)], pools):
            admitted.append(candidate.request_id)
            used = [a + b for a, b in zip(used, candidate.need, strict=True)]
            used_final = [a + b for a, b in zip(used_final, candidate.final, strict=True)]
            passed = {request_id: count + 1 for request_id, count in passed.items()}
        else:
            passed[candidate.request_id] = 0
            limits[candidate.request_id] = MAX_BYPASS - candidate.num_bypassed if candidate.is_passable else 0
        if len(admitted) == free_slots or len(passed) == LOOKAHEAD:
            break
        if any(passed[request_id] >= limits[request_id] for request_id in passed):
            break
    return Admission(tuple(admitted), tuple((request_id, count) for request_id, count in passed.items() if count))


def fits(needed: Sequence[int], pools: Sequence[int]) -> bool:
    """Every stage has what is needed of it."""
    return all(need <= pool for need, pool in zip(needed, pools, strict=True))
