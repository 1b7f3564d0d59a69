"""What is refused before it is scheduled: tokens that the model does not have, and numbers that no plan can carry."""

from __future__ import annotations

from typing import Any

import numpy as np

from qsa.errors import RequestError
from qsa.scheduler.plan import SequenceStep, StepPlan
from qsa.scheduler.request import SamplingParams

_INTEGERS = ("top_k", "seed", "max_tokens", "logprobs")
_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


def check_request(request_id: str, prompt: np.ndarray, sampling: SamplingParams, priority: int, vocab_size: int) -> None:
    """Raises RequestError, naming the parameter."""
    _check_types(request_id, sampling, priority)
    for ids, param in (
        (prompt, "prompt"),
        (np.array(sampling.stop_token_ids), "stop_token_ids"),
        (np.array([token for token, _ in sampling.logit_bias]), "logit_bias"),
    ):
        _check_ids(ids, vocab_size, param)
    _check_travels(request_id, sampling)


def _check_types(request_id: Any, sampling: Any, priority: Any) -> None:
    """Refuse values that are not what their annotation says: all requests are planned together, and an exception there would
    end everybody's."""
    if not isinstance(sampling, SamplingParams):
        raise RequestError(f"sampling must be SamplingParams, got {sampling!r:.60}", param="sampling")
    expected: list[tuple[str, Any, str, bool]] = [
        ("request_id", request_id, "a string", isinstance(request_id, str)),
        ("priority", priority, "a whole number", isinstance(priority, int)),
    ]
    for name in _INTEGERS:
        value = getattr(sampling, name)
        expected.append((name, value, "a whole number", isinstance(value, int)))
    for name in _NUMBERS:
        value = getattr(sampling, name)
        expected.append((name, value, "a number", isinstance(value, int | float)))
    ids, bias = sampling.stop_token_ids, sampling.logit_bias
    are_ids = isinstance(ids, tuple | list) and all(isinstance(token, int) for token in ids)
    expected.append(("stop_token_ids", ids, "token ids", are_ids))
    expected.append(("logit_bias", bias, "pairs of a token id and a number", _are_biases(bias)))
    for name, value, wanted, is_right in expected:
        if not is_right:
            raise RequestError(f"{name} must be {wanted}, got {value!r:.60}", param=name)


def _are_biases(bias: Any) -> bool:
    return isinstance(bias, tuple | list) and all(
        isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], int) and isinstance(pair[1], int | float)
        for pair in bias
    )


def _check_travels(request_id: str, sampling: SamplingParams) -> None:
    """Refuse what a plan cannot carry to the stages, such as a number of more than 64 bits: the plan has others in it."""
    try:
        StepPlan(0, 0, 0, (SequenceStep(request_id, 0, 0, (), is_prefill=False, sampling=sampling),)).to_bytes()
    except (OverflowError, TypeError, ValueError) as error:
        raise RequestError(f"the sampling parameters cannot be sent to the stages: {error}", param="sampling") from None


def _check_ids(ids: np.ndarray, vocab_size: int, param: str) -> None:
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if len(wrong):
        raise RequestError(f"{param} holds token {wrong[0]}, but the model has tokens 0 to {vocab_size - 1}", param=param)
