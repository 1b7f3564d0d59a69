"""`qsa serve`: the engine on Ray Serve, in the foreground, until it is told to stop."""

from __future__ import annotations

import argparse
import sys

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

    try:
        serve_blocking(config, on_ready, on_start, on_progress)
    finally:
        bar.stop()
    return 0
