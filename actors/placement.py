"""Where the actors run: their specs, resources and names. The only place where `ray.remote` is applied."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from qsa.actors.placed_scheduler import NAMESPACE, PlacedScheduler
from qsa.actors.scheduler_spec import SchedulerSpec
from qsa.actors.stage import StageActor
from qsa.actors.stage_spec import StageSpec
from qsa.actors.stage_steps import ModelBuilder
from qsa.config import EngineConfig
from qsa.device import burst_steps, busy_chunk, missing_for_cards, num_lanes, prefill_chunk, settle, stage_threads
from qsa.errors import ConfigError
from qsa.memory.budget import CardMemory
from qsa.model.checkpoint.load import Checkpoint
from qsa.model.layer_times import LayerTimes
from qsa.plan import MemoryPlan, find_calibration, model_len, plan_memory, sparse_configs
from qsa.split import plan_split

SCHEDULER_CPUS = 0.25
QUIET_S = 3.0  # a wait for room in the cluster is not worth a word before

_remote: Any = ray.remote  # its annotations do not know concurrency groups
_RESTARTS = {"max_restarts": -1, "max_task_retries": 0}  # a lost process is started again; its calls are lost with it
_STAGE_GROUPS = {"control": 2, "results": 1, "link": 1}


_Scheduler = _remote(**_RESTARTS)(PlacedScheduler)


@dataclass(frozen=True)
class EnginePlan:
    """Everything that is decided about the actors. `memory`: None until the stages have looked at their cards."""

    memory: MemoryPlan | None
    stages: tuple[StageSpec, ...]
    scheduler: SchedulerSpec

    @property
    def summary(self) -> str:
        kv = [f" with {s.num_chunks} MiB of KV" if self.memory is not None else "" for s in self.stages]
        layers = ", ".join(f"layers {s.first_layer}-{s.last_layer - 1}{more}" for s, more in zip(self.stages, kv, strict=True))
        return f"{len(self.stages)} stage{'s' if len(self.stages) > 1 else ''} on {self.stages[0].device}: {layers}"


def place(config: EngineConfig) -> EngineConfig:
    """The configuration with device and cards a stage settled by the Ray cluster that this process is attached to, else by
    this machine."""
    if not ray.is_initialized():
        return settle(config)
    has_what_it_takes = missing_for_cards() is None
    resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return settle(config, int(resources.get("GPU", 0)) if has_what_it_takes else 0)


def plan_engine(
    config: EngineConfig,
    checkpoint: Checkpoint,
    cards: Sequence[CardMemory] | None = None,
    *,
    times: LayerTimes | None = None,
    available: Sequence[int] | None = None,
) -> EnginePlan:
    """Turn the configuration into the actors' specs.

    Args:
        cards:     the card of each stage; None: not known yet, and then the memory of stages on cards is not planned.
        times:     measured ones, which decide on the layers of each stage; None: estimated.
        available: free bytes of the host, as an earlier plan found them, before there were stages; None: probed now.

    Raises:
        ConfigError: settings that do not go with this model.
        BudgetError: not enough memory; nothing has been read.
    """
    config = place(config)
    pipeline, limits, device = config.pipeline, config.limits, config.pipeline.device
    calibration = find_calibration(config)
    sparse, code_dim = sparse_configs(config, calibration, checkpoint.spec)
    max_model_len = model_len(checkpoint.spec, config)
    memory = None
    if device == "cpu" or cards is not None:
        memory = plan_memory(
            checkpoint, config, sparse=sparse, code_dim=code_dim, times=times, available=available, cards=cards
        )
    split = memory.split if memory is not None else plan_split(checkpoint.spec, config, times)
    stages = tuple(
        StageSpec(
            stage=stage,
            num_stages=pipeline.num_stages,
            first_layer=first,
            last_layer=last,
            model_path=str(checkpoint.path),
            num_chunks=memory.stages[stage].num_chunks if memory is not None else 0,
            max_sequences=limits.max_sequences,
            max_model_len=max_model_len,
            sparse=sparse,
            calibration_path=calibration,
            dtype=config.model.dtype,
            kv_dtype=config.model.kv_dtype,
            quantization=config.model.quantization,
            load_format=config.model.load_format,
            device=device,
            prefill_chunk=prefill_chunk(config),
            lanes=num_lanes(config),
            num_threads=stage_threads(config),
        )
        for stage, (first, last) in enumerate(split.layers)
    )
    scheduler = SchedulerSpec(
        max_sequences=limits.max_sequences,
        max_waiting=limits.max_waiting,
        max_model_len=max_model_len,
        prefill_chunk=prefill_chunk(config),
        growth_horizon=limits.growth_horizon,
        eos_token_ids=checkpoint.eos_token_ids,
        lanes=num_lanes(config),
        busy_chunk=busy_chunk(config),
        burst_steps=burst_steps(config),
        transport=pipeline.transport,
        device=device,
        start_timeout_s=pipeline.start_timeout_s,
        sparse=sparse,
        vocab_size=checkpoint.spec.vocab_size,
        default_sparse_id=config.default_sparse_id,
    )
    return EnginePlan(memory, stages, scheduler)


# resources and actors


def engine_bundles(config: EngineConfig, owner_cpus: float = 0.0) -> list[dict[str, float]]:
    """What the engine's actors reserve: a bundle a stage, and the scheduler in the first one, beside the stage that it talks
    to most. So stages that are spread need as many nodes as there are stages, not one more.

    owner_cpus: of the Serve replica that owns the engine, which is in the first bundle too.
    """
    pipeline = place(config).pipeline
    stage = {"CPU": pipeline.cpus_per_stage}
    if pipeline.device == "cuda":
        stage["GPU"] = pipeline.gpus_per_stage or 1.0
    first = stage | {"CPU": stage["CPU"] + SCHEDULER_CPUS + owner_cpus}
    stage = {name: amount for name, amount in stage.items() if amount > 0} or {"CPU": 0.01}  # a bundle cannot be empty
    return [first, *(dict(stage) for _ in range(pipeline.num_stages - 1))]


@dataclass
class EngineActors:
    """Handles of a running engine's actors; `group` is set when the engine made its placement group itself."""

    scheduler: Any
    stages: list[Any]
    group: PlacementGroup | None

    def kill(self) -> None:
        """End all actors at once and give the placement group back. Works when they, or Ray, are gone already."""
        for actor in (self.scheduler, *self.stages):
            with contextlib.suppress(Exception):
                ray.kill(actor)
        if self.group is not None:
            with contextlib.suppress(Exception):
                remove_placement_group(self.group)


def start_actors(
    plan: EnginePlan, config: EngineConfig, name: str, build: ModelBuilder, report: Callable[[str], None]
) -> EngineActors:
    """Create scheduler and stages, named `qsa/<name>/scheduler` and `qsa/<name>/stage0`; nothing is loaded yet.

    Inside a Serve replica with a placement group its bundles are used; otherwise the engine makes a group of its own. The
    actors belong to this process and end with it.

    report: told what is waited for when the cluster has no room.

    Raises:
        ConfigError: the cluster has not the resources, or the name is taken.
    """
    pipeline, bundles = config.pipeline, engine_bundles(config)
    current = ray.util.get_current_placement_group()
    if current is not None:
        _check_group(current, bundles)
    group = current or _reserve(bundles, pipeline.placement_strategy, pipeline.start_timeout_s, report)
    actors = EngineActors(None, [], None if current is not None else group)

    def options(actor: str, stage: int, cpus: float, gpus: float = 0.0) -> dict[str, Any]:
        return {
            "name": f"qsa/{name}/{actor}",
            "namespace": NAMESPACE,
            "num_cpus": cpus,
            "num_gpus": gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=stage),
        }

    try:
        stage_class = _stage_class(pipeline.transport)
        stage_options = [
            options(f"stage{spec.stage}", spec.stage, pipeline.cpus_per_stage, bundles[spec.stage].get("GPU", 0.0))
            for spec in plan.stages
        ]
        for spec, chosen in zip(plan.stages, stage_options, strict=True):
            actors.stages.append(stage_class.options(**chosen).remote(spec, build))
        stage_names = [chosen["name"] for chosen in stage_options]
        actors.scheduler = _Scheduler.options(**options("scheduler", 0, SCHEDULER_CPUS)).remote(plan.scheduler, stage_names)
    except BaseException as error:
        actors.kill()
        if isinstance(error, ValueError) and "already" in str(error):
            raise ConfigError(f"an engine named {name} is running in this cluster; give this one another name") from None
        raise
    return actors


def _stage_class(transport: str) -> Any:
    """The stages' actor class for a transport."""
    more: dict[str, Any] = {}
    if transport == "rdt":
        from qsa.actors.transport_rdt import actor_options  # noqa: PLC0415 - Ray's alpha, loaded only where it is used

        more = actor_options(transport)
    return _remote(**_RESTARTS, concurrency_groups=_STAGE_GROUPS, **more)(StageActor)


def _check_group(group: PlacementGroup, bundles: list[dict[str, float]]) -> None:
    """Refuse a group in which the actors would wait for ever."""
    found = list(group.bundle_specs)
    enough = [all(have.get(kind, 0.0) >= amount for kind, amount in need.items()) for have, need in zip(found, bundles)]
    if len(found) < len(bundles) or not all(enough):
        raise ConfigError(f"this placement group has the bundles {found}, but the engine needs {bundles}; see engine_bundles")


def _reserve(bundles: list[dict[str, float]], strategy: str, timeout_s: float, report: Callable[[str], None]) -> PlacementGroup:
    group = placement_group(bundles, strategy=strategy)
    wanted = {kind: sum(b.get(kind, 0.0) for b in bundles) for kind in ("CPU", "GPU")}
    began, said = time.monotonic(), ""  # an autoscaler may be adding a node
    while not group.wait(timeout_seconds=1):
        free = ray.available_resources()  # type: ignore[no-untyped-call]
        waited_s = time.monotonic() - began
        if waited_s > QUIET_S and said != (text := _waiting(wanted, free)):
            report(said := text)
        if waited_s > timeout_s:
            remove_placement_group(group)
            if strategy.startswith("STRICT"):
                nodes = "one node" if strategy == "STRICT_PACK" else f"{len(bundles)} nodes, one for each stage"
                raise ConfigError(
                    f"pipeline.placement_strategy is {strategy}: the engine reserves {wanted['CPU']:g} CPU and"
                    f" {wanted['GPU']:g} GPU on {nodes}, and the Ray cluster has no room for that; add nodes, or take"
                    f" {strategy.removeprefix('STRICT_')}"
                )
            raise ConfigError(
                f"the engine reserves {wanted['CPU']:g} CPU and {wanted['GPU']:g} GPU, but the Ray cluster has"
                f" {free.get('CPU', 0):g} CPU and {free.get('GPU', 0):g} GPU free; lower pipeline.cpus_per_stage"
                + (" or pipeline.gpus_per_stage" if wanted["GPU"] else "")
            )
    return group


def _waiting(wanted: dict[str, float], free: dict[str, float]) -> str:
    """What a start waits for. Room that is there in all may still be too little on every single node."""
    kinds = [kind for kind, amount in wanted.items() if amount]
    reserved, left = (" and ".join(f"{of.get(kind, 0):g} {kind}" for kind in kinds) for of in (wanted, free))
    return f"waiting for room: the engine reserves {reserved}; the cluster has {left} free"


def start_local_ray(
    *,
    num_cpus: int | None = None,
    num_gpus: int | None = None,
    include_dashboard: bool = False,
    dashboard_port: int | None = None,
) -> str:
    """Start a Ray cluster of this process's own, on this machine only; it ends with `ray.shutdown` or the process.

    num_gpus: None: those that Ray finds.

    Every port is on 127.0.0.1, and token authentication is on unless RAY_AUTH_MODE says otherwise: Ray keeps the token in
    ~/.ray/auth_token, where its command-line tools find it.

    Returns:
        The cluster's address.
    """
    # Ray replaces 127.0.0.1 by the host's address and then listens on every interface, except with this switch of its
    # macOS and Windows ports. Processes that Ray starts read the variable; this one has read it already.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # A cluster of one machine whose head is gone is gone; 60 s is what several machines may need to find it again. So a signal
    # to a whole process group, which ends Ray's daemons too, does not leave this process waiting for them.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "10")
    token = Path.home() / ".ray" / "auth_token"
    is_new = not token.exists()
    context: Any = ray.init(
        address="local",
        _node_ip_address="127.0.0.1",
        num_cpus=num_cpus or max(4, len(os.sched_getaffinity(0))),
        num_gpus=num_gpus,
        include_dashboard=include_dashboard,
        dashboard_host="127.0.0.1",
        dashboard_port=dashboard_port,
        namespace=NAMESPACE,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    if is_new and token.exists():
        token.chmod(0o600)  # Ray leaves it readable for everybody
    return str(context.address_info["gcs_address"])
