"""The Ray Serve application: a replica that owns its engine, with all actors in the replica's placement group.

    serve run qsa.serve_app.app:app                                        the default model
    serve run qsa.serve_app.app:build_app model=/models/x limits.max_sequences=4
    serve deploy serve.yaml                                                the same from a file

A replica reserves one placement group: a bundle a stage, and in the first one also what itself and the scheduler need.
The engine's actors are children of the replica, so a redeploy, a crash or `kill -9` of the replica ends them too. The
replica answers HTTP and nothing else; busy is decided by the engine's admission, so Serve's own queue limits are out of
the way.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import time
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve

from qsa.actors.engine import Engine
from qsa.actors.placement import engine_bundles, place
from qsa.actors.telemetry import WarmUpProgress
from qsa.config import EngineConfig, load_config
from qsa.errors import EngineDeadError
from qsa.serve_app.api import make_api
from qsa.serve_app.warm_up import WarmUp, send_first_requests

logger = logging.getLogger("ray.serve")  # what Serve writes to the replica's log

REPLICA_CPUS = 0.25
MAX_ONGOING = 4096  # far above what the engine admits: whoever comes on top is told 429 by the engine, with a reason
HEALTH_PERIOD_S = 2.0  # Serve replaces a replica after three failures in a row
HEALTH_TIMEOUT_S = 30.0  # of one check, for a machine that is short of CPU
SHORT_WARM_UP_S = 5.0  # a warm-up that takes no longer is over when the deployment is running
RECOVERY_MARGIN_S = 60.0  # an engine that is not healthy for so much longer than a start may take will not become so
DRAIN_MARGIN_S = 10.0  # between the end of the last stream and the moment Serve kills the replica


@serve.deployment
@serve.ingress()
class EngineReplica:
    """One engine behind HTTP. State: the engine and its API; both end with the replica."""

    async def __init__(self, settings: dict[str, Any]) -> None:  # type: ignore[misc]
        """Start the engine and begin its warm-up; the replica answers HTTP from then on, with 503 until it is warm.

        A short warm-up ends first, and so does any where another replica answers meanwhile.

        Raises:
            QSAError: the engine cannot start. Nothing of it is left.
        """
        _bind_to_own_address()
        config = EngineConfig.model_validate(settings)
        context = serve.get_replica_context()
        name = f"{context.app_name}/{context.replica_tag}"
        self._engine = await asyncio.to_thread(Engine.start, config, name=name, on_progress=logger.info, warm_up=False)
        self._state = WarmUp()
        self._app = make_api(self._engine, config, self._state)
        self._drain_s = config.server.drain_s
        self._healthy_at: float | None = None
        self._watch = asyncio.create_task(self._drain_when_stopping())
        warming = self._warming = asyncio.create_task(self._warm_up(config))
        has_company = await asyncio.to_thread(_has_other_replica, context.app_name, context.deployment)
        await asyncio.wait({warming}, timeout=None if has_company else SHORT_WARM_UP_S)
        if warming.done():
            warming.result()

    def __repr__(self) -> str:
        return f"EngineReplica({self._engine.model_name})"

    async def _warm_up(self, config: EngineConfig) -> None:
        """Warm the engine up, with first requests through an API that is thrown away with its counters."""
        state, engine = self._state, self._engine
        loop, api = asyncio.get_running_loop(), make_api(engine, config)

        def report(progress: WarmUpProgress) -> None:
            state.report(progress.done, progress.total, str(progress))

        def first_requests() -> None:
            work = send_first_requests(api, engine, engine.first_tokens, config.server.api_keys)
            asyncio.run_coroutine_threadsafe(work, loop).result()

        try:
            await asyncio.to_thread(engine.warm_up, report, first_requests)
        except Exception as error:
            state.fail(error)
            raise
        finally:
            api.state.api.close()
        state.finish()
        for line in engine.start_lines():
            logger.info("%s", line)

    async def start_state(self) -> dict[str, Any]:
        """How far the start is, for whoever started the server: see `run.Start`."""
        state = self._state
        lines = [] if state.reason is not None else self._engine.start_lines()
        return {"reason": state.reason, "failed": state.failed, "numbers": state.numbers, "lines": lines}

    async def condition(self) -> dict[str, Any]:
        """What whoever started the server may want to tell: see `run.Condition`."""
        health = await self._engine.health()
        return {"trouble": None if health.ok else health.reason, "num_open": self._app.state.api.num_open}

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    async def check_health(self) -> None:
        """Called by Serve, which replaces the replica, and with it the engine, when this keeps failing.

        An engine that recovers is left to it: its streams go on afterwards, those of a new replica do not.
        """
        if self._state.failed is not None:
            raise EngineDeadError(self._state.failed)
        if self._state.reason is not None:
            return
        health = await self._engine.health()
        now = time.monotonic()
        self._healthy_at = now if health.ok else self._healthy_at or now
        limit_s = self._engine.config.pipeline.start_timeout_s + RECOVERY_MARGIN_S
        if health.is_dead or now - self._healthy_at > limit_s:
            raise EngineDeadError(health.reason or "the engine is not healthy")

    async def drain(self) -> None:
        """Answer new requests with 503, wait for the open ones; for whoever is about to delete the application."""
        await self._app.state.api.drain(self._drain_s)

    async def _drain_when_stopping(self) -> None:
        while not _is_stopping():
            await asyncio.sleep(0.25)
        await self.drain()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # the constructor failed
            self._engine.close()
            self._watch.cancel()
            self._warming.cancel()


def _bind_to_own_address() -> None:
    """Keep this replica's gRPC server, by which Serve's replicas may call each other, on the address Ray knows the node by.

    Serve binds it to every interface, has no setting for that, and the server unpickles what it receives. It is started
    after the constructor, in this process.
    """
    replica_module: Any = importlib.import_module("ray.serve._private.replica")  # loaded in replicas only
    bind = getattr(replica_module, "add_port_to_grpc_server", None)
    if bind is None:
        logger.warning("this version of Ray Serve binds its replicas' gRPC server in a way QSA does not know")
        return
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    host = f"[{address}]" if ":" in address else address
    replica_module.add_port_to_grpc_server = lambda server, where: bind(server, where.replace("[::]", host))


def _has_other_replica(app_name: str, deployment: str) -> bool:
    """Whether another replica of the deployment answers requests, or did until now, as at a redeployment: requests that come
    meanwhile wait for this one, and are not told 503."""
    application = serve.status().applications.get(app_name)
    status = None if application is None else application.deployments.get(deployment)
    return status is not None and any(
        state in ("RUNNING", "STOPPING") and count > 0 for state, count in status.replica_states.items()
    )


def _is_stopping() -> bool:
    """Whether Serve has asked this replica to end. Serve waits for open requests but tells nobody, so it is looked up."""
    worker = ray._private.worker.global_worker
    actor = worker.actors.get(worker.actor_id)
    return bool(getattr(getattr(actor, "_replica_impl", None), "_shutting_down", False))


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted names; what is below `sparse` stays whole, its keys are ids."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        full = f"{prefix}{name}"
        if isinstance(value, dict) and full != "sparse":
            flat |= _flatten(value, f"{full}.")
        else:
            flat[full] = value
    return flat


def config_from_args(args: dict[str, Any]) -> EngineConfig:
    """Settings as Serve hands them over: dotted names or nested, `config` a YAML file, `model` short for `model.path`.

    Raises:
        ConfigError: an unknown or wrong setting, by name.
    """
    values = dict(args)
    path = values.pop("config", None)
    if isinstance(values.get("model"), str):
        values["model.path"] = values.pop("model")
    return load_config(path, _flatten(values))


def make_app(config: EngineConfig) -> serve.Application:
    """The application of one configuration, ready for `serve.run`."""
    config = place(config)
    deployment = EngineReplica.options(  # type: ignore[attr-defined]
        ray_actor_options={"num_cpus": REPLICA_CPUS},
        placement_group_bundles=engine_bundles(config, REPLICA_CPUS),
        placement_group_strategy=config.pipeline.placement_strategy,
        max_ongoing_requests=MAX_ONGOING,
        max_queued_requests=-1,
        max_constructor_retry_count=1,  # a wrong setting does not get better
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.25,
        graceful_shutdown_timeout_s=config.server.drain_s + DRAIN_MARGIN_S,
    )
    return deployment.bind(config.model_dump(mode="json"))


def build_app(args: dict[str, Any]) -> serve.Application:
    """Builder for `serve run` and `serve deploy`; see `config_from_args`."""
    return make_app(config_from_args(args))


def __getattr__(name: str) -> serve.Application:
    """`app`: the default model, made when it is asked for, which is where Ray is known."""
    if name == "app":
        return make_app(EngineConfig())
    raise AttributeError(f"module {__name__} has no attribute {name}")
