"""Chooses next tokens from logits that lie on a GPU: the choices of `sampler`, made there, with one copy to the host.

Rows are computed together, step by step as `sampler.draw` does for one. A cut that needs the order of the tokens sorts the
likeliest ones only; a row for which these do not suffice is copied and drawn on the host.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from qsa.kernels.registry import get_operator
from qsa.model.sampler import (
    NOT_FINITE,
    NOTHING_LEFT,
    Sampled,
    SampleRow,
    change_logits,
    draw,
    in_order,
    uniform,
    with_logprobs,
    wrong_bias,
)

CANDIDATES = 1024  # tokens sorted where a cut needs the order
ROWS_AT_ONCE = 32  # whose float64 weights over the whole vocabulary are in memory together


class DeviceChoices:
    """Choices on their way to the host: one copy to pinned memory, behind the launches that make them."""

    def __init__(self, figures: torch.Tensor, read: Callable[[list[Any]], list[Sampled]]) -> None:
        """figures: a number or a line of numbers a row; read: makes the choices of them."""
        self._read, self._figures = read, figures
        self._event: torch.cuda.Event | None = None
        if figures.is_cuda:
            self._figures = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True)
            self._figures.copy_(figures, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def are_made(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> list[Sampled]:
        if self._event is not None:
            self._event.synchronize()
        return self._read(self._figures.tolist())


def sample_on_device(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
    """Choose one token a row; arguments and result as for `sampler.sample`."""
    return begin_on_device(logits, rows).wait()


def begin_on_device(logits: torch.Tensor, rows: Sequence[SampleRow]) -> DeviceChoices:
    """Launch everything that `sample_on_device` does. `logits` must stay as they are until the choices have been read."""
    vocab_size, device = logits.shape[1], logits.device
    if logits.is_cuda and all(row.is_greedy and not row.changes_logits and row.logprobs < 0 for row in rows):
        return DeviceChoices(_argmax().forward(logits), _greedy_choices)
    errors = [wrong_bias(row, vocab_size) for row in rows]
    changed = logits
    edited = [i for i, row in enumerate(rows) if row.changes_logits and errors[i] is None]
    if edited:
        changed = logits.clone()
        for i in edited:
            changed[i] = change_logits(logits[i], rows[i])
    tokens = changed.argmax(-1)
    is_certain = torch.ones(len(rows), dtype=torch.bool, device=device)
    drawn = [i for i, row in enumerate(rows) if not row.is_greedy]
    for in_cuts, choose in ((False, _draw_by_number), (True, _draw_in_order)):
        group = [i for i in drawn if rows[i].cuts_in_order(vocab_size) == in_cuts]
        for first in range(0, len(group), ROWS_AT_ONCE):
            members = group[first : first + ROWS_AT_ONCE]
            index = _tensor(members, torch.int64, device)
            chosen, certain = choose(changed[index], [rows[i] for i in members])
            tokens[index], is_certain[index] = chosen, certain
    columns = [logits.isfinite().all(-1), changed.amax(-1).isfinite(), is_certain, tokens]
    num_top = min(vocab_size, max(row.logprobs for row in rows))
    if num_top >= 0:
        columns += _logprobs(logits, tokens, num_top)

    def read(table: list[list[float]]) -> list[Sampled]:
        return [
            _sampled(logits[i], changed[i], row, errors[i], values, num_top)
            for i, (row, values) in enumerate(zip(rows, table, strict=True))
        ]

    return DeviceChoices(torch.stack([column.double() for column in columns], -1), read)


def _greedy_choices(best: list[int]) -> list[Sampled]:
    return [Sampled(token) if token >= 0 else Sampled(error=NOT_FINITE) for token in best]


@functools.cache
def _argmax() -> Any:
    return get_operator("argmax", "triton")


def _sampled(
    logits: torch.Tensor, changed: torch.Tensor, row: SampleRow, error: str | None, values: list[float], num_top: int
) -> Sampled:
    """One row's result from its line of figures."""
    is_finite, can_choose, is_certain, token, *logprobs = values
    if not is_finite:
        return Sampled(error=NOT_FINITE)
    if error is not None:
        return Sampled(error=error)
    if row.changes_logits and not can_choose:
        return Sampled(error=NOTHING_LEFT)
    wanted = min(row.logprobs, logits.shape[0])
    if not is_certain:
        token_id = draw(changed.cpu(), row)
        return Sampled(token_id) if wanted < 0 else with_logprobs(logits.cpu(), token_id, wanted)
    if wanted < 0:
        return Sampled(int(token))
    ids, tops = logprobs[1 : 1 + wanted], logprobs[1 + num_top : 1 + num_top + wanted]
    top = tuple((int(one), value) for one, value in zip(ids, tops, strict=True))
    return Sampled(int(token), logprobs[0] if math.isfinite(logprobs[0]) else None, top)


def _draw_by_number(logits: torch.Tensor, rows: Sequence[SampleRow]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64 [n], candidates in the order of the vocabulary; and whether each is certain."""
    weights = _scaled(logits, rows).exp().double()
    places = _choose(_cut_min_p(weights, rows), rows)
    return places, torch.ones_like(places, dtype=torch.bool)


def _draw_in_order(logits: torch.Tensor, rows: Sequence[SampleRow]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64 [n], candidates from likely to unlikely; and whether enough of them were sorted."""
    vocab_size, device = logits.shape[1], logits.device
    tops = [row.top_k if 0 < row.top_k < vocab_size else 0 for row in rows]
    top_k = _tensor(tops, torch.int64, device).unsqueeze(1)
    top_p = _tensor([row.top_p for row in rows], torch.float64, device).unsqueeze(1)
    scaled = _scaled(logits, rows)
    total = scaled.exp().sum(-1, keepdim=True, dtype=torch.float64)
    count = min(vocab_size, CANDIDATES)
    values, ids = in_order(*scaled.topk(count))
    weights = values.exp().double()
    # tokens as likely as the last one do not count: others like them may have been left out
    is_sure = values > values[:, -1:]
    sure_mass = (weights * is_sure).sum(-1, keepdim=True)
    is_enough = torch.where(top_k > 0, is_sure.sum(-1, keepdim=True) >= top_k, sure_mass >= top_p * total)
    if count == vocab_size:
        is_enough = torch.ones_like(is_enough)
    weights = weights * ((top_k == 0) | (torch.arange(count, device=device) < top_k))
    before = weights.cumsum(-1) - weights
    keep = (before < top_p * torch.where(top_k > 0, weights.sum(-1, keepdim=True), total)) | (top_p >= 1)
    keep[:, 0] = True
    places = _choose(_cut_min_p(weights * keep, rows), rows)
    return ids.gather(1, places.unsqueeze(1)).squeeze(1), is_enough.squeeze(1)


def _scaled(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Logits over temperature, the largest of a row 0."""
    temperature = _tensor([row.temperature for row in rows], logits.dtype, logits.device).unsqueeze(1)
    return (logits - logits.amax(-1, keepdim=True)).div_(temperature)


def _cut_min_p(weights: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    if not any(row.min_p > 0 for row in rows):
        return weights
    least = _tensor([row.min_p for row in rows], torch.float64, weights.device).unsqueeze(1)
    return torch.where((weights >= least) | (least <= 0), weights, 0.0)


def _choose(weights: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Places int64 [n] of the tokens that the rows' seeds and positions choose."""
    cumulative = weights.cumsum(-1)
    numbers = _tensor([uniform(row.seed, row.position) for row in rows], torch.float64, weights.device)
    target = numbers.unsqueeze(1) * cumulative[:, -1:]
    places = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    width = weights.shape[1]
    last = width - 1 - (weights > 0).flip(-1).to(torch.uint8).argmax(-1)  # rounding must not reach past it
    return torch.minimum(places, last)


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> list[torch.Tensor]:
    """Columns: log-probability of the tokens, then the likeliest tokens, then theirs."""
    logprobs = logits.double().log_softmax(-1)
    columns: list[torch.Tensor] = [logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)]
    if num_top:
        values, ids = logprobs.topk(num_top)
        columns += [*ids.unbind(1), *values.unbind(1)]
    return columns


def _tensor(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)
