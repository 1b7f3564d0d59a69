"""How fast a server reads and writes: one streamed request at a time, greedy, timed where a client stands."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qsa.client import Client, Timings


@dataclass(frozen=True)
class Pace:
    """Medians over some runs of the same request; `spread` is (largest - smallest) / median of the decode pace."""

    prompt_tokens: int
    first_token_s: float
    decode_ms: float
    spread: float
    attended_share: float | None
    decode_runs_ms: tuple[float, ...] = ()
    first_token_runs_s: tuple[float, ...] = ()

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens over the time to the first token, everything on the way included."""
        return self.prompt_tokens / self.first_token_s

    @property
    def decode_tokens_per_s(self) -> float:
        return 1e3 / self.decode_ms


async def time_completion(client: Client, prompt: str | Sequence[int], num_tokens: int, extra: dict[str, Any]) -> Timings:
    """Run one completion to exactly `num_tokens` tokens and read it to its end."""
    timings = Timings()
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, **extra}
    async for _ in client.stream("/v1/completions", body, timings):
        pass
    return timings


def pace_of(runs: Sequence[Timings]) -> Pace:
    """Medians of repeated runs."""
    first = [run.first_text_s for run in runs if run.first_text_s is not None]
    decode = [run.decode_ms_per_token for run in runs if run.decode_ms_per_token is not None]
    if not first or not decode:
        raise ValueError("a pace needs runs of at least two tokens with text")
    middle = statistics.median(decode)
    return Pace(
        prompt_tokens=runs[0].prompt_tokens,
        first_token_s=statistics.median(first),
        decode_ms=middle,
        spread=(max(decode) - min(decode)) / middle,
        attended_share=runs[-1].attended_share,
        decode_runs_ms=tuple(decode),
        first_token_runs_s=tuple(first),
    )
