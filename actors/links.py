"""Links between stages: chosen at start from what is there, set up on every stage, and again after one was lost."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any

from qsa.actors.ray_errors import is_actor_death
from qsa.actors.transport import choose_transport

CONNECT_S = 20.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Link:
    """How the stages are linked.

    Attributes:
        reason:          why so, for the log.
        forward_options: of calls whose result another stage gets.
        carriers:        what p2p carries hidden states by: sockets, gloo, nccl; several where stages differ.
        hosts:           addresses of the stages' nodes.
    """

    name: str
    reason: str
    forward_options: dict[str, Any]
    carriers: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()

    def __str__(self) -> str:
        over = f" over {' and '.join(self.carriers)}" if self.carriers else ""
        between = f" between the hosts {', '.join(self.hosts)}" if len(set(self.hosts)) > 1 else ""
        return f"hidden states travel by {self.name}{over}{between}: {self.reason}"


class Linker:
    """Links stages. The state: the secret that they share, and a running number, so that what is late is recognised."""

    def __init__(self, stages: Sequence[Any], setting: str, device: str) -> None:
        """setting: `pipeline.transport`."""
        self._stages, self._setting, self._device = list(stages), setting, device
        self._secret = secrets.token_bytes(32)
        self._number = secrets.randbits(48)  # stages may still be sent frames that a lost scheduler's links left behind

    async def link(self) -> Link:
        """Give every stage a new transport and connect them.

        Raises:
            QSAError: the transport that was asked for cannot be had.
        """
        hosts = await _all(stage.host.remote() for stage in self._stages)
        name, reason = choose_transport(self._setting, self._device, len(self._stages), len(set(hosts)) == 1)
        try:
            return await self._link_by(name, reason, hosts)
        except Exception as error:
            if self._setting != "auto" or name == "object_store" or is_actor_death(error):
                raise
            logger.warning("transport %s cannot be had here, object_store is taken instead: %s", name, error)
            return await self._link_by("object_store", f"{name} could not be set up", hosts)

    async def _link_by(self, name: str, reason: str, hosts: Sequence[str]) -> Link:
        self._number += 1
        stages = self._stages
        addresses = await _all(stage.open_link.remote(self._number, name, self._secret) for stage in stages)
        following, firsts = [*stages[1:], None], [None, *(stages[0] for _ in stages[1:])]
        carriers = await _all(
            stage.connect.remote(addresses, after, first, CONNECT_S)
            for stage, after, first in zip(stages, following, firsts, strict=True)
        )
        options: dict[str, Any] = {}
        if name == "rdt" and len(stages) > 1:
            from qsa.actors.transport_rdt import create_rdt_group, forward_options  # noqa: PLC0415 - Ray's alpha, not always there

            await asyncio.to_thread(create_rdt_group, stages, self._device)
            options = forward_options(name, self._device)
        return Link(name, reason, options, tuple(sorted(set().union(*carriers))), tuple(hosts))


async def _all(calls: Any) -> list[Any]:
    return list(await asyncio.gather(*(_answer(call) for call in calls)))


async def _answer(reference: Awaitable[Any]) -> Any:
    return await reference
