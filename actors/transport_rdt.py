"""The transport on Ray's direct transport: refs of chunks go by Ray, bytes by NCCL or gloo; bursts as with the object store.

Three things have to be done by whoever makes the calls, and only where this transport is chosen, since Ray refuses or loads
more than is there otherwise: the stages' class is made with `actor_options`, the process that calls them makes their group with
`create_rdt_group`, and every `forward` but the last stage's is called with `forward_options`. NCCL needs the package cupy.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist

from qsa.actors.transport_store import ObjectStoreTransport
from qsa.errors import ConfigError

START_S = 60.0


class RdtTransport(ObjectStoreTransport):
    """Chunks are tensors in the message, as Ray's direct transport takes and gives them."""

    name = "rdt"

    def pack(self, hidden: torch.Tensor) -> Any:
        """A copy of [n, hidden_size]: Ray keeps it until the next stage has it, and the model's buffers are used again."""
        with self._sending(hidden.nbytes):
            return hidden.to(self._dtype, copy=True)

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, np.ndarray):  # a message that was made without it, as in a warm-up
            return super().unpack(packed)
        return packed.to(self._device)


def actor_options(name: str) -> dict[str, Any]:
    """What `ray.remote` must be given for the stages' class; `options` on the class is too late for it."""
    return {"enable_tensor_transport": True} if name == "rdt" else {}


def forward_options(name: str, device: str) -> dict[str, Any]:
    """What a `forward` must be called with whose message goes to a next stage."""
    return {"tensor_transport": rdt_backend(device)} if name == "rdt" else {}


def rdt_backend(device: str) -> str:
    return "nccl" if device.startswith("cuda") else "gloo"


def create_rdt_group(stages: Sequence[Any], device: str) -> None:
    """Make the group that `forward` calls of this process need, instead of one that the stages were in before; blocks.

    Args:
        stages: their actor handles, no two the same.
        device: where they compute: NCCL for cuda, else gloo.

    Raises:
        ConfigError: it cannot be made.
    """
    backend = rdt_backend(device)
    if backend == "nccl" and importlib.util.find_spec("cupy") is None:
        raise ConfigError(
            "pipeline.transport is rdt, whose NCCL groups need the package cupy, which is missing; install cupy-cuda12x or"
            " cupy-cuda13x, or set pipeline.transport to p2p"
        )
    # loaded only where it is used
    from ray.experimental import collective  # noqa: PLC0415

    _keep_actors_after_failures(backend)
    for stage in stages:
        stage._ray_enable_tensor_transport = True  # of their class; Ray 2.60 forgets it in a handle that was found by name
        for group in collective.get_collective_groups([stage], backend):
            with contextlib.suppress(Exception):  # whatever Ray has to say about members that are gone
                collective.destroy_collective_group(group)
    try:
        ray.get([stage.__ray_call__.remote(_forget_global_group) for stage in stages], timeout=START_S)
        collective.create_collective_group(list(stages), backend=backend)
    except (ray.exceptions.RayError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"pipeline.transport is rdt, but Ray could not make a {backend} group of the stages:"
            f" {str(error).strip().splitlines()[-1]}; set pipeline.transport to p2p or object_store"
        ) from None


def _keep_actors_after_failures(backend: str) -> None:
    """In the process that makes the calls: when a transfer fails, Ray ends both actors for good, as transports that it
    cannot abort have no other way out. Here the recovery ends what hangs, so Ray is told that it can."""
    from ray.experimental.rdt.util import get_tensor_transport_manager  # noqa: PLC0415

    manager: Any = get_tensor_transport_manager(backend.upper())
    manager.can_abort_transport = lambda: True


def _forget_global_group(actor: Any) -> None:
    """On a stage: Ray's gloo groups stand on PyTorch's global one, which would tie a new one to stages that are gone."""
    if dist.is_initialized():
        dist.destroy_process_group()
