"""When an engine's tokens arrive, measured without HTTP: one request, several at once, and streams beside a prompt."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
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


class Streams:
    """Requests that decode until they are no longer wanted."""

    def __init__(self, arrivals: list[Arrivals], tasks: list[asyncio.Task[Arrivals]]) -> None:
        self.arrivals, self._tasks = arrivals, tasks

    async def pause(self, seconds: float) -> None:
        """Let them go on for so long.

        Raises:
            EngineDeadError: one has ended, by itself or not.
        """
        await asyncio.sleep(seconds)
        for task in self._tasks:
            if task.done():
                task.result()
                raise EngineDeadError("a stream ended before the measurement did; let it generate more tokens")

    def gaps_ms(self, begin: float, end: float) -> list[float]:
        """Milliseconds between the tokens of each stream, of those that came in [begin, end)."""
        return [gap for stream in self.arrivals for gap in stream.gaps_ms(begin, end)]


@contextlib.asynccontextmanager
async def decoding(
    engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int, sparse_id: int | None = None
) -> AsyncIterator[Streams]:
    """Streams of which each has its first token; at the end of the block they are aborted.

    num_tokens: most tokens of a stream; it must be more than what they generate meanwhile.

    Raises:
        EngineDeadError: a stream ended too early, or otherwise than it should.
    """
    arrivals = [Arrivals(time.perf_counter()) for _ in prompts]
    tasks = [
        asyncio.create_task(read(engine, prompt, stream, num_tokens, sparse_id))
        for prompt, stream in zip(prompts, arrivals, strict=True)
    ]
    streams = Streams(arrivals, tasks)
    try:
        while not all(stream.tokens_at for stream in arrivals):
            await streams.pause(0.01)
        yield streams
        await streams.pause(0.0)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
