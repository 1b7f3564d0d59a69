"""Chooses the next token of each row of logits: temperature, top-k, top-p, min-p, penalties, biases, log-probabilities.

A choice depends on the row's own logits, its parameters, its seed and its position: never on its neighbours, on the time,
or on how many numbers were drawn before. So a sequence that is computed again goes on with the same text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

GREEDY_BELOW = 1e-5  # a temperature this small is taken as zero
FIRST_CANDIDATES = 128  # tokens sorted at first when top_p cuts; more are sorted only when these do not reach it
NOT_FINITE = "the model produced a logit that is not a finite number"
NOTHING_LEFT = "biases and penalties leave no token with a finite logit to choose"
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class SampleRow:
    """How one row is sampled; the fields are those of the request's sampling parameters, with the place in the text.

    Attributes:
        position: position of the token to be chosen, in tokens from the start of the sequence.
        counts:   generated tokens so far as pairs (token id, count), for penalties. Tokens that only the prompt has stand
                  there with count 0: the repetition penalty applies to them too, the other two do not.
        logprobs: number of alternatives to report; -1: none at all; 0: only the chosen token's.
    """

    position: int = 0
    counts: tuple[tuple[int, int], ...] = ()
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int = -1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def cuts_in_order(self, vocab_size: int) -> bool:
        """Whether a cut needs the tokens from likely to unlikely."""
        return 0 < self.top_k < vocab_size or self.top_p < 1

    @property
    def changes_logits(self) -> bool:
        """Whether a bias or a penalty applies."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)
        return bool(self.logit_bias) or (bool(self.counts) and penalties)


@dataclass(frozen=True)
class Sampled:
    """The chosen token, or why there is none. Log-probabilities are the model's own, before temperature and penalties."""

    token_id: int = -1
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    error: str | None = None


class Choices(Protocol):
    """Tokens that are being chosen, perhaps on a device that the host is ahead of."""

    @property
    def are_made(self) -> bool:
        """Whether `wait` returns at once."""
        ...

    def wait(self) -> list[Sampled]: ...


@dataclass(frozen=True)
class MadeChoices:
    """Tokens that have been chosen on the host."""

    sampled: list[Sampled]
    are_made = True

    def wait(self) -> list[Sampled]:
        return self.sampled


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
    """Choose one token a row.

    Args:
        logits: float32 [len(rows), vocab_size], on any device; not changed.

    Returns:
        One entry a row. A row with a logit that is NaN or infinite, with a bias for a token that does not exist, or with
        biases and penalties that leave nothing to choose from has `error` set; the others are not affected.
    """
    return begin_sample(logits, rows).wait()


def begin_sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> Choices:
    """As `sample`, but on a device without waiting for it."""
    if logits.shape[0] != len(rows):
        raise ValueError(f"logits have {logits.shape[0]} rows, but {len(rows)} are to be sampled")
    if not rows:
        return MadeChoices([])
    if logits.device.type != "cpu":
        from qsa.model.device_sampler import begin_on_device  # noqa: PLC0415 - it imports this file

        return begin_on_device(logits, rows)
    finite = logits.sum(-1).isfinite().tolist()  # one pass; a NaN or an infinity anywhere shows in the sum
    best = logits.argmax(-1).tolist() if any(row.is_greedy for row in rows) else []
    return MadeChoices([_sample_row(logits[i], row, finite[i], best[i] if best else -1) for i, row in enumerate(rows)])


def _sample_row(logits: torch.Tensor, row: SampleRow, sum_is_finite: bool, best: int) -> Sampled:
    if not sum_is_finite and not bool(logits.isfinite().all()):
        return Sampled(error=NOT_FINITE)
    vocab_size = logits.shape[0]
    if error := wrong_bias(row, vocab_size):
        return Sampled(error=error)
    changed = change_logits(logits, row) if row.changes_logits else logits
    if row.changes_logits and not math.isfinite(float(changed.max())):
        return Sampled(error=NOTHING_LEFT)
    if row.is_greedy:
        token_id = int(changed.argmax()) if row.changes_logits else best
    else:
        token_id = draw(changed, row)
    if row.logprobs < 0:
        return Sampled(token_id)
    return with_logprobs(logits, token_id, min(row.logprobs, vocab_size))


def wrong_bias(row: SampleRow, vocab_size: int) -> str | None:
    """What is wrong with the row's biases, if anything."""
    for token_id, _ in row.logit_bias:
        if not 0 <= token_id < vocab_size:
            return f"logit_bias names token {token_id}, but the vocabulary has {vocab_size} tokens"
    return None


def change_logits(logits: torch.Tensor, row: SampleRow) -> torch.Tensor:
    """Biases, then penalties. Repetition divides positive and multiplies negative logits; the other two subtract."""
    changed = logits.clone()
    if row.logit_bias:
        ids, amounts = zip(*row.logit_bias, strict=True)
        index, added = torch.tensor(ids), torch.tensor(amounts, dtype=changed.dtype)
        changed.index_add_(0, index.to(changed.device), added.to(changed.device))
    if row.counts:
        pairs = torch.tensor(row.counts).to(changed.device)
        index, count = pairs[:, 0], pairs[:, 1].to(changed.dtype)
        seen = changed[index]
        seen = torch.where(seen > 0, seen / row.repetition_penalty, seen * row.repetition_penalty)
        changed[index] = seen - count * row.frequency_penalty - (count > 0) * row.presence_penalty
    return changed


def draw(logits: torch.Tensor, row: SampleRow) -> int:
    """One token from softmax(logits / temperature), cut by top-k, then top-p, then min-p.

    Candidates are kept from likely to unlikely when a cut needs the order, equal ones by their numbers; else in the order
    of the vocabulary.
    """
    vocab_size = logits.shape[0]
    scaled = (logits - logits.max()).div_(row.temperature)  # the largest is 0
    ids: torch.Tensor | None = None
    total: float | None = None
    if 0 < row.top_k < vocab_size:
        scaled, ids = (part[: row.top_k] for part in _likeliest(scaled, row.top_k, 0.0))
    elif row.top_p < 1:
        total = float(scaled.exp().sum(dtype=torch.float64))
        scaled, ids = _likeliest(scaled, 0, row.top_p * total)
    weights = scaled.exp().double()
    if row.top_p < 1:
        before = weights.cumsum(0) - weights  # mass of the likelier ones
        keep = before < row.top_p * (float(weights.sum()) if total is None else total)
        keep[0] = True
        weights = weights * keep
    if row.min_p > 0:
        weights = torch.where(weights >= row.min_p, weights, 0.0)  # relative to the likeliest, whose weight is 1
    cumulative = weights.cumsum(0)
    target = uniform(row.seed, row.position) * cumulative[-1]
    place = int(torch.searchsorted(cumulative, target, right=True))
    place = min(place, int(weights.nonzero()[-1]))  # rounding must not reach past the last possible token
    return place if ids is None else int(ids[place])


def _likeliest(scaled: torch.Tensor, least: int, mass: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens in order: at least `least`, and as many as it takes to reach `mass`; sorting all is slow.

    Tokens as likely as the last one found do not count, since others like them may have been left out.
    """
    count = FIRST_CANDIDATES
    while count < scaled.shape[0]:
        values, ids = scaled.topk(count)
        certain = values[values > values[-1]]
        if len(certain) >= least and float(certain.exp().sum(dtype=torch.float64)) >= mass:
            return in_order(values, ids)
        count *= 8
    return scaled.sort(stable=True, descending=True)


def in_order(values: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates [.., count] from likely to unlikely, equal ones by their numbers."""
    ids, places = ids.sort(-1)
    values, order = values.gather(-1, places).sort(stable=True, dim=-1, descending=True)
    return values, ids.gather(-1, order)


def with_logprobs(logits: torch.Tensor, token_id: int, num_top: int) -> Sampled:
    logprobs = logits.double().log_softmax(0)
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        values, ids = logprobs.topk(num_top)
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    chosen = float(logprobs[token_id])
    return Sampled(token_id, chosen if math.isfinite(chosen) else None, top)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from seed and position alone: two rounds of splitmix64, the upper 53 bits of the result."""
    mixed = _splitmix64(_splitmix64(seed & _MASK) ^ (position & _MASK))
    return (mixed >> 11) * 2.0**-53


def _splitmix64(state: int) -> int:
    """One output of the splitmix64 generator (Steele, Lea, Flood, 2014) for a given state."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)
