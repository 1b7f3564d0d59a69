"""ProcessId: which process answered, so that a restarted one is recognised, and one that hangs can be ended at once.

Ray ends a process that does not react only after several seconds of waiting for it. On the same machine the kernel does
it in a moment, also when the process is stopped.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessId:
    """One process, and no other that later gets its number.

    Attributes:
        space:   where the number counts: the kernel's boot and the namespace of process ids; empty where that is not known.
        started: when it was started, as the kernel counts.
    """

    space: str
    pid: int
    started: str

    def __str__(self) -> str:
        return f"process {self.pid}"


@functools.cache
def this_process() -> ProcessId:
    """The process that asks."""
    return ProcessId(_space(), os.getpid(), _start_of(os.getpid()) or "")


def end_process(process: ProcessId | None) -> bool:
    """Kill another process of this machine; False when it is not here, or is not known, or has ended already."""
    if process is None or process == this_process() or not process.space or process.space != _space():
        return False
    if not process.started or _start_of(process.pid) != process.started:
        return False
    with contextlib.suppress(OSError):
        os.kill(process.pid, signal.SIGKILL)
        return True
    return False


def _space() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _start_of(pid: int) -> str | None:
    """When a process was started; None when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
