"""`qsa serve` in one call: a Ray cluster and Serve of this process's own, until it is told to stop."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.serve.config import HTTPOptions, ProxyLocation

from qsa.actors.placement import engine_bundles, plan_engine, start_local_ray
from qsa.config import EngineConfig
from qsa.device import num_local_cards, settle, stage_cards
from qsa.errors import ConfigError, EngineDeadError
from qsa.model.checkpoint.open import open_model
from qsa.serve_app.app import DRAIN_MARGIN_S, REPLICA_CPUS, make_app

APP_NAME = "qsa"
IDLE_CONNECTION_S = 75  # longer than the pools of HTTP clients keep theirs
POLL_S = 0.5
WARM_UP_POLL_S = 0.2
START_TIMEOUT_S = 10.0  # of a question how far the start is
CONDITION_TIMEOUT_S = 2.0
MIN_CPUS = 4


def check_port(host: str, port: int) -> None:
    """See whether the HTTP server could listen there.

    Raises:
        ConfigError: the port is taken, or the address is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        raise ConfigError(f"server.host is {host}, which is not an address") from None
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except PermissionError:
            raise ConfigError(f"server.port {port} needs more rights; choose one above 1023") from None
        except OSError as error:
            why = "is taken" if "in use" in str(error).lower() else f"cannot be used ({error.strerror})"
            raise ConfigError(f"server.port {port} on {host} {why}; choose another with --port") from None


@contextlib.contextmanager
def port_claim(port: int) -> Iterator[None]:
    """Keep the port from another `qsa serve` of this user that starts at the same moment.

    Serve's listeners share a port with each other (SO_REUSEPORT): both servers would come up, and each get a part of the
    requests. The claim is a name in Linux's abstract socket space, which ends with the process however it ends.

    Raises:
        ConfigError: another server has it.
    """
    with contextlib.ExitStack() as stack:
        if sys.platform == "linux":
            claim = stack.enter_context(socket.socket(socket.AF_UNIX))
            try:
                claim.bind(f"\0qsa-serve-{os.getuid()}-{port}")
            except OSError:
                message = f"server.port {port} is taken by a server that is starting; choose another with --port"
                raise ConfigError(message) from None
        yield


@dataclass(frozen=True)
class Start:
    """How far the application's start is.

    Attributes:
        reason:  why it does not answer yet; None when it does.
        failed:  why it never will.
        numbers: steps of the warm-up done, and in all.
        lines:   what computes, once it is warm.
    """

    reason: str | None
    failed: str | None
    numbers: tuple[int, int]
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Condition:
    """How a server that answers is.

    Attributes:
        trouble:  what its engine is recovering from; None: nothing.
        num_open: requests being answered.
    """

    trouble: str | None
    num_open: int


def check_model(config: EngineConfig) -> None:
    """Read the model's headers and plan its memory, before anything is started.

    Raises:
        QSAError: what the engine would say, some seconds later.
    """
    checkpoint = open_model(config.model.path, config.model.load_format)
    try:
        plan_engine(config, checkpoint, stage_cards(config) if config.pipeline.device == "cuda" else None)
    finally:
        checkpoint.close()


def cluster_cpus(config: EngineConfig) -> int:
    """CPUs that a cluster of our own says it has. Never fewer than the actors reserve: Serve would wait for more for ever."""
    reserved = sum(bundle.get("CPU", 0.0) for bundle in engine_bundles(config, REPLICA_CPUS))
    return max(MIN_CPUS, len(os.sched_getaffinity(0)), math.ceil(reserved))


def start_serving(config: EngineConfig, on_progress: Callable[[Start], None] | None = None) -> Start:
    """Deploy the application on the Ray cluster this process is attached to; returns when it can answer.

    Raises:
        EngineDeadError: the application could not be deployed; the message is the engine's own.
    """
    options = HTTPOptions(host=config.server.host, port=config.server.port, keep_alive_timeout_s=IDLE_CONNECTION_S)
    serve.start(proxy_location=ProxyLocation.HeadOnly, http_options=options)
    try:
        handle = serve.run(make_app(config), name=APP_NAME, route_prefix="/")
    except RuntimeError as error:
        raise EngineDeadError(_reason(str(error))) from None
    while True:
        _raise_if_failed()
        try:
            state = handle.start_state.remote().result(timeout_s=START_TIMEOUT_S)
        except TimeoutError:  # a machine that is short of CPU
            continue
        start = Start(state["reason"], state["failed"], tuple(state["numbers"]), tuple(state["lines"]))
        if start.failed is not None:
            raise EngineDeadError(start.failed)
        if on_progress is not None:
            on_progress(start)
        if start.reason is None:
            return start
        time.sleep(WARM_UP_POLL_S)


def _reason(message: str) -> str:
    """The engine's own error inside Serve's report of a failed deployment, in one line."""
    status = serve.status().applications.get(APP_NAME)
    reports = [] if status is None else [status.message, *(item.message for item in status.deployments.values())]
    lines = [line.strip() for report in [message, *reports] for line in report.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("qsa.errors.")]
    return errors[-1].partition(": ")[2] if errors else lines[-1]


def stop_serving(drain_s: float) -> None:
    """End the application; its open streams get server.drain_s. Serve itself ends with the cluster, which is ours.

    The replica drains before it is deleted, since Serve answers 404 in the name of an application that is being deleted.
    """
    with contextlib.suppress(Exception):
        serve.get_app_handle(APP_NAME).drain.remote().result(timeout_s=drain_s + DRAIN_MARGIN_S)
    with contextlib.suppress(Exception):
        serve.delete(APP_NAME)


def serve_blocking(
    config: EngineConfig,
    on_ready: Callable[[Start], None] | None = None,
    on_start: Callable[[EngineConfig], None] | None = None,
    on_progress: Callable[[Start], None] | None = None,
    on_trouble: Callable[[str | None], None] | None = None,
    on_stop: Callable[[int], None] | None = None,
) -> None:
    """Serve until interrupted (KeyboardInterrupt, SystemExit); then stop everything that was started.

    `on_start` is called when port, model and memory have passed, with what the configuration means on this machine;
    `on_progress` while the engine warms up; `on_ready` when requests are answered; `on_trouble` when the engine begins to
    recover, for each thing that it does, and with None when it is well again; `on_stop` before open requests, so many, are
    waited for.

    Raises:
        ConfigError:     port taken, or a setting that cannot work; nothing has been started.
        CheckpointError: the model cannot be read; nothing has been started.
        EngineDeadError: the engine did not start, or ended for good; nothing is left running.
    """
    check_port(config.server.host, config.server.port)
    with port_claim(config.server.port):
        config = settle(config)
        check_model(config)
        on_term = signal.getsignal(signal.SIGTERM)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        if on_start is not None:
            on_start(config)
        try:
            start_local_ray(
                num_cpus=cluster_cpus(config),
                num_gpus=num_local_cards() if config.pipeline.device == "cuda" else None,
            )
            _take_signal_back(on_term)
            start = start_serving(config, on_progress)
            if on_ready is not None:
                on_ready(start)
            _watch(on_trouble)
        except (KeyboardInterrupt, SystemExit):
            condition = _condition() if ray.is_initialized() else None
            if on_stop is not None and condition is not None:
                on_stop(condition.num_open)
            raise
        finally:
            if ray.is_initialized():
                stop_serving(config.server.drain_s)
                ray.shutdown()


def _watch(on_trouble: Callable[[str | None], None] | None) -> None:
    """Until the application is gone, or somebody interrupts."""
    trouble: str | None = None
    while True:
        time.sleep(POLL_S)
        _raise_if_failed()
        condition = _condition()
        if condition is not None and condition.trouble != trouble:
            trouble = condition.trouble
            if on_trouble is not None:
                on_trouble(trouble)


def _condition() -> Condition | None:
    """None: the replica does not say, as while Serve starts another one."""
    try:
        answer = serve.get_app_handle(APP_NAME).condition.remote().result(timeout_s=CONDITION_TIMEOUT_S)
    except Exception:
        return None
    return Condition(answer["trouble"], answer["num_open"])


def _take_signal_back(handler: Any) -> None:
    """Ray has put a handler of its own before Python's, which aborts with a stack when the server is asked to stop.

    handler: the one before Ray; where that was none, Ray's own in Python, which leaves in order.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler if callable(handler) else signal.getsignal(signal.SIGTERM))


def _raise_if_failed() -> None:
    """A replica that dies is replaced by Serve; only an application that cannot be brought back ends the server."""
    status = serve.status().applications.get(APP_NAME)
    if status is None or status.status == "DEPLOY_FAILED":
        raise EngineDeadError(_reason("the application is gone"))
