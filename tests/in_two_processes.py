"""The whole suite in two pytest processes: folders that only compute, in the background, beside everything else.

    python tests/in_two_processes.py

Tests of processes, servers and the Ray cluster mostly wait, so one process leaves a core idle. What computes takes what the
others leave: it has a lower priority, and no test of it looks at a clock. The terminal shows the others' progress, then all
that the background process has said, as it goes on. The exit status is that of the first one that failed. Ctrl-C and
SIGTERM interrupt both in order, so that fixtures are taken down. One process: `python -m pytest`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
COMPUTING = [f"tests/{folder}" for folder in ("benchmarks", "kernels", "memory", "model", "scheduler")]
NICENESS = 10
STOP_S = 60.0  # for fixtures after an interruption: a cluster, servers


def start(*arguments: str, output: IO[bytes] | None = None, niceness: int = 0) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pytest", *arguments]
    stderr = None if output is None else subprocess.STDOUT
    return subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=stderr, preexec_fn=lambda: os.nice(niceness) and None)


def follow(process: subprocess.Popen[bytes], path: Path) -> int:
    """Copy to the terminal what the process has written and will write, until it ends; its exit status."""
    with path.open("rb") as file:
        while True:
            status = process.poll()  # before reading: what was written until then is read
            sys.stdout.buffer.write(file.read())
            sys.stdout.buffer.flush()
            if status is not None:
                return status
            time.sleep(0.2)


def interrupt(processes: list[subprocess.Popen[bytes]], *, have_heard: bool) -> None:
    """Let both end in order. `have_heard`: they got the terminal's Ctrl-C themselves; a second one would cut them short."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    deadline = time.monotonic() + STOP_S
    for process in processes:
        if not have_heard and process.poll() is None:
            process.send_signal(signal.SIGINT)
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()


def main() -> int:
    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="qsa-tests-") as folder:
        log = Path(folder) / "computing.log"
        try:
            with log.open("wb") as output:  # .pytest_cache belongs to the other one
                processes.append(start("-p", "no:cacheprovider", *COMPUTING, output=output, niceness=NICENESS))
            processes.append(start(*(f"--ignore={path}" for path in COMPUTING)))
            others = processes[1].wait()
            print(f"\nBeside it: {' '.join(COMPUTING)}", flush=True)
            computing = follow(processes[0], log)
        except KeyboardInterrupt:
            interrupt(processes, have_heard=True)
            return 128 + signal.SIGINT
        except SystemExit as end:
            interrupt(processes, have_heard=False)
            return int(end.code or 0)
    print(f"\nexit status {others} of the first part, {computing} of {' '.join(COMPUTING)}", flush=True)
    return others or computing


if __name__ == "__main__":
    sys.exit(main())
