"""What the API refuses, with which status and field; and what of a request reaches the engine."""

from __future__ import annotations

import logging

import pytest
import requests
from fakes import FakeEngine, Script, make_tokenizer, text_script

from qsa.errors import CapacityError, OverloadedError, RequestError

CHAT = "/v1/chat/completions"


@pytest.fixture
def server(shared_server):
    shared_server.engine.calls.clear()
    return shared_server


def assert_error(answer, status=400, param=None, code=None):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    if param is not None:
        assert error["param"] == param, error
    if code is not None:
        assert error["code"] == code, error
    return error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1",
        b'{"messages": [}',
        b"\xff\xfe",
        b'{"messages": "\\ud800"}',
        b"[" * 100_000,
        b"null",
        b"[]",
        b'"x"',
        b"3",
    ],
)
def test_what_is_no_json_object_is_a_400(server, body):
    answer = server.post(CHAT, data=body, headers={"content-type": "application/json"})
    assert_error(answer)


@pytest.mark.parametrize(
    "prompt", ["", [""], ["a", ""], [], [[]], None, 3, {"a": 1}, [1, "a"], [1.5], [True], ["a", [1]], [[1], 2]]
)
def test_wrong_completion_prompts(server, prompt):
    assert_error(server.complete(prompt), param="prompt")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        ([{"content": "x"}], "messages.0.role"),
        ([{"role": "wizard", "content": "x"}], "messages.0.role"),
        ([{"role": "user"}], "messages.0"),
        ([{"role": "user", "content": 5}], None),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages.0"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0"),
    ],
)
def test_wrong_messages(server, messages, param):
    assert_error(server.post(CHAT, {"messages": messages}), param=param)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", "5"), ("max_tokens", True),
        ("temperature", -0.1), ("temperature", "hot"), ("top_p", 1.0001), ("top_p", -0.1), ("top_k", -2), ("top_k", 0.5),
        ("min_p", 1.5), ("presence_penalty", 2.1), ("frequency_penalty", -3), ("repetition_penalty", 0), ("n", 0), ("n", 129),
        ("seed", 1 << 64), ("seed", -(1 << 63) - 1), ("seed", 0.5), ("stop", 5), ("stop", ["a"] * 17), ("stop", ["a", ""]),
        ("stop_token_ids", [99999]), ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]), ("logit_bias", {"99999": 1}),
        ("logit_bias", {"a": 1}), ("logit_bias", {"5": 101}), ("logit_bias", {"-5": 1}), ("logit_bias", [1]),
        ("logit_bias", {"9" * 5000: 1}), ("repetition_penalty", 1e-320),
        ("sparse_id", 77), ("sparse_id", "1"), ("stream", "yes"), ("stream_options", 5), ("top_logprobs", 21),
        ("top_logprobs", 3), ("logprobs", 5), ("max_completion_tokens", 0), ("priority", 5000),
    ],
)  # fmt: skip
def test_values_out_of_range_name_their_field(server, field, value):
    assert_error(server.chat(**{field: value}), param=field)
    assert not server.engine.calls


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none(server, value):
    body = '{"messages": [{"role": "user", "content": "x"}], "temperature": %s}' % value  # noqa: UP031
    assert_error(server.post(CHAT, data=body), param="temperature")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]), ("tool_choice", "auto"), ("functions", [{}]),
        ("response_format", {"type": "json_object"}), ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("echo", True), ("best_of", 2), ("suffix", "x"), ("modalities", ["audio"]), ("audio", {"voice": "x"}),
        ("guided_json", {"a": 1}), ("min_tokens", 5), ("prompt_logprobs", 1),
    ],
)  # fmt: skip
def test_what_this_server_cannot_do_is_refused_by_name(server, field, value):
    assert field in assert_error(server.chat(**{field: value}), param=field)
    assert field in assert_error(server.complete(**{field: value}), param=field)


@pytest.mark.parametrize(
    "fields", [{"tools": []}, {"tools": None}, {"response_format": {"type": "text"}}, {"tool_choice": "none"}, {"echo": False}]
)
def test_asking_for_nothing_special_is_fine(server, fields):
    assert server.chat(**fields).status_code == 200


def test_unknown_fields_are_ignored_with_one_warning(server, caplog):
    with caplog.at_level(logging.WARNING, logger="qsa"):
        assert server.chat("secret words", fancy=1, other="private", user="me").status_code == 200
    warnings = [record.getMessage() for record in caplog.records if "unknown" in record.getMessage()]
    assert warnings == ["ignored unknown request fields: 'fancy', 'other'"]
    assert "secret" not in caplog.text and "private" not in caplog.text


def test_everything_reaches_the_engine(serve_api):
    engine = FakeEngine(text_script("ok"))
    server = serve_api(engine, {"sparse": {0: {"dense": True}, 1: {}, 7: {"top_k_fine": 8}}})
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1}
    fields |= {
        "repetition_penalty": 1.1,
        "seed": -1,
        "max_tokens": 5,
        "stop_token_ids": [7],
        "logit_bias": {"9": -100, "3": 2.5},
    }
    assert server.chat(**fields, sparse_id=7, priority=-3, ignore_eos=True, logprobs=True, top_logprobs=4).status_code == 200
    (call,) = engine.calls
    sampling = call.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.1)
    assert (sampling.seed, sampling.max_tokens, sampling.stop_token_ids) == ((1 << 64) - 1, 5, (7,))
    assert sampling.logit_bias == ((3, 2.5), (9, -100)) and sampling.ignore_eos and sampling.logprobs == 4
    assert (call.sparse_id, call.priority) == (7, -3)


@pytest.mark.parametrize("top_k", [-1, 0])
def test_top_k_of_minus_one_and_zero_keep_all(server, top_k):
    assert server.chat(top_k=top_k, top_p=1).status_code == 200
    assert server.engine.calls[0].sampling.top_k == 0


def test_top_k_beyond_the_vocabulary_keeps_all_however_large(server):
    vocab_size = server.engine.tokenizer.vocab_size
    assert server.chat(top_k=10**30).status_code == 200
    assert server.engine.calls[0].sampling.top_k == vocab_size


def test_top_p_of_zero_keeps_the_most_likely_token(server):
    assert server.chat(top_p=0).status_code == 200
    assert (server.engine.calls[0].sampling.top_k, server.engine.calls[0].sampling.top_p) == (1, 1.0)


@pytest.mark.parametrize("temperature", [0, 1e-6])
def test_tiny_temperatures_are_greedy(server, temperature):
    server.chat(temperature=temperature)
    assert server.engine.calls[0].sampling.is_greedy


def test_null_means_left_out(server):
    fields = dict.fromkeys(
        ["max_tokens", "temperature", "top_p", "n", "stop", "seed", "logprobs", "stream", "stream_options", "user"]
    )
    assert server.chat(**fields).status_code == 200
    assert server.complete(**fields).status_code == 200


class TestContextLength:
    @pytest.fixture
    def server(self, serve_api):
        return serve_api(FakeEngine(text_script("ok"), max_model_len=100))

    def test_prompt_and_tokens_at_the_limit(self, server):
        assert server.complete([1] * 90, max_tokens=9).status_code == 200
        assert server.complete([1] * 90, max_tokens=10).status_code == 200
        message = assert_error(server.complete([1] * 90, max_tokens=11), code="context_length_exceeded", param="prompt")
        assert "This model's maximum context length is 100 tokens" in message
        assert "101 tokens" in message and "90 in the prompt" in message and "11 in the completion" in message

    def test_prompt_alone_at_the_limit(self, server):
        assert server.complete([1] * 99).status_code == 200
        assert server.engine.calls[-1].sampling.max_tokens == 1
        for length in (100, 101):
            message = assert_error(server.complete([1] * length), code="context_length_exceeded")
            assert f"you requested {length + 1} tokens ({length} in the prompt" in message

    def test_chat(self, server):
        message = assert_error(server.chat("x" * 200), code="context_length_exceeded", param="messages")
        assert "in the messages" in message

    def test_a_billion_tokens_are_too_many(self, server):
        assert_error(server.complete("x", max_tokens=10**9), code="context_length_exceeded")

    def test_omitted_means_the_rest_of_the_context(self, server):
        server.complete([1] * 40)
        assert server.engine.calls[-1].sampling.max_tokens == 60

    def test_omitted_means_no_more_than_the_pools_hold(self, serve_api):
        server = serve_api(FakeEngine(text_script("ok"), max_model_len=100, longest_sequence=64))
        server.complete([1] * 40)
        assert server.engine.calls[-1].sampling.max_tokens == 24

    def test_a_default_can_be_set(self, serve_api):
        server = serve_api(FakeEngine(text_script("ok"), max_model_len=100), {"server": {"default_max_tokens": 20}})
        for prompt_len, expected in ((40, 20), (90, 10)):
            server.complete([1] * prompt_len)
            assert server.engine.calls[-1].sampling.max_tokens == expected
        server.complete("x", max_tokens=30)
        assert server.engine.calls[-1].sampling.max_tokens == 30


def test_prompts_come_in_four_forms(server):
    for prompt in ("hi", ["hi"], list(b"hi"), [list(b"hi")]):
        assert server.complete(prompt).json()["choices"][0]["text"] == "ok"
    assert {call.prompt for call in server.engine.calls} == {tuple(b"hi")}
    many = server.complete(["a", "bc"], n=2).json()
    assert [choice["index"] for choice in many["choices"]] == [0, 1, 2, 3]
    assert many["usage"]["prompt_tokens"] == 3 and many["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("token_id", [-1, 259, 1 << 40])
def test_prompt_ids_outside_the_vocabulary(server, token_id):
    assert str(token_id) in assert_error(server.complete([1, token_id]), param="prompt")


def test_more_sequences_than_can_ever_wait(serve_api):
    server = serve_api(text_script("ok"), {"limits": {"max_sequences": 2, "max_waiting": 2}})
    assert_error(server.chat(n=5), param="n")
    assert_error(server.complete(["a"] * 5), param="prompt")
    assert server.chat(n=4).status_code == 200


def test_models(server):
    listing = server.get("/v1/models").json()
    assert [model["id"] for model in listing["data"]] == ["fake-model"] and listing["object"] == "list"
    assert server.get("/v1/models/fake-model").json()["max_model_len"] == 8192
    assert server.get("/v1/models/default").json()["id"] == "fake-model"
    assert_error(server.get("/v1/models/other/name"), 404, code="model_not_found")
    assert_error(server.chat(model="gpt-4"), 404, param="model", code="model_not_found")
    for name in ("fake-model", "default"):
        assert server.chat(model=name).json()["model"] == "fake-model"


def test_paths_and_methods(server):
    assert_error(server.get("/v1/nothing"), 404)
    assert_error(server.get("/v1/models/"), 404)
    answer = server.get(CHAT)
    assert_error(answer, 405)
    assert answer.headers["allow"] == "POST"


def test_a_body_beyond_the_limit(serve_api):
    server = serve_api(text_script("ok"), {"limits": {"max_body_bytes": 1000}})
    assert server.chat("x" * 900).status_code == 200
    assert "limits.max_body_bytes" in assert_error(server.chat("x" * 1000), 413)
    chunked = requests.post(server.url + CHAT, data=iter([b"x" * 600] * 4), timeout=5)
    assert_error(chunked, 413)


def test_busy_is_429_with_retry_after(serve_api):
    server = serve_api(Script(raise_at=0, error=OverloadedError("64 requests wait already", retry_after_s=2.3)))
    for stream in (False, True):
        answer = server.chat(stream=stream)
        assert_error(answer, 429)
        assert answer.headers["retry-after"] == "3"


@pytest.mark.parametrize("kind", [RequestError, CapacityError])
def test_the_engine_may_refuse_too(serve_api, kind):
    server = serve_api(Script(raise_at=0, error=kind("needs 900 chunks, there are 100", param="prompt")))
    for stream in (False, True):
        assert "900 chunks" in assert_error(server.chat(stream=stream), 400, param="prompt")


def test_api_keys(serve_api):
    server = serve_api(text_script("ok"), {"server": {"api_keys": ["first", "sécond"]}})
    assert_error(server.chat(), 401, code="invalid_api_key")
    for header in ("Bearer wrong", "Bearer ", "Basic first", "first", "Bearer firstt"):
        assert_error(server.get("/v1/models", headers={"authorization": header}), 401)
        assert_error(server.get("/stats", headers={"authorization": header}), 401)
    for key in ("first", "sécond"):
        assert server.get("/v1/models", headers={"authorization": f"Bearer {key}".encode()}).status_code == 200
    assert server.get("/health").status_code == 200


def test_exactly_one_bos(serve_api):
    tokenizer = make_tokenizer(chat_template="{{ bos_token }}{{ messages[0].content }}", adds_bos=True)
    engine = FakeEngine(text_script("ok"), tokenizer=tokenizer)
    server = serve_api(engine)
    server.chat("x")
    server.complete("x")
    server.complete("<|im_start|>x")
    assert [call.prompt for call in engine.calls] == [(256, ord("x"))] * 3
    server.complete("x", add_special_tokens=False)
    assert engine.calls[-1].prompt == (ord("x"),)


def test_two_requests_with_one_client_id_are_two(server):
    answers = [
        server.post(CHAT, {"messages": [{"role": "user", "content": "x"}]}, headers={"x-request-id": "same"}) for _ in "ab"
    ]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json()["id"] != answers[1].json()["id"]
