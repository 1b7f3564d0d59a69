"""`qsa serve`: the engine on Ray Serve, in the foreground, until it is told to stop."""

from __future__ import annotations

import argparse
import sys
import time

from qsa.config import EngineConfig
from qsa.serve_app.run import Start, serve_blocking
from qsa.settings import config_from
from qsa.terminal import WarmUpBar


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(args: argparse.Namespace) -> int:
    config = config_from(args)
    server = config.server
    name = config.model.name or config.model.path
    stages = config.pipeline.num_stages
    bar = WarmUpBar()

    def on_start(settled: EngineConfig) -> None:
        say(f"starting {name} on {stages} stage{'s' if stages > 1 else ''}, {settled.pipeline.device}")

    def on_progress(start: Start) -> None:
        if start.reason is not None:
            bar.update(*start.numbers, start.reason)

    def on_ready(start: Start) -> None:
        bar.stop()
        for line in start.lines:
            say(line)
        url = f"http://{server.host}:{server.port}"
        say(f"serving {name} on {url} (OpenAI base URL {url}/v1); Ctrl-C stops")

    def on_trouble(trouble: str | None) -> None:
        say(f"{time.strftime('%H:%M:%S')} {trouble or 'the engine is well again'}")

    def on_stop(num_open: int) -> None:
        if num_open:
            requests = f"{num_open} request{'s' if num_open > 1 else ''}"
            say(f"stopping: {requests} still being answered, for {server.drain_s:g} s at most; Ctrl-C again ends at once")

    try:
        serve_blocking(config, on_ready, on_start, on_progress, on_trouble, on_stop)
    finally:
        bar.stop()
    return 0
