"""The driver of a Ray cluster of several nodes on this machine: it starts and ends nodes, and runs an engine over them.

`ray_nodes.py` starts it and calls the functions at the end of this file, one after another, each with an event loop of its own
where it needs one.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import ray
from engine_helpers import collect, greedy, scripted_config, until_free, until_healthy
from ray._private import state
from ray._private.node import Node
from ray._private.parameter import RayParams
from scripted_stage import build_scripted

from qsa.actors.engine import Engine
from qsa.actors.placement import NAMESPACE
from qsa.errors import QSAError

SIOCSIFFLAGS, IFF_UP = 0x8914, 1


class Cluster:
    """The nodes by id, the head first, and the engine that runs on them."""

    def __init__(self, temp_dir: str) -> None:
        self.temp_dir = temp_dir
        self.nodes: dict[str, Node] = {}
        self.engine: Engine | None = None

    def add(self, address: str, num_cpus: float) -> str:
        """Start a node; returns its id when the cluster knows it."""
        params = RayParams(
            node_ip_address=address,
            num_cpus=num_cpus,
            num_gpus=0,
            object_store_memory=128 << 20,
            temp_dir=self.temp_dir,
            min_worker_port=0,
            max_worker_port=0,
            include_dashboard=False,
            include_log_monitor=False,
        )
        is_head = not self.nodes
        if not is_head:
            params.gcs_address = next(iter(self.nodes.values())).gcs_address
            params.dashboard_agent_listen_port = None  # not the head's
            params.node_manager_port = 0
        node = Node(params, head=is_head, shutdown_at_exit=True, spawn_reaper=True)
        self.nodes[node.node_id] = node
        if is_head:
            ray.init(address=node.gcs_address, namespace=NAMESPACE, log_to_driver=False)
        deadline = time.monotonic() + 30
        while not any(n["NodeID"] == node.node_id and n["Alive"] and n["Resources"] for n in ray.nodes()):
            assert time.monotonic() < deadline, f"the node at {address} did not join"
            time.sleep(0.05)
        return node.node_id

    def kill(self, node_id: str) -> None:
        """As a machine that loses its power, but for its connections, which are closed."""
        self.nodes.pop(node_id).kill_all_processes(check_alive=False, allow_graceful=False, wait=True)

    def close(self) -> None:
        close_engine(self)
        ray.shutdown()
        for node_id in reversed(self.nodes):
            self.nodes[node_id].kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
        self.nodes.clear()


def bring_loopback_up() -> None:
    """The only interface of a new network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))


def main() -> None:
    connection, temp_dir, has_own_network = Connection(int(sys.argv[1])), sys.argv[2], sys.argv[3] == "True"
    if has_own_network:
        bring_loopback_up()
    cluster = Cluster(temp_dir)
    try:
        while True:
            function, arguments = connection.recv()
            try:
                connection.send((True, globals()[function](cluster, *arguments)))
            except Exception:
                connection.send((False, traceback.format_exc()))
    except EOFError:
        return  # the test is over
    finally:
        cluster.close()


# what a test calls


def add_node(cluster: Cluster, address: str, num_cpus: float) -> str:
    return cluster.add(address, num_cpus)


def start_engine(cluster: Cluster, settings: dict[str, Any]) -> dict[str, Any]:
    """Start an engine in the place of the one before; returns where its actors are, by name, and what the start says."""
    close_engine(cluster)
    engine = cluster.engine = Engine.start(scripted_config(**settings), build=build_scripted)
    return {"nodes": actor_nodes(cluster), "lines": engine.start_lines(), "transports": transports(cluster)}


def close_engine(cluster: Cluster) -> None:
    if cluster.engine is not None:
        cluster.engine.close()
        cluster.engine = None


def why_no_start(cluster: Cluster, settings: dict[str, Any]) -> str:
    """What a start that cannot succeed says."""
    try:
        Engine.start(scripted_config(**settings), build=build_scripted).close()
    except QSAError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("the engine has started")


def actor_nodes(cluster: Cluster) -> dict[str, str]:
    """Node ids of the engine's actors."""
    assert cluster.engine is not None
    prefix = f"qsa/{cluster.engine.name}/"
    living = [actor for actor in state.actors().values() if actor["State"] == "ALIVE" and actor["Name"].startswith(prefix)]
    return {actor["Name"].removeprefix(prefix): actor["Address"]["NodeID"] for actor in living}


def transports(cluster: Cluster) -> list[str]:
    return [stage.transport for stage in asyncio.run(cluster.engine.stats()).stages]


def run_streams(cluster: Cluster, prompts: list[list[int]], count: int) -> list[list[int]]:
    """The tokens of all prompts, sent at the same time."""

    async def run() -> list[list[int]]:
        ends = await asyncio.gather(*(collect(cluster.engine, prompt, greedy(count)) for prompt in prompts))
        await until_free(cluster.engine)
        return [tokens for tokens, _ in ends]

    return asyncio.run(run())


def lose_node(cluster: Cluster, actor: str, prompts: list[list[int]], count: int, watch_s: float) -> dict[str, Any]:
    """Kill the node of one of the engine's actors while prompts are answered; watch until all have ended, `watch_s` at most.

    Returns:
        ends: the tokens of each prompt, or the error that ended it; ended_s: seconds until all had ended; health: whether it
        was ok, and why not, at the end; refused: what a new request is told then.
    """
    node_id = actor_nodes(cluster)[actor]

    async def run() -> dict[str, Any]:
        engine = cluster.engine
        requests = [asyncio.create_task(collect(engine, prompt, greedy(count))) for prompt in prompts]
        while (await engine.stats()).scheduler.generated_tokens < 20:
            await asyncio.sleep(0.02)
        await asyncio.to_thread(cluster.kill, node_id)
        began = time.monotonic()
        await asyncio.wait(requests, timeout=watch_s)
        ended_s = time.monotonic() - began
        for request in requests:
            request.cancel()
        late = asyncio.wait_for(collect(engine, [7], greedy(1)), 5)
        *ends, refused = await asyncio.gather(*requests, late, return_exceptions=True)
        told = [f"{type(end).__name__}: {end}" if isinstance(end, BaseException) else end[0] for end in (*ends, refused)]
        health = await engine.health()
        return {"ends": told[:-1], "refused": told[-1], "ended_s": ended_s, "health": (health.ok, health.reason)}

    return asyncio.run(run())


def wait_until_healthy(cluster: Cluster, timeout_s: float) -> None:
    asyncio.run(until_healthy(cluster.engine, timeout_s))


if __name__ == "__main__":
    main()
