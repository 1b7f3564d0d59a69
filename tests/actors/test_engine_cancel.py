"""A request that is cancelled at any moment of its submission is aborted: no cancellation is swallowed."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest
from engine_helpers import wait_until

from qsa.actors.engine import Engine
from qsa.actors.placement import EngineActors
from qsa.config import EngineConfig
from qsa.errors import OverloadedError, RequestError
from qsa.scheduler.request import RequestOutput, SamplingParams


class Method:
    """An actor handle's method; `calls` are its arguments, `answer` what every call returns."""

    def __init__(self, answer) -> None:
        self.answer, self.calls, self.threads = answer, [], set()

    def remote(self, *args):
        self.calls.append(args)
        self.threads.add(threading.get_ident())
        return self.answer()


def make_engine(submit: Method, abort: Method) -> Engine:
    never = Method(lambda: None)
    scheduler = SimpleNamespace(submit=submit, abort=abort, poll=never)
    checkpoint = SimpleNamespace(spec=SimpleNamespace(name="m"), tokenizer=lambda: None, eos_token_ids=())
    engine = Engine(
        EngineConfig(),
        checkpoint,
        SimpleNamespace(max_model_len=100, longest_sequence=100, split=None),
        EngineActors(scheduler, [], None),
        "test/1",
    )
    engine._poller._poll = lambda: []
    return engine


@pytest.mark.parametrize("turns", range(7))
def test_a_cancellation_around_the_answer_to_the_submission_ends_the_request(turns):
    async def scenario():
        answer = asyncio.get_running_loop().create_future()
        abort = Method(lambda: None)
        engine = make_engine(Method(lambda: answer), abort)

        async def read():
            async for _ in engine.generate([1, 2], SamplingParams(), request_id="r"):
                pass

        task = asyncio.create_task(read())
        await asyncio.sleep(0.01)
        answer.set_result(None)
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        _, pending = await asyncio.wait({task}, timeout=1)
        engine._poller.fail("over")
        assert not pending, "the cancellation was swallowed"
        assert task.cancelled()
        wait_until(lambda: abort.calls)
        assert {call[0] for call in abort.calls} == {"r"}

    asyncio.run(scenario())


def test_an_abort_cannot_overtake_a_submission_that_has_not_answered():
    async def scenario():
        answer = asyncio.get_running_loop().create_future()
        abort = Method(lambda: None)
        engine = make_engine(Method(lambda: answer), abort)
        stream = engine.generate([1, 2], SamplingParams(), request_id="r")
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.wait({first})
        engine._poller.fail("over")
        wait_until(lambda: abort.calls)
        assert threading.get_ident() not in abort.threads, "a child of the answer would be cancelled with it"
        assert abort.calls[0] == ("r", answer), "the submission's result is the abort's argument, so Ray keeps their order"

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [OverloadedError("busy"), RequestError("no", param="prompt")], ids=repr)
def test_a_refused_request_is_not_aborted_for_its_id_may_come_again(error):
    async def scenario():
        answer = asyncio.get_running_loop().create_future()
        answer.set_exception(error)
        abort = Method(lambda: None)
        engine = make_engine(Method(lambda: answer), abort)
        with pytest.raises(type(error)):
            await anext(engine.generate([1, 2], SamplingParams(), request_id="r"))
        engine._poller.fail("over")
        await asyncio.sleep(0.1)
        assert not abort.calls

    asyncio.run(scenario())


def test_an_id_that_is_in_use_is_refused_and_the_first_request_goes_on():
    async def scenario():
        answer = asyncio.get_running_loop().create_future()
        engine = make_engine(Method(lambda: answer), Method(lambda: None))
        first = asyncio.ensure_future(anext(engine.generate([1], SamplingParams(), request_id="r")))
        await asyncio.sleep(0.01)
        with pytest.raises(RequestError, match="in use") as refused:
            await anext(engine.generate([1], SamplingParams(), request_id="r"))
        assert refused.value.param == "request_id"
        answer.set_result(None)
        await asyncio.sleep(0.01)
        engine._poller._distribute([RequestOutput("r")])
        assert (await asyncio.wait_for(first, 1)).request_id == "r"
        engine._poller.fail("over")

    asyncio.run(scenario())
