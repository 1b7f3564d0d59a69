"""The test cluster is real, is reached with its token alone, and listens on loopback only."""

from __future__ import annotations

import os
import urllib.error
import urllib.request

import pytest
import ray

pytestmark = pytest.mark.ray


def listening_addresses(pids: set[int]) -> list[str]:
    """Local addresses on which these processes listen for TCP, from /proc."""
    inodes = set()
    for pid in pids:
        try:
            links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        except OSError:
            continue
        inodes |= {link[8:-1] for link in links if link.startswith("socket:[")}
    found = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/net/{table}") as lines:
            for fields in (line.split() for line in lines):
                if fields[3] == "0A" and fields[9] in inodes:
                    found.append(fields[1])
    return found


def test_actor_runs_and_nothing_listens_beyond_loopback(ray_driver):
    session_dir = ray._private.worker._global_node.get_session_dir_path()
    assert ray.get(ray.remote(lambda: 5).remote()) == 5
    pids = {int(pid) for pid in os.listdir("/proc") if pid.isdigit() and session_dir.encode() in _cmdline(pid)}
    assert len(pids) >= 3  # GCS, raylet, dashboard
    addresses = listening_addresses(pids | {os.getpid()})
    assert addresses
    loopback = ("0100007F:", "0000000000000000FFFF00000100007F:")
    assert [a for a in addresses if not a.startswith(loopback)] == []


def _cmdline(pid: str) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def test_dashboard_refuses_without_token(ray_cluster):
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(f"{ray_cluster.dashboard_url}/api/jobs/", timeout=10)
    assert error.value.code in (401, 403)
