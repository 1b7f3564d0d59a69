"""`qsa doctor`: one line for each thing that must be right before an engine starts here, and what to do when it is not."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qsa import __version__
from qsa.config import EngineConfig
from qsa.errors import QSAError
from qsa.settings import config_from
from qsa.terminal import console

GIB = 1 << 30
STYLES = {"ok": "green", "note": "yellow", "fail": "red"}


@dataclass(frozen=True)
class Finding:
    """What was looked at, how it stands, and what was found."""

    subject: str
    state: Literal["ok", "note", "fail"]
    text: str


def check_python() -> Finding:
    version = platform.python_version()
    good = sys.version_info >= (3, 11)
    return Finding("python", "ok" if good else "fail", f"{version} at {sys.executable}" if good else f"{version}, wants 3.11")


def check_packages() -> Iterator[Finding]:
    """Installed versions against what the package asks for."""
    from packaging.requirements import Requirement  # noqa: PLC0415 - only here, and it comes with the dependencies

    wanted = [Requirement(text) for text in importlib.metadata.requires("qsa") or []]
    for name in ("torch", "ray"):
        requirement = next((item for item in wanted if item.name == name), None)
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "fail", f"not installed; wants {requirement}")
            continue
        good = requirement is None or requirement.specifier.contains(version, prereleases=True)
        yield Finding(name, "ok" if good else "fail", version if good else f"{version}, wants {requirement}")


def check_gpu(config: EngineConfig) -> Iterator[Finding]:
    """The cards, and everything that computing on them needs."""
    from qsa.device import local_cards, settle, stage_cards, why_not_cards  # noqa: PLC0415 - imports torch: seconds

    wanted = config.pipeline.device
    reason = why_not_cards()
    if reason is not None:
        state: Literal["note", "fail"] = "fail" if wanted == "cuda" else "note"
        then = "set pipeline.device to cpu" if wanted == "cuda" else "the engine computes on the CPU"
        yield Finding("gpu", state, f"{reason}: {then}")
        return
    cards = local_cards()
    names = ", ".join(f"{card.name} {card.free_bytes / GIB:.0f} of {card.total_bytes / GIB:.0f} GiB free" for card in cards)
    if wanted == "cpu":
        yield Finding("gpu", "note", f"{names}: not used, pipeline.device is cpu")
        return
    yield Finding("gpu", "ok", names)
    try:
        used = {card.card for card in stage_cards(settle(config))}
    except QSAError as error:
        yield Finding("stages", "fail", str(error))
        return
    stages = config.pipeline.num_stages
    shared = len(used) < stages
    text = f"{stages} on {len(used)} card{'s' if len(used) > 1 else ''}"
    yield Finding("stages", "note" if shared else "ok", text + (f"; --stages {len(cards)} is faster" if shared else ""))


def check_memory() -> Iterator[Finding]:
    """Free memory of the host, and the shared memory that Ray's object store lies in."""
    from qsa.memory.budget import available_host_bytes  # noqa: PLC0415 - imports torch

    free = available_host_bytes()
    yield Finding("memory", "ok" if free > 3 * GIB else "note", f"{free / GIB:.1f} GiB available, {os.cpu_count()} cores")
    shm = Path("/dev/shm")
    if shm.is_dir():
        usage = shutil.disk_usage(shm)
        text = f"{usage.free / GIB:.1f} GiB free in /dev/shm"
        small = usage.free < GIB // 2
        yield Finding(
            "shared memory", "note" if small else "ok", text + ("; start the container with --shm-size=1g" if small else "")
        )


def check_port(host: str, port: int) -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return Finding("port", "fail", f"{host}:{port}: {error.strerror}; choose another with --port (server.port)")
    open_to = "this machine only" if host.startswith("127.") else "the network: set server.api_keys"
    return Finding("port", "ok", f"{host}:{port} is free; reachable from {open_to}")


def check_model(config: EngineConfig) -> Finding:
    from qsa.model.checkpoint.open import open_model  # noqa: PLC0415 - imports torch

    try:
        checkpoint = open_model(config.model.path, config.model.load_format)
    except QSAError as error:
        return Finding("model", "fail", str(error))
    spec = checkpoint.spec
    size = checkpoint.stage_weight_bytes(0, spec.num_layers) / (1 << 20)
    return Finding("model", "ok", f"{checkpoint.path}: {spec.architecture}, {spec.num_layers} layers, {size:.0f} MiB")


def findings(config: EngineConfig) -> Iterator[Finding]:
    """Every check in turn, the quick ones first."""
    yield Finding("qsa", "ok", __version__)
    yield check_python()
    yield from check_packages()
    yield check_port(config.server.host, config.server.port)
    slow: list[Callable[[], Iterator[Finding]]] = [
        check_memory,
        lambda: check_gpu(config),
        lambda: iter([check_model(config)]),
    ]
    for check in slow:
        yield from check()


def run(args: argparse.Namespace) -> int:
    failed = 0
    for finding in findings(config_from(args)):
        failed += finding.state == "fail"
        mark = {"ok": "ok  ", "note": "note", "fail": "FAIL"}[finding.state]
        console.print(f"[{STYLES[finding.state]}]{mark}[/]", end=" ")
        console.print(f"{finding.subject:14} {finding.text}", markup=False)
    return 1 if failed else 0
