"""An engine over several Ray nodes: where its stages are, how hidden states travel, and what happens when a node is lost.

The tests share a cluster. Each of the slow ones starts nodes of its own there, which are so large that only they have room.
"""

from __future__ import annotations

import pytest
from ray_nodes import Nodes, running_nodes
from scripted_stage import DRAG, SLOW, expected_tokens

pytestmark = pytest.mark.ray

PROMPTS = [[7], [8] * 5, [9, 10] * 100, [11] * 700, [12, 13, 14] * 50]  # more than run at once; the longest has eleven chunks
COUNT = 60
LONG = [[DRAG], [SLOW, *[8] * 1500], [9, DRAG], [10] * 5]  # one decodes, one prefills, two are about to
LONG_COUNT = 900
ON_TWO = {"placement_strategy": "STRICT_SPREAD", "cpus_per_stage": 0.6}
LARGE = {"placement_strategy": "STRICT_SPREAD", "cpus_per_stage": 3}


@pytest.fixture(scope="module")
def nodes():
    with running_nodes() as nodes:
        nodes.add(0)  # the head, which is never lost here, and so has no stage
        yield nodes


@pytest.fixture(scope="module")
def two(nodes):
    """Two nodes beside the head; neither has room for both stages."""
    return nodes.add(1), nodes.add(1)


def start(nodes: Nodes, pipeline) -> list[str]:
    """Start an engine and check that its stages are on different nodes; returns the lines of its start."""
    started = nodes.call("start_engine", {"pipeline": pipeline})
    where = started["nodes"]
    assert where["scheduler"] == where["stage0"] != where["stage1"]
    return started["lines"]


def check_streams(nodes: Nodes) -> None:
    assert nodes.call("run_streams", PROMPTS, COUNT) == [expected_tokens(prompt, COUNT) for prompt in PROMPTS]


def test_too_few_nodes_are_told(nodes):
    told = nodes.call("why_no_start", {"pipeline": LARGE | {"start_timeout_s": 1.0}})
    assert told.startswith("ConfigError: pipeline.placement_strategy is STRICT_SPREAD: the engine reserves 6.25 CPU and 0 GPU")
    assert "on 2 nodes, one for each stage" in told


def test_stages_on_two_nodes_say_the_same(nodes, two):
    """PACK, the default: on two nodes, as neither has room for both stages."""
    lines = start(nodes, {"cpus_per_stage": 0.6})
    name, why = "p2p", "all stages are on one machine"
    if nodes.has_addresses:
        name, why = "object_store", "stages are on several machines"
    (line,) = (line for line in lines if line.startswith("hidden states travel by "))
    assert line.startswith(f"hidden states travel by {name}") and f": {why}" in line
    assert not nodes.has_addresses or ("127.0.0.2" in line and "127.0.0.3" in line)
    assert nodes.call("transports") == [name, name]
    check_streams(nodes)


def test_streams_end_in_time_when_no_node_has_room_and_a_new_node_brings_the_engine_back(nodes, two):
    """And before, over connections between the two nodes' addresses."""
    start(nodes, ON_TWO | {"transport": "p2p"})
    assert nodes.call("transports") == ["p2p", "p2p"]
    check_streams(nodes)
    found = nodes.call("lose_node", "stage1", LONG, LONG_COUNT, 10.0)
    lost = "and no other one without a stage has 0.6 CPU free"
    assert found["ended_s"] < 10, found
    for end in found["ends"]:
        assert end.startswith("EngineRecoveringError: stage 1 cannot be started again: its node ") and end.endswith(lost)
    is_ok, reason = found["health"]
    assert not is_ok and "stage 1 is waiting for a node: its node " in reason and reason.endswith(lost)
    assert found["refused"] == f"EngineRecoveringError: {reason}"
    nodes.add(1)
    nodes.call("wait_until_healthy", 60.0)
    check_streams(nodes)


@pytest.mark.slow
def test_streams_go_on_on_another_node(nodes):
    added = {nodes.add(4) for _ in range(3)}
    start(nodes, LARGE)
    before = nodes.call("actor_nodes")
    found = nodes.call("lose_node", "stage1", LONG, LONG_COUNT, 60.0)
    assert found["ends"] == [expected_tokens(prompt, LONG_COUNT) for prompt in LONG]
    assert found["health"] == (True, None)
    after = nodes.call("actor_nodes")
    assert after["stage0"] == before["stage0"] and {after["stage1"]} == added - set(before.values())
    nodes.call("close_engine")


@pytest.mark.slow
def test_the_node_of_the_scheduler_is_lost(nodes):
    pipeline = LARGE | {"cpus_per_stage": 5}
    nodes.add(6)
    nodes.add(6)
    start(nodes, pipeline)
    found = nodes.call("lose_node", "scheduler", LONG, LONG_COUNT, 10.0)
    assert found["ended_s"] < 10, found
    assert all(end.startswith("EngineRecoveringError: the scheduler has died") for end in found["ends"]), found
    assert not found["health"][0] and "the scheduler has died" in found["health"][1]
    nodes.add(6)
    nodes.call("wait_until_healthy", 60.0)
    check_streams(nodes)
