"""`qsa serve` as a process: what is wrong is told before anything starts, all of it is on loopback, nothing is left."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from uuid import uuid4

import pytest
import requests
from fakes import wait_until
from ray_cluster import free_ports

from qsa.config import make_config
from qsa.errors import CheckpointError, ConfigError
from qsa.serve_app.run import check_port, cluster_cpus, port_claim, serve_blocking

ROOT = Path(__file__).resolve().parents[2]
LISTEN = "0A"


def test_a_port_that_is_taken_is_one_clear_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"server\.port {port} on 127\.0\.0\.1 is taken"):
            serve_blocking(make_config({"server": {"port": port}}))


@pytest.mark.skipif(sys.platform != "linux", reason="the claim is Linux's")
def test_two_servers_that_start_at_once_do_not_share_a_port(monkeypatch):
    (port,) = free_ports(1)
    monkeypatch.setattr("qsa.serve_app.run.check_model", lambda config: pytest.fail("it went on to start"))
    with port_claim(port), pytest.raises(ConfigError, match=rf"server\.port {port} is taken"):  # nobody listens there yet
        serve_blocking(make_config({"server": {"port": port}}))
    with port_claim(port):
        pass


def test_a_port_that_was_just_given_back_is_free():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        port = server.getsockname()[1]
        server.accept()[0].close()
        client.close()
    check_port("127.0.0.1", port)


@pytest.mark.parametrize("host", ["not a host", "192.0.2.1"])
def test_an_address_that_is_not_ours(host):
    with pytest.raises(ConfigError, match=r"server\.(host|port)"):
        check_port(host, 18_000)


def test_a_model_that_is_not_there_is_told_before_ray_starts(tmp_path):
    (port,) = free_ports(1)
    began = time.monotonic()
    with pytest.raises(CheckpointError, match="missing"):
        serve_blocking(make_config({"model": {"path": str(tmp_path / "missing")}, "server": {"port": port}}))
    assert time.monotonic() - began < 20


def test_a_cluster_of_our_own_has_room_for_every_stage():
    config = make_config({"pipeline": {"num_stages": 12, "cpus_per_stage": 40, "device": "cpu"}})
    assert cluster_cpus(config) >= 12 * 40 + 0.5  # the scheduler and the replica beside them
    assert cluster_cpus(make_config({"pipeline": {"device": "cpu"}})) >= 4


def processes_with(mark: str) -> set[int]:
    """Living processes whose environment holds the mark: a process and everything it started."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if mark.encode() in (entry / "environ").read_bytes():
                    found.add(int(entry.name))
    return found


def listening_addresses(pids: set[int]) -> set[str]:
    """Addresses, in the kernel's hexadecimal, at which these processes accept TCP connections."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and fields[9] in inodes:
                found.add(fields[1].split(":")[0])
    return found


@pytest.mark.ray
@pytest.mark.timeout(180)
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_serve_listens_on_loopback_only_tells_of_a_loss_and_leaves_nothing_after_ctrl_c(tmp_path):
    """What SIGTERM does is tested with the demo, whose server is stopped by it."""
    (port,) = free_ports(1)
    mark = f"QSA_TEST_MARK={uuid4().hex}"
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= dict([mark.split("=")]) | {"HOME": str(tmp_path)}  # Ray's token goes there
    command = [sys.executable, "-m", "qsa.cli", "serve", "--stages", "1", "--port", str(port)]
    log = tmp_path / "log"
    with log.open("w") as file:
        server = subprocess.Popen(
            [*command, "--set", "cache.device_bytes=134217728", "--set", "server.drain_s=1"],
            env=env,
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a run in the background ignores it
        )
    try:
        wait_until(lambda: server.poll() is not None or "Ctrl-C stops" in log.read_text(), 120)
        assert server.poll() is None, log.read_text()
        url = f"http://127.0.0.1:{port}"
        assert url in log.read_text().splitlines()[-1]
        answer = requests.post(url + "/v1/completions", json={"prompt": "Once upon", "max_tokens": 3}, timeout=30)
        assert answer.status_code == 200, answer.text
        processes = processes_with(mark)
        assert len(processes) > 4, "a stage, a scheduler, a replica and Ray itself are processes"
        addresses = listening_addresses(processes)
        # 127.0.0.0/8, in IPv4 and mapped to IPv6, and ::1; the kernel writes the bytes of a word in reverse
        ours = [a for a in addresses if not (a.endswith("7F") and (len(a) == 8 or a.startswith("0" * 16 + "FFFF0000")))]
        assert set(ours) <= {"0" * 24 + "01000000"}, f"listens beyond loopback: {ours}"
        assert len(addresses) >= 1
        (stage,) = [pid for pid in processes if b"StageActor" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(stage, signal.SIGKILL)
        wait_until(lambda: "the engine is well again" in log.read_text(), 60)
        assert "recovering: stage 0 has died" in log.read_text()
        body = {"prompt": "Once upon", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with requests.post(url + "/v1/completions", json=body, timeout=60, stream=True) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith(b"data: ")
            server.send_signal(signal.SIGINT)
            assert b"error" in b"".join(lines), "what is still being answered ends with an error event"
        assert server.wait(60) in (0, 130), log.read_text()
        assert "stopping: 1 request still being answered, for 1 s at most" in log.read_text()
        wait_until(lambda: not processes_with(mark), 20)
    finally:
        if server.poll() is None:
            server.terminate()
            server.wait(60)
