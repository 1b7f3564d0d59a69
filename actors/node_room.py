"""Whether any node of the Ray cluster can take a stage whose process has to be started again.

Ray says nothing while it looks for a place, and takes 15 s to notice that a node is gone. So the nodes are asked whether they
are there.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ray
from ray._private import state
from ray.util.placement_group import PlacementGroup, placement_group_table

CONNECT_S = 1.0


@dataclass(frozen=True)
class NodeView:
    """A node of the cluster. `free`: resources that nobody has reserved."""

    address: str
    is_reachable: bool
    free: Mapping[str, float]


def why_no_node(
    bundle: Mapping[str, float], own: str | None, others: Collection[str], strategy: str, nodes: Mapping[str, NodeView]
) -> str | None:
    """Why a stage cannot be started now; None when it can.

    Args:
        bundle: what it reserves.
        own:    id of the node where it has that reserved, or had, before the node was lost; None: nowhere.
        others: nodes of the other stages.
        nodes:  those that the cluster knows, by id.
    """
    node = nodes.get(own or "")
    if node is not None and node.is_reachable:
        return None
    is_alone = strategy == "STRICT_SPREAD"
    for name, other in nodes.items():
        is_allowed = name != own and not (is_alone and name in others) and other.is_reachable
        if is_allowed and all(other.free.get(kind, 0.0) >= amount for kind, amount in bundle.items()):
            return None
    lost = f"its node {node.address} does not answer" if node is not None else "its node is gone"
    wanted = " and ".join(f"{amount:g} {kind}" for kind, amount in bundle.items())
    return f"{lost}, and no other one{' without a stage' if is_alone else ''} has {wanted} free"


class NodeRoom:
    """The nodes that a placement group with one bundle a stage could use. The state: where the bundles were last."""

    def __init__(self, group: PlacementGroup) -> None:
        self._group = group
        self._places: dict[int, str] = {}

    def why_none(self, stage: int) -> str | None:
        """Why a stage cannot be started now; None when it can, or when that is not known. Blocks, for a second or so."""
        table: dict[str, Any] = placement_group_table(self._group)
        found = {int(bundle): node for bundle, node in table["bundles_to_node_id"].items() if node}
        self._places |= found
        free = state.available_resources_per_node()  # type: ignore[no-untyped-call]
        living = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        with ThreadPoolExecutor(max(1, len(living))) as threads:
            reachable = list(threads.map(_is_reachable, living))
        nodes = {
            node["NodeID"]: NodeView(node["NodeManagerAddress"], is_reachable, free.get(node["NodeID"], {}))
            for node, is_reachable in zip(living, reachable, strict=True)
        }
        bundle = self._group.bundle_specs[stage]
        others = [node for other, node in self._places.items() if other != stage]
        return why_no_node(bundle, self._places.get(stage), others, table["strategy"], nodes)


def _is_reachable(node: Mapping[str, Any]) -> bool:
    try:
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), CONNECT_S).close()
    except OSError:
        return False
    return True
