"""The one Ray cluster of a test run: `ray_cluster` starts it, `ray_driver` attaches this process to it.

    def test_something(ray_driver): ...            # ray is initialised in this process; start actors, engines
    def test_cli(ray_cluster):                     # a process of its own:
        subprocess.run([...], env=ray_cluster.env) # finds the cluster (RAY_ADDRESS), its token and its dashboard

- The cluster is a real one (`ray start --head`), with dashboard, job API and Ray client server, token authentication on,
  and **every** port on 127.0.0.1. It starts at the first test that asks for it (about 8 s) and ends with the run (3 s).
- It is ours alone: free ports and a temporary folder of its own, so clusters of other people on the machine are neither
  found nor touched. Never call `ray stop`: it would end theirs.
- Both fixtures have session scope, so an engine may be kept by a fixture of any scope. A test closes the engines and
  deletes the Serve applications it started; `ray.shutdown()` belongs to nobody but this file.
- One process is one kind of driver: a test of the Ray client (`ray_cluster.client_url`) or one that kills its driver
  runs it as a subprocess.
- Workers import `qsa` and every module of `tests/`; mark the tests `@pytest.mark.ray`.
- Its folder goes with the run, so the report of a test that fails holds the end of what the cluster logged meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HOST = "127.0.0.1"
START_TIMEOUT_S = 90.0
RAY_ENV = {
    # Ray replaces 127.0.0.1 by the host's address and then listens on every interface, except with this switch of its
    # macOS and Windows ports, which keeps a cluster to one machine.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": "120",  # a client's server imports ray: 30 s are not enough on a busy machine
    # gRPC restarts its poller in a forked child, which aborts when Python closes the poller's descriptor before `exec`: of
    # the servers that Ray forks for its clients, one in some hundred did not live to start (grpc/grpc#43055).
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}
os.environ.update(RAY_ENV)  # ray reads these when it is imported, which a test module may do at its top


@dataclass(frozen=True)
class RayCluster:
    """A running cluster. `env` is a whole environment for a subprocess that shall find it."""

    address: str  # of the GCS, for ray.init(address=...)
    dashboard_url: str  # http://..., also the job API's address
    client_url: str  # ray://...
    env: dict[str, str]
    temp_dir: Path  # Ray's sessions with their logs, until the cluster ends

    def log_tails(self, since: float, chars: int = 3000) -> str:
        """The end of every error log, and of the client servers' other ones, that grew after `since` (time.time())."""
        logs = [path for name in ("*.err", "ray_client_server*") for path in self.temp_dir.glob(f"session_2*/logs/{name}")]
        grown = sorted(path for path in set(logs) if path.stat().st_mtime >= since)
        texts = {path.name: path.read_text(errors="replace").strip() for path in grown}
        return "\n".join(f"--- {name}\n{text[-chars:] or '(empty)'}" for name, text in texts.items())


def free_ports(count: int) -> list[int]:
    """`count` different ports that were free a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for item in sockets:
            item.bind((HOST, 0))
        return [item.getsockname()[1] for item in sockets]


@contextlib.contextmanager
def running_cluster(num_cpus: int = 8) -> Iterator[RayCluster]:
    """Start a cluster of our own and end it, with all its processes, on leaving."""
    gcs, dashboard, client, agent, agent_grpc, metrics, runtime_env = free_ports(7)
    temp_dir = Path(tempfile.mkdtemp(prefix="qsa-ray-", dir="/tmp"))  # short: it holds unix sockets
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= RAY_ENV | {
        "RAY_ADDRESS": f"{HOST}:{gcs}",
        "RAY_API_SERVER_ADDRESS": f"http://{HOST}:{dashboard}",
        "RAY_prestart_worker_first_driver": "0",  # one process per declared CPU would start at once
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    command += [f"--node-ip-address={HOST}", f"--port={gcs}", f"--num-cpus={num_cpus}", "--num-gpus=0"]
    command += ["--include-dashboard=true", f"--dashboard-host={HOST}", f"--dashboard-port={dashboard}"]
    command += [f"--dashboard-agent-listen-port={agent}", f"--dashboard-agent-grpc-port={agent_grpc}"]
    command += [f"--metrics-export-port={metrics}", f"--runtime-env-agent-port={runtime_env}"]
    command += [f"--ray-client-server-port={client}", f"--temp-dir={temp_dir}", f"--object-store-memory={512 << 20}"]
    log_path = temp_dir / "head.log"
    start_env = {name: value for name, value in env.items() if name != "RAY_ADDRESS"}  # it would make `ray start` join
    with log_path.open("w") as log:
        head = subprocess.Popen(command, env=start_env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while "Ray runtime started" not in log_path.read_text():
            if head.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the test cluster did not start:\n{log_path.read_text()[-4000:]}")
            time.sleep(0.1)
        yield RayCluster(f"{HOST}:{gcs}", f"http://{HOST}:{dashboard}", f"ray://{HOST}:{client}", env, temp_dir)
    finally:
        head.terminate()  # `ray start --block` ends the processes it started
        try:
            head.wait(30)
        except subprocess.TimeoutExpired:
            head.kill()
        shutil.rmtree(temp_dir, ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the cluster logged during a test that failed."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("ray_cluster")
    if report.failed and cluster is not None:
        report.sections.append(("The cluster's logs", cluster.log_tails(since=call.start)))
    return report


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    """The cluster of this run; RAY_ADDRESS and RAY_API_SERVER_ADDRESS point to it."""
    with running_cluster() as cluster, pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.env.items():
            if name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
                patch.setenv(name, value)
        yield cluster


@pytest.fixture(scope="session")
def ray_driver(ray_cluster: RayCluster) -> Iterator[RayCluster]:
    """`ray_cluster`, with this process attached as a driver."""
    import ray  # noqa: PLC0415 - it reads its environment when it is imported, and costs half a second

    ray.init(address=ray_cluster.address, namespace="qsa", log_to_driver=False)
    yield ray_cluster
    ray.shutdown()
