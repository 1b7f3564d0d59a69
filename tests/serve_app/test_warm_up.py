"""A server that warms up: what it says, who waits, and its own first requests, which no counter of the real API sees."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from fakes import FakeEngine, Script, make_tokenizer, text_script, wait_until

from qsa.config import make_config
from qsa.errors import EngineDeadError
from qsa.scheduler.request import FinishReason
from qsa.serve_app import answering
from qsa.serve_app.api import make_api
from qsa.serve_app.warm_up import WarmUp, send_first_requests


@pytest.fixture
def warming(serve_api):
    """A server whose engine is not warm yet, and its state."""
    state = WarmUp()
    state.report(12, 40, "warming up 12/40: decode, batch 8")
    server = serve_api(text_script("hello"), warm_up=state)
    return server, state


def test_ready_says_how_far_it_is(warming):
    server, state = warming
    answer = server.get("/ready")
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["message"] == "warming up 12/40: decode, batch 8"
    alive = server.get("/health")
    assert alive.status_code == 200 and alive.json()["status"] == "warming up 12/40: decode, batch 8"
    state.finish()
    assert server.get("/ready").json()["status"] == "ok"


def test_a_request_waits_for_the_end_of_a_warm_up(warming):
    server, state = warming
    answers = []
    thread = threading.Thread(target=lambda: answers.append(server.chat()))
    thread.start()
    time.sleep(0.2)
    assert not answers and not server.engine.calls
    state.finish()
    thread.join(5)
    assert answers[0].json()["choices"][0]["message"]["content"] == "hello"


def test_a_request_does_not_wait_for_ever(warming, monkeypatch):
    monkeypatch.setattr(answering, "START_WAIT_S", 0.2)
    answer = warming[0].chat()
    assert answer.status_code == 503 and "warming up 12/40" in answer.json()["error"]["message"]


def test_a_warm_up_that_failed_says_why_at_once(warming):
    server, state = warming
    state.fail(EngineDeadError("a stage has died"))
    for path in ("/ready", "/health"):
        assert server.get(path).status_code == 503 and "a stage has died" in server.get(path).text
    assert server.chat().status_code == 503


@pytest.mark.parametrize("template", ["chatml", None])
def test_first_requests_go_through_the_whole_api(serve_api, template):
    tokenizer = make_tokenizer() if template else make_tokenizer(chat_template=None)
    engine = FakeEngine(Script(tokens=list(b"abc"), finish=FinishReason.LENGTH), tokenizer=tokenizer)
    server = serve_api(engine, {"server": {"api_keys": ["k"]}})
    asyncio.run(send_first_requests(make_api(engine, server.app.state.api.config), engine, 700, ["k"]))
    lengths = [len(call.prompt) for call in engine.calls]
    assert lengths[0] == 700 and len(lengths) == (4 if template else 3)
    assert not engine.running
    assert "qsa_http_requests_total{" not in server.get("/metrics").text, "the real API has counted nothing"


def test_a_first_request_that_fails_ends_the_start():
    engine = FakeEngine(Script(tokens=list(b"abc"), fail_at=1))
    with pytest.raises(EngineDeadError, match="first request to /v1/completions was answered 200"):
        asyncio.run(send_first_requests(make_api(engine, make_config({})), engine, 100, []))


def test_a_context_that_is_too_short_for_them_is_no_failure():
    engine = FakeEngine(text_script("hello"), max_model_len=20)
    asyncio.run(send_first_requests(make_api(engine, make_config({})), engine, 8, []))
    wait_until(lambda: not engine.running)
