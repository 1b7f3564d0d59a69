"""A Ray cluster of several nodes on this machine, for one test module: `running_nodes` starts the process that is its driver.

    with running_nodes() as nodes:
        nodes.add(0)
        nodes.call("start_engine", {"pipeline": {...}})   # a function of node_driver.py, run there; what it raises comes back

- Apart from the run's shared cluster: the driver, the head and the other nodes are processes of their own, with a token, ports
  and a folder of their own. None of them outlives the `with`.
- Ray listens on loopback alone only where a node's address is 127.0.0.1, and two nodes of one address are one host. So the
  processes get a network of their own (`unshare`) with loopback alone, in which every node has its address; where that is
  not allowed, all nodes are at 127.0.0.1 (`has_addresses`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ray_cluster import RAY_ENV, ROOT

OWN_NETWORK = ["unshare", "--map-root-user", "--net"]
NOTICE_ENV = {  # Ray notices the loss of a node after 8 s instead of 16
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
}


@dataclass
class Nodes:
    """The cluster's driver, as the test sees it.

    Attributes:
        has_addresses: every node has an address of its own.
        log_path:      what the driver writes, and Ray through it.
        added:         how many nodes have been started.
    """

    connection: Connection
    has_addresses: bool
    log_path: Path
    added: int = 0

    def add(self, num_cpus: int) -> str:
        """Start a node, the first one is the head; returns its id."""
        self.added += 1
        node_id: str = self.call("add_node", f"127.0.0.{self.added if self.has_addresses else 1}", num_cpus)
        return node_id

    def call(self, function: str, *arguments: Any, timeout_s: float = 90.0) -> Any:
        """Run a function of node_driver.py there; returns what it returns, fails with its traceback."""
        self.connection.send((function, arguments))
        assert self.connection.poll(timeout_s), f"{function} was not done after {timeout_s:g} s"
        try:
            is_done, result = self.connection.recv()
        except EOFError:
            raise AssertionError(f"the driver ended in {function}:\n{self.log_path.read_text()[-8000:]}") from None
        assert is_done, result
        return result


@contextlib.contextmanager
def running_nodes() -> Iterator[Nodes]:
    """Start the driver; it has no node yet."""
    has_addresses = subprocess.run([*OWN_NETWORK, "true"], capture_output=True).returncode == 0
    temp_dir = Path(tempfile.mkdtemp(prefix="qsa-ray-", dir="/tmp"))  # short: it holds unix sockets
    token = secrets.token_hex(32)
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= RAY_ENV | NOTICE_ENV | {"RAY_AUTH_TOKEN": token, "RAY_prestart_worker_first_driver": "0"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    here, there = Pipe()
    command = [*(OWN_NETWORK if has_addresses else []), sys.executable, "-m", "node_driver"]
    command += [str(there.fileno()), str(temp_dir), str(has_addresses)]
    log_path = temp_dir / "driver.log"
    with log_path.open("w") as log:
        driver = subprocess.Popen(
            command, env=env, stdout=log, stderr=log, pass_fds=[there.fileno()], start_new_session=True, cwd=ROOT
        )
    there.close()
    try:
        yield Nodes(here, has_addresses, log_path)
    finally:
        here.close()  # which ends the driver, and with it the nodes
        with contextlib.suppress(subprocess.TimeoutExpired):
            driver.wait(15)
        _end_all_with(token)
        driver.wait()
        shutil.rmtree(temp_dir, ignore_errors=True)


def _end_all_with(token: str) -> None:
    """End what is left: every process that was started with this token."""
    deadline = time.monotonic() + 10
    while (left := _processes_with(token)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def _processes_with(token: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if token.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found
