"""PlacedScheduler: the class of the scheduler's actor. Its process imports this file alone, and so starts without torch."""

from __future__ import annotations

from collections.abc import Sequence

import ray

from qsa.actors.node_room import NodeRoom
from qsa.actors.scheduler_actor import SchedulerActor
from qsa.actors.scheduler_spec import SchedulerSpec

NAMESPACE = "qsa"  # of all named actors, whatever namespace the driver has


class PlacedScheduler(SchedulerActor):
    """Finds its stages by name: the arguments of an actor that may be started again have to be plain values."""

    def __init__(self, spec: SchedulerSpec, stage_names: Sequence[str]) -> None:
        group = ray.util.get_current_placement_group()
        why_no_room = NodeRoom(group).why_none if group is not None else lambda _: None
        super().__init__(spec, [ray.get_actor(name, NAMESPACE) for name in stage_names], why_no_room)
