"""`qsa bench`: prefill and decode at some prompt lengths, through HTTP and every actor, as a table.

`qsa bench pipeline` is in bench_pipeline.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator

from qsa.client import Client
from qsa.commands.demo import DOCUMENT
from qsa.errors import ConfigError
from qsa.measure import Pace, pace_of, time_completion
from qsa.settings import config_unless_url
from qsa.terminal import console, server_at, working

PROBE_TOKENS = 16
LENGTHS = "128,4096,8000"
COLUMNS = ("context", "first token", "prefill", "per token", "decode", "spread", "attended")
HEADER = "{:>8} {:>12} {:>9} {:>10} {:>9} {:>7} {:>9}"


def parse_lengths(text: str) -> list[int]:
    """Prompt lengths from `128,4096`.

    Raises:
        ConfigError: something in it is not a positive whole number.
    """
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        lengths = [0]
    if min(lengths) < 1:
        raise ConfigError(f"--context wants prompt lengths in tokens, such as 128,4096, got {text!r}")
    return lengths


def text_of(document: str, num_tokens: int, characters_per_token: float) -> str:
    """About `num_tokens` tokens of the document, repeated when it is shorter."""
    length = max(1, int(num_tokens * characters_per_token))
    return (document * (length // len(document) + 1))[:length]


async def measure(url: str, args: argparse.Namespace, lengths: list[int]) -> AsyncIterator[Pace]:
    document = DOCUMENT.read_text(encoding="utf-8")
    extra = {} if args.sparse is None else {"sparse_id": args.sparse}
    async with Client(url, args.api_key) as client:
        sample = document[:4096]
        probe = await time_completion(client, sample, PROBE_TOKENS, extra)  # warms up, and tells how long a token is
        ratio = len(sample) / probe.prompt_tokens
        for length in lengths:
            prompt = text_of(document, length, ratio)
            yield pace_of([await time_completion(client, prompt, args.tokens, extra) for _ in range(args.repeat)])


async def _collect(url: str, args: argparse.Namespace, lengths: list[int]) -> list[Pace]:
    return [pace async for pace in measure(url, args, lengths)]


def run(args: argparse.Namespace) -> int:
    if args.what == "pipeline":
        from qsa.commands import bench_pipeline  # noqa: PLC0415 - with torch and ray, which HTTP does not need

        return bench_pipeline.run(args)
    if args.trace is not None:
        raise ConfigError("--trace is for `qsa bench pipeline`")
    lengths = parse_lengths(args.context or LENGTHS)
    if args.tokens < 2 or args.repeat < 1:
        raise ConfigError(f"--tokens must be at least 2 and --repeat at least 1, got {args.tokens} and {args.repeat}")
    with server_at(args.url, config_unless_url(args)) as url, working("measuring"):
        paces = asyncio.run(_collect(url, args, lengths))
    console.print(HEADER.format(*COLUMNS), style="bold")
    for pace in paces:
        attended = "" if pace.attended_share is None else f"{pace.attended_share:.0%}"
        figures = (f"{pace.first_token_s:.3f} s", f"{pace.prefill_tokens_per_s:.0f}/s", f"{pace.decode_ms:.2f} ms")
        row = (pace.prompt_tokens, *figures, f"{pace.decode_tokens_per_s:.1f}/s", f"{pace.spread:.0%}", attended)
        console.print(HEADER.format(*row), markup=False)
    return 0
