"""`qsa serve`: the engine on Ray Serve, in the foreground, until it is told to stop."""

from __future__ import annotations

import argparse
import signal
import sys

from qsa.serve_app.run import serve_blocking
from qsa.settings import config_from


def run(args: argparse.Namespace) -> int:
    config = config_from(args)
    server = config.server
    name = config.model.name or config.model.path
    stages = config.pipeline.num_stages

    def on_start() -> None:
        print(f"starting {name} on {stages} stage{'s' if stages > 1 else ''}", file=sys.stderr, flush=True)

    def on_ready() -> None:
        # Ray has put a handler of its own before ours, which prints a stack when the server is asked to stop
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        url = f"http://{server.host}:{server.port}"
        print(
            f"serving {name} on {url} (OpenAI base URL {url}/v1); Ctrl-C stops",
            file=sys.stderr,
            flush=True,
        )

    serve_blocking(config, on_ready, on_start)
    return 0
