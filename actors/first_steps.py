"""First steps of an engine: prompts of several lengths, and a decode step of every kind of sampling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qsa.scheduler.plan import SequenceStep, StepPlan
from qsa.scheduler.request import SamplingParams

WARM_UP_SAMPLING = (  # every way the sampler can take
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_p=0.9, logprobs=5),
    SamplingParams(temperature=0.8, top_k=40, min_p=0.05),
    SamplingParams(
        temperature=1.0, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1, logit_bias=((0, 1.0),)
    ),
)


def first_steps(prompt_lengths: Sequence[int], prefill_chunk: int, max_model_len: int, sparse_id: int) -> Iterator[StepPlan]:
    """Plans for slot 0, numbered so that the first real one is number 0. A plan that opens the slot begins it anew.

    prompt_lengths: as far as a prefill chunk and the model's context allow them.
    """
    most = max(1, min(prefill_chunk, max_model_len - len(WARM_UP_SAMPLING)))
    lengths = sorted({max(1, min(length, most)) for length in prompt_lengths})
    greedy = WARM_UP_SAMPLING[0]
    steps = [SequenceStep("warm-up", 0, 0, (0,) * length, is_prefill=True, sampling=greedy) for length in lengths]
    for position, sampling in zip(range(lengths[-1], max_model_len), WARM_UP_SAMPLING, strict=False):
        counts = ((0, 1),) if sampling.presence_penalty else ()
        steps.append(SequenceStep("warm-up", 0, position, (0,), is_prefill=False, sampling=sampling, counts=counts))
    for number, step in enumerate(steps, -len(steps)):
        yield StepPlan(0, number, 0, (step,), ((0, sparse_id),) if step.is_prefill else ())
