"""Generation in-process: closing it ends its sequences whatever interrupts the closing."""

from __future__ import annotations

import asyncio
import contextlib

from fakes import FakeEngine, text_script

from qsa.scheduler.request import SamplingParams
from qsa.serve_app.generation import Generation, SequenceState


class StubbornEngine(FakeEngine):
    """Swallows the first cancellation of every request, as some libraries' timeouts do."""

    async def generate(self, *args, **options):
        stream = super().generate(*args, **options)
        try:
            yield await anext(stream)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
            async for output in stream:
                yield output
        finally:
            await stream.aclose()


def test_a_close_that_is_cancelled_is_finished_by_the_next_one():
    async def scenario():
        engine = StubbornEngine(text_script("a" * 5000, step_s=0.01))
        sequence = SequenceState(0, "r", [1, 2], SamplingParams(max_tokens=4000))
        generation = Generation(engine, [sequence])
        await generation.start()
        closing = asyncio.create_task(generation.close())
        await asyncio.sleep(0.05)
        closing.cancel()
        await asyncio.wait({closing})
        assert closing.cancelled() and engine.running == {"r"}, "the scenario did not happen"
        await generation.close()
        assert not engine.running and engine.aborted == ["r"]

    asyncio.run(scenario())
