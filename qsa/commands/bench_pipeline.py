"""`qsa bench pipeline`: where the time of every stage goes in prefill, in decode, and in both at once; also as a trace."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import ray

from qsa.actors.engine import Engine
from qsa.actors.placement import start_local_ray
from qsa.actors.stage_clock import Span
from qsa.commands.demo import DOCUMENT
from qsa.config import EngineConfig
from qsa.engine_pace import decoding, read_all
from qsa.errors import ConfigError
from qsa.settings import config_from
from qsa.terminal import console, working
from qsa.trace import Interval, shares_table, work_window, write_trace

STREAM_PROMPT = 128  # tokens of the prompts that are there to be decoded after
QUIET_S = 0.5  # streams decode alone for so long before another prompt comes
STREAM_TOKENS = 100_000  # more than streams generate while a prompt is read
COLUMNS = (8, 7, 10, 8, 10, 8, 8)


class PipelineRun:
    """Runs phases of work on an engine and collects what the stages did in each.

    Attributes:
        stages: the spans of every stage, of all phases.
        phases: name and begin and end of each, in seconds of `time.time()`.
    """

    def __init__(self, engine: Engine, document: Sequence[int], sparse_id: int | None) -> None:
        """document: token ids that prompts are cut from; repeated when they are longer."""
        self._engine, self._document, self._sparse_id = engine, list(document), sparse_id
        self.stages: list[list[Span]] = []
        self.phases: list[tuple[str, Interval]] = []

    def prompt(self, number: int, length: int) -> list[int]:
        """A prompt whose beginning no other number's has."""
        start = 37 * number % len(self._document)
        return (self._document[start:] + self._document * (length // len(self._document) + 1))[:length]

    async def prefill(self, length: int) -> None:
        """One prompt, alone: from its first chunk's begin to its last chunk's end."""
        await self._engine.start_trace()
        await read_all(self._engine, [self.prompt(0, length)], 1, self._sparse_id)
        self._note("prefill", work_window(await self._take(), "chunk"))

    async def decode(self, num_streams: int, num_tokens: int) -> None:
        """Streams: while all of them decode."""
        prompts = [self.prompt(1 + number, STREAM_PROMPT) for number in range(num_streams)]
        await self._engine.start_trace()
        streams = await read_all(self._engine, prompts, num_tokens, self._sparse_id)
        await self._take()
        begin, end = max(s.tokens_at[0] for s in streams), min(s.tokens_at[-1] for s in streams)
        self._note("decode", wall(begin, end))

    async def both(self, length: int, num_streams: int) -> None:
        """Streams decode beside a prompt: while it is read."""
        prompts = [self.prompt(1 + number, STREAM_PROMPT) for number in range(num_streams)]
        last = self.prompt(1 + num_streams, length)
        limit = min(STREAM_TOKENS, self._engine.max_model_len - STREAM_PROMPT, self._engine.longest_sequence - STREAM_PROMPT)
        await self._engine.start_trace()
        async with decoding(self._engine, prompts, limit, self._sparse_id) as streams:
            await streams.pause(QUIET_S)
            (found,) = await read_all(self._engine, [last], 1, self._sparse_id)
        await self._take()
        self._note("both", wall(found.sent_at, found.tokens_at[0]))

    async def _take(self) -> list[list[Span]]:
        new: list[list[Span]] = await self._engine.take_trace()
        self.stages = [[*spans, *more] for spans, more in zip(self.stages or [[] for _ in new], new, strict=True)]
        return new

    def _note(self, phase: str, window: Interval | None) -> None:
        if window is not None and window[1] > window[0]:
            self.phases.append((phase, window))


def wall(begin: float, end: float) -> Interval:
    """Seconds of `time.perf_counter()` as those of `time.time()`, in which stages note their spans."""
    offset = time.time() - time.perf_counter()
    return begin + offset, end + offset


def check(args: argparse.Namespace) -> int:
    """The length of the prompt that is read.

    Raises:
        ConfigError: an option that this measurement cannot have.
    """
    text = args.context or "4000"
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"bench pipeline reads one prompt: --context wants its length in tokens, got {text!r}")
    if args.url is not None:
        raise ConfigError("bench pipeline asks the stages themselves, so it starts an engine of its own: drop --url")
    if args.tokens < 2 or args.streams < 1:
        raise ConfigError(f"--tokens must be at least 2 and --streams at least 1, got {args.tokens} and {args.streams}")
    if args.trace is not None and not Path(args.trace).resolve().parent.is_dir():
        raise ConfigError(f"cannot write {args.trace}: there is no such folder")
    return int(text)


async def measure(engine: Engine, length: int, num_streams: int, num_tokens: int, sparse_id: int | None) -> PipelineRun:
    """All phases, prefill first."""
    document = engine.tokenizer.encode(DOCUMENT.read_text(encoding="utf-8"))
    run = PipelineRun(engine, document, sparse_id)
    await run.prefill(length)
    await run.decode(num_streams, num_tokens)
    await run.both(length, num_streams)
    return run


def measure_engine(config: EngineConfig, args: argparse.Namespace, length: int) -> tuple[PipelineRun, list[str]]:
    """Start an engine for the measurement; also returns the layers of each stage, in words."""
    with working("measuring") as say:
        start_local_ray()
        try:
            with Engine.start(config, on_progress=say) as engine:
                longest = min(length, engine.longest_sequence - 2)
                run = asyncio.run(measure(engine, longest, args.streams, args.tokens, args.sparse))
                return run, [f"layers {first} to {last - 1}" for first, last in (start.layers for start in engine.starts)]
        finally:
            ray.shutdown()


def run(args: argparse.Namespace) -> int:
    length = check(args)
    found, layers = measure_engine(config_from(args), args, length)
    for number, row in enumerate(shares_table(found.stages, found.phases)):
        line = "".join(cell.rjust(width) for cell, width in zip(row, COLUMNS, strict=True))
        console.print(line, markup=False, style="" if number else "bold")
    if args.trace is not None:
        try:
            write_trace(args.trace, found.stages, layers)
        except OSError as error:
            raise ConfigError(f"cannot write {args.trace}: {error.strerror}") from None
        console.print(f"written: {args.trace}, for chrome://tracing or ui.perfetto.dev", markup=False)
    return 0
