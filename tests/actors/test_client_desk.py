"""ClientDesk: who is told what, also when a client asks again before it was answered."""

from __future__ import annotations

import asyncio

from qsa.actors.client_desk import ClientDesk
from qsa.scheduler.request import RequestOutput


def test_a_poll_that_was_given_up_takes_nothing_from_the_next_one(monkeypatch):
    monkeypatch.setattr("qsa.actors.client_desk.POLL_S", 0.1)

    async def scenario():
        desk = ClientDesk(lease_s=30.0)
        desk.open("me", "r")
        given_up = asyncio.ensure_future(desk.poll("me", wait=True))  # its caller waits no more, and sends the next one
        await asyncio.sleep(0.05)
        poll = asyncio.ensure_future(desk.poll("me", wait=True))
        await asyncio.sleep(0.02)
        desk.deliver([RequestOutput("r", computed_len=1)])
        assert [output.computed_len for output in await poll] == [1]
        desk.deliver([RequestOutput("r", computed_len=2)])  # between two polls
        assert await asyncio.wait_for(given_up, 1) == []
        assert [output.computed_len for output in await desk.poll("me", wait=True)] == [2]

    asyncio.run(scenario())
