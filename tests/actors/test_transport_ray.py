"""Transports between real actors: the object store's frames and chunks, Ray's direct transport over gloo, a death."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def peers(ray_driver):
    """Two actors as stages are: a thread of their own for deliveries, made so that Ray's direct transport can be used."""
    import ray  # noqa: PLC0415 - after the cluster has set its environment
    from transport_actors import Peer  # noqa: PLC0415

    from qsa.actors.transport_rdt import actor_options  # noqa: PLC0415

    groups = {"control": 2, "link": 1}
    remote = ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups=groups, **actor_options("rdt"))(Peer)
    actors = [remote.options(num_cpus=0.1).remote() for _ in range(2)]
    yield actors
    for actor in actors:
        ray.kill(actor)


def connect(actors, name, dtype):
    import ray  # noqa: PLC0415

    addresses = ray.get([actor.open.remote(name, stage, dtype) for stage, actor in enumerate(actors)], timeout=60)
    first, last = actors
    ray.get([first.connect.remote(addresses, last, None), last.connect.remote(addresses, None, first)], timeout=60)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["object_store", "p2p"])
def test_chunks_and_bursts_between_actors(name, dtype, peers):
    import ray  # noqa: PLC0415

    connect(peers, name, dtype)
    first, last = peers
    checks = [last.check.remote(first.forward.remote(rows)) for rows in (1, 5, 64)]
    assert ray.get(checks, timeout=60) == [True] * 3
    burst = [first.drive.remote(40), last.follow.remote()]
    answers, steps = ray.get(burst, timeout=60)
    assert answers == [bytes([step]) for step in range(40)] and steps == 40
    ray.get([actor.close.remote() for actor in peers])


def test_chunks_by_rays_direct_transport_twice(peers):
    """Twice: a group is made anew for the next epoch."""
    import ray  # noqa: PLC0415

    from qsa.actors.transport_rdt import create_rdt_group, forward_options  # noqa: PLC0415

    first, last = peers
    for dtype in ("float32", "bfloat16"):
        connect(peers, "rdt", dtype)
        create_rdt_group(peers, "cpu")
        options = forward_options("rdt", "cpu")
        assert options == {"tensor_transport": "gloo"} and forward_options("p2p", "cpu") == {}
        checks = [last.check.remote(first.forward.options(**options).remote(rows)) for rows in (1, 5, 64)]
        assert ray.get(checks, timeout=60) == [True] * 3
        burst = [first.drive.remote(10), last.follow.remote()]
        assert ray.get(burst, timeout=60)[1] == 10
        ray.get([actor.close.remote() for actor in peers])


@pytest.mark.parametrize(("name", "limit_s"), [("object_store", 40.0), ("p2p", 6.0)])  # one waits for Ray to notice
def test_an_actor_that_dies_is_noticed(name, limit_s, ray_driver):
    import ray  # noqa: PLC0415
    from transport_actors import Peer  # noqa: PLC0415

    remote = ray.remote(max_restarts=-1, max_task_retries=0, concurrency_groups={"control": 2, "link": 1})(Peer)
    actors = [remote.options(num_cpus=0.1).remote() for _ in range(2)]
    try:
        connect(actors, name, "float32")
        waiting = actors[0].wait_for_answer.remote()
        time.sleep(0.2)
        began = time.monotonic()
        ray.kill(actors[1], no_restart=False)
        assert ray.get(waiting, timeout=60).startswith("TransportClosed: ")
        assert time.monotonic() - began < limit_s
    finally:
        for actor in actors:
            ray.kill(actor)


@pytest.mark.slow  # a client's server takes its time
def test_a_ray_client_imports_it_without_using_it(ray_cluster):
    code = (
        "import ray, os; ray.init(os.environ['CLIENT']);"
        "import qsa.actors.transport_rdt, qsa.actors.placement, qsa.actors.transport_p2p, sys;"
        "assert 'ray.experimental.collective' not in sys.modules; print('imported')"
    )
    env = {**ray_cluster.env, "CLIENT": ray_cluster.client_url}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "imported", done.stderr[-2000:]


def test_the_schedulers_process_knows_transports_without_torch():
    code = "import sys, qsa.actors.transport as t; t.choose_transport('auto', 'cpu', 2, True); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
