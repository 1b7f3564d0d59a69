"""A server of one's own: `qsa serve` in a child process on a free port, stopped with everything it started.

The commands that need an engine for a moment (generate, chat, batch, bench, demo) all go through this, so they use exactly
what a client of a real server uses.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml

from qsa.config import EngineConfig
from qsa.errors import ConfigError, EngineDeadError

LOOPBACK = "127.0.0.1"
STOP_TIMEOUT_S = 45.0
PR_SET_PDEATHSIG = 1
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is on this machine: no proxy in between


def free_port(host: str) -> int:
    """A TCP port that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def _die_with_parent() -> None:
    """In the child: be asked to stop when the parent is killed without a chance to ask (Linux only)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _last_lines(path: Path, count: int) -> list[str]:
    return [line for line in path.read_text(errors="replace").splitlines() if line.strip()][-count:]


class ServerProcess:
    """A child that serves `config`; `url` answers once `start` has returned, nothing is left after `stop`.

    It listens on loopback whatever the configuration says, and so wants no key.
    """

    def __init__(self, config: EngineConfig) -> None:
        server = {"host": LOOPBACK, "port": free_port(LOOPBACK), "api_keys": ()}
        self.config = config.model_copy(update={"server": config.server.model_copy(update=server)})
        self.url = f"http://{LOOPBACK}:{server['port']}"
        self._folder = Path(tempfile.mkdtemp(prefix="qsa-"))
        self._log = self._folder / "server.log"
        self._child: subprocess.Popen[bytes] | None = None

    def start(self, on_progress: Callable[[str], None] = lambda line: None) -> None:
        """Start the child and wait until it can answer; `on_progress` gets what it says meanwhile.

        Raises:
            ConfigError: the child refused its configuration or model; the message is the child's own.
            EngineDeadError: it failed otherwise, or said nothing for too long and was not ready.
        """
        settings = self._folder / "config.yaml"
        settings.write_text(yaml.safe_dump(self.config.model_dump(mode="json")))
        with self._log.open("wb") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "qsa.cli", "serve", "--config", str(settings)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the parent alone, which then stops the child in order
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
        silence_s = self.config.pipeline.start_timeout_s + 60  # Ray itself, before its actors
        heard, deadline = 0, time.monotonic() + silence_s
        while not self._is_ready():
            code = self._child.poll()
            if code is not None:
                lines = _last_lines(self._log, 1)
                message = lines[-1].removeprefix("qsa serve: ") if lines else f"exit code {code}"
                raise (ConfigError if code == 2 else EngineDeadError)(message)
            if (size := self._log.stat().st_size) > heard:
                heard, deadline = size, time.monotonic() + silence_s
            if time.monotonic() > deadline:
                tail = " | ".join(_last_lines(self._log, 3))
                raise EngineDeadError(f"the server was not ready in time (pipeline.start_timeout_s); it said: {tail}")
            for line in _last_lines(self._log, 1):
                on_progress(line)
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            with OPENER.open(f"{self.url}/ready", timeout=2) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def stop(self) -> None:
        """Stop the child and wait for its processes. Calling it again does nothing."""
        child, self._child = self._child, None
        if child is not None and child.poll() is None:
            child.terminate()
            try:
                child.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)  # the child leads its session, so this is what it started and no more
                child.wait()
        for path in self._folder.glob("*"):
            path.unlink()
        with contextlib.suppress(OSError):
            self._folder.rmdir()


@contextlib.contextmanager
def running_server(config: EngineConfig, on_progress: Callable[[str], None] = lambda line: None) -> Iterator[str]:
    """The address of a fresh server that lives as long as the block."""
    server = ServerProcess(config)
    try:
        server.start(on_progress)
        yield server.url
    finally:
        server.stop()
