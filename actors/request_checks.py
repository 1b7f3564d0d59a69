"""What is refused before it is scheduled: tokens that the model does not have, and numbers that no plan can carry."""

from __future__ import annotations

import numpy as np

from qsa.errors import RequestError
from qsa.scheduler.plan import SequenceStep, StepPlan
from qsa.scheduler.request import SamplingParams


def check_request(request_id: str, prompt: np.ndarray, sampling: SamplingParams, vocab_size: int) -> None:
    """Raises RequestError, naming the parameter."""
    for ids, param in (
        (prompt, "prompt"),
        (np.array(sampling.stop_token_ids), "stop_token_ids"),
        (np.array([token for token, _ in sampling.logit_bias]), "logit_bias"),
    ):
        _check_ids(ids, vocab_size, param)
    _check_travels(request_id, sampling)


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
