"""When an engine's tokens arrive, measured without HTTP: one request, several at once, and streams beside a prompt."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from qsa.actors.engine import Engine
from qsa.errors import EngineDeadError
from qsa.scheduler.request import FinishReason, SamplingParams


@dataclass
class Arrivals:
    """One request: when it was sent and when each of its tokens came, in seconds of `time.perf_counter()`."""

    sent_at: float
    tokens_at: list[float] = field(default_factory=list)

    @property
    def first_token_s(self) -> float:
        """From the request to its first token."""
        return self.tokens_at[0] - self.sent_at

    def gaps_ms(self, begin: float = float("-inf"), end: float = float("inf")) -> list[float]:
        """Milliseconds between tokens, of those that came in [begin, end)."""
        pairs = zip(self.tokens_at, self.tokens_at[1:], strict=False)
        return [(after - before) * 1e3 for before, after in pairs if begin <= after < end]


async def read(engine: Engine, prompt: Sequence[int], arrivals: Arrivals, num_tokens: int, sparse_id: int | None) -> Arrivals:
    """Send one greedy request and note its tokens in `arrivals` as they come.

    Raises:
        EngineDeadError: it did not end by reaching its length.
    """
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    async for output in engine.generate(prompt, sampling, sparse_id=sparse_id):
        arrivals.tokens_at += [time.perf_counter()] * len(output.tokens)
        if output.finish_reason is not None and output.finish_reason is not FinishReason.LENGTH:
            raise EngineDeadError(f"a request ended by {output.finish_reason} instead of its length: {output.error}")
    return arrivals


async def read_all(
    engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int, sparse_id: int | None = None
) -> list[Arrivals]:
    """Send all prompts at once, read each to `num_tokens` tokens."""
    now = time.perf_counter()
    return list(await asyncio.gather(*(read(engine, prompt, Arrivals(now), num_tokens, sparse_id) for prompt in prompts)))


@dataclass(frozen=True)
class Disturbed:
    """Streams that were decoding before and while another prompt was read, all times of `time.perf_counter()`."""

    streams: tuple[Arrivals, ...]
    quiet_from: float
    prompt: Arrivals

    @property
    def quiet_ms(self) -> list[float]:
        """Gaps between the streams' tokens before the prompt came."""
        return [gap for stream in self.streams for gap in stream.gaps_ms(self.quiet_from, self.prompt.sent_at)]

    @property
    def busy_ms(self) -> list[float]:
        """Gaps while it was read."""
        until = self.prompt.tokens_at[0]
        return [gap for stream in self.streams for gap in stream.gaps_ms(self.prompt.sent_at, until)]


async def read_beside(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    prompt: Sequence[int],
    quiet_s: float,
    num_tokens: int,
    sparse_id: int | None = None,
) -> Disturbed:
    """Let streams decode, quiet for `quiet_s` seconds and then while another prompt is read to its first token; end them.

    num_tokens: most tokens of a stream; it must be more than what they generate meanwhile.

    Raises:
        EngineDeadError: a stream ended too early, or otherwise than it should.
    """
    arrivals = [Arrivals(time.perf_counter()) for _ in prompts]
    streams = [
        asyncio.create_task(read(engine, ids, stream, num_tokens, sparse_id))
        for ids, stream in zip(prompts, arrivals, strict=True)
    ]
    try:
        while not all(stream.tokens_at for stream in arrivals):
            await _pause(0.01, streams)
        quiet_from = time.perf_counter()
        await _pause(quiet_s, streams)
        last = await read(engine, prompt, Arrivals(time.perf_counter()), 1, sparse_id)
        await _pause(0.0, streams)
    finally:
        for task in streams:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError, EngineDeadError):
            await asyncio.gather(*streams, return_exceptions=True)
    return Disturbed(tuple(arrivals), quiet_from, last)


async def _pause(seconds: float, streams: Sequence[asyncio.Task[Arrivals]]) -> None:
    await asyncio.sleep(seconds)
    for task in streams:
        if task.done():
            task.result()
            raise EngineDeadError("a stream ended before the measurement did; let it generate more tokens")
