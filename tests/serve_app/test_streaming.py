"""Streams and texts: chunks as OpenAI's clients expect them, whole characters, exact stop strings, an end in every case."""

from __future__ import annotations

import time

import openai
import pytest
import requests
from fakes import FakeEngine, Script, make_tokenizer, text_script, word_id

from qsa.errors import EngineDeadError
from qsa.scheduler.request import FinishReason


def deltas(events):
    return [e["choices"][0]["delta"].get("content") for e in events if isinstance(e, dict) and e.get("choices")]


def test_a_chat_stream_has_the_form_that_clients_expect(serve_api):
    events = serve_api(text_script("hello")).stream_chat(stream_options={"include_usage": True}, seed=7)

    assert events[-1] == "[DONE]"
    chunks = events[:-1]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert len({(c["id"], c["created"], c["object"]) for c in chunks}) == 1
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert "".join(filter(None, deltas(chunks))) == "hello"
    assert chunks[-1]["choices"] == []
    usage = chunks[-1]["usage"]
    assert usage["completion_tokens"] == 6 and usage["total_tokens"] == usage["prompt_tokens"] + 6
    assert usage["qsa"] == {"attended_share": 0.25, "sparse_id": 1, "seed": 7}
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


def test_no_usage_chunk_unless_asked(serve_api):
    assert all(e["choices"] for e in serve_api(text_script("a")).stream_chat()[:-1])


def test_full_answer_equals_stream(serve_api):
    server = serve_api(text_script("grüße 😀 ok"))
    full = server.chat().json()
    assert full["choices"][0]["message"]["content"] == "grüße 😀 ok"
    assert full["choices"][0]["finish_reason"] == "stop"
    assert full["object"] == "chat.completion"
    assert "".join(filter(None, deltas(server.stream_chat()))) == "grüße 😀 ok"


def test_the_bytes_of_an_emoji_one_a_step_are_never_torn(serve_api):
    texts = deltas(serve_api(text_script("😀")).stream_chat())
    assert "".join(filter(None, texts)) == "😀"
    assert not any("\ufffd" in text for text in texts if text)


def test_a_stray_byte_is_a_replacement_character_and_valid_json(serve_api):
    server = serve_api(Script(tokens=[0x61, 0xA0, 257]))
    assert server.chat().json()["choices"][0]["message"]["content"] == "a\ufffd"
    assert server.chat().status_code == 200


@pytest.mark.parametrize(("generated", "text"), [(b"\x80b", "😀b"), (b"b", "b")])
def test_a_prompt_that_ends_inside_a_character_yields_generated_text_only(serve_api, generated, text):
    prompt = list("😀".encode()[:3])
    server = serve_api(Script(tokens=[*generated, 257]))
    assert server.complete(prompt).json()["choices"][0]["text"] == text
    texts = [e["choices"][0]["text"] for e in server.stream("/v1/completions", {"prompt": prompt})[:-1]]
    assert "".join(texts) == text and not any("\ufffd" in part for part in texts)


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_across_tokens_is_cut_exactly(serve_api, stream):
    words = ["ABC", "DEF", "G", "HI", "J", "K"]
    tokenizer = make_tokenizer(words)
    script = Script(tokens=[word_id(tokenizer, word) for word in words] * 3, step_s=0.005)
    engine = FakeEngine(script, tokenizer=tokenizer)
    server = serve_api(engine)
    if stream:
        events = server.stream_chat(stop=["DEFGHIJ"])
        text, reason = "".join(filter(None, deltas(events))), events[-2]["choices"][0]["finish_reason"]
    else:
        choice = server.chat(stop="DEFGHIJ").json()["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    assert (text, reason) == ("ABC", "stop")
    assert not engine.running and len(engine.aborted) == 1


@pytest.mark.parametrize("stop", [["xyz"], ["lo!"], ["hello world"]])
def test_a_stop_string_that_never_completes_loses_nothing(serve_api, stop):
    server = serve_api(text_script("hello"))
    assert "".join(filter(None, deltas(server.stream_chat(stop=stop)))) == "hello"
    assert server.chat(stop=stop).json()["choices"][0]["message"]["content"] == "hello"


def test_length_ends_with_length(serve_api):
    choice = serve_api(text_script("hello")).chat(max_tokens=3).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("hel", "length")


def test_end_tokens_that_are_ignored_are_still_no_text(serve_api):
    script = Script(tokens=[0x61, 257, 0x62], finish=FinishReason.LENGTH)
    answer = serve_api(script).chat(ignore_eos=True).json()
    assert answer["choices"][0]["message"]["content"] == "ab" and answer["usage"]["completion_tokens"] == 3


def test_stop_token_is_no_text(serve_api):
    script = Script(tokens=[0x61, 0x62])
    assert serve_api(script).chat(stop_token_ids=[0x62]).json()["choices"][0]["message"]["content"] == "a"


@pytest.mark.parametrize("step", [1, 3])
def test_an_error_in_mid_stream_is_one_event_then_done(serve_api, step):
    server = serve_api(text_script("hello", fail_at=step, step_s=0.01))
    events = server.stream_chat()
    assert events[-1] == "[DONE]"
    assert "scripted failure" in events[-2]["error"]["message"]
    assert set(events[-2]["error"]) == {"message", "type", "param", "code"}
    assert sum("error" in e for e in events if isinstance(e, dict)) == 1
    assert "qsa_http_stream_errors_total 1.0" in server.get("/metrics").text
    assert server.chat().status_code == 500
    assert server.stream_chat(max_tokens=1)[-1] == "[DONE]"
    assert "qsa_http_stream_errors_total 1.0" in server.get("/metrics").text


def test_a_model_that_raises_before_anything_is_an_http_status(serve_api):
    server = serve_api(Script(raise_at=0, error=EngineDeadError("stage 1 is gone")))
    for stream in (True, False):
        answer = server.chat(stream=stream)
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "stage 1 is gone"


def test_an_engine_that_dies_in_mid_stream(serve_api):
    events = serve_api(text_script("hello", raise_at=2, error=EngineDeadError("stage 1 is gone"))).stream_chat()
    assert events[-2]["error"]["code"] == "engine_unavailable" and events[-1] == "[DONE]"


def test_an_unforeseen_error_does_not_show_its_inside(serve_api):
    server = serve_api(text_script("hello", raise_at=2, error=KeyError("secret")))
    assert "secret" not in str(server.stream_chat()[-2])
    assert "secret" not in server.chat().text


def test_openai_client_raises_on_an_error_event(serve_api):
    server = serve_api(text_script("hello", fail_at=2))
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    stream = client.chat.completions.create(model="fake-model", messages=[{"role": "user", "content": "x"}], stream=True)
    with pytest.raises(openai.APIError, match="scripted failure"):
        list(stream)


def test_openai_client_streams_and_asks(serve_api):
    server = serve_api(text_script("hello", logprob=-0.5, top=((0x61, -0.5), (0x62, float("-inf")))))
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    message = [{"role": "user", "content": "x"}]
    stream = client.chat.completions.create(model="fake-model", messages=message, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in stream) == "hello"
    answer = client.chat.completions.create(model="fake-model", messages=message, logprobs=True, top_logprobs=2)
    entry = answer.choices[0].logprobs.content[0]
    assert (entry.token, entry.logprob, entry.bytes) == ("h", -0.5, [104])
    assert [top.logprob for top in entry.top_logprobs] == [-0.5, -9999.0]
    completion = client.completions.create(model="fake-model", prompt=["a", "b"], n=2, logprobs=1)
    assert [choice.text for choice in completion.choices] == ["hello"] * 4
    assert completion.choices[3].logprobs.text_offset == [0, 1, 2, 3, 4, 5][: len(completion.choices[3].logprobs.tokens)]
    assert [model.id for model in client.models.list()] == ["fake-model"]


def test_logprobs_are_strict_json_and_cover_the_text(serve_api):
    script = Script(tokens=[*b"abcd", 257], logprob=float("nan"), top=((0x61, float("-inf")), (0x62, float("nan"))))
    server = serve_api(script)
    events = server.stream_chat(logprobs=True, top_logprobs=2, stop=["cd"])
    entries = [x for e in events[:-1] for x in ((e["choices"][0]["logprobs"] or {}).get("content") or [])]
    assert [entry["token"] for entry in entries] == ["a", "b"]
    assert [top["logprob"] for top in entries[0]["top_logprobs"]] == [-9999.0, None]


def test_progress_comes_when_asked_for(serve_api):
    script = text_script("hi", prefill=(64, 128), prefill_s=0.01)
    server = serve_api(script)
    events = server.stream("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "return_progress": True})
    progress = [e["prompt_progress"] for e in events if isinstance(e, dict) and "prompt_progress" in e]
    assert [p["processed"] for p in progress] == [0, 64, 128]
    assert all(set(p) == {"total", "cache", "processed", "time_ms"} for p in progress)
    assert not any("prompt_progress" in e for e in server.stream_chat() if isinstance(e, dict))


@pytest.mark.parametrize("prefill", [(), tuple(range(30))])
def test_silence_is_filled_with_comments(serve_api, prefill):
    script = text_script("hi", prefill=prefill or (0,), prefill_s=0.6 / max(1, len(prefill)))
    events = serve_api(script, {"server": {"keepalive_s": 0.1}}).stream_chat()
    assert events.count(": keep-alive") >= 3 and events[-1] == "[DONE]"


def test_n_children_have_indices_and_seeds_of_their_own(serve_api):
    engine = FakeEngine(lambda call: text_script(f"seed {call.sampling.seed}", step_s=0.001))
    server = serve_api(engine)
    choices = server.chat(n=3, seed=40).json()["choices"]
    assert [c["message"]["content"] for c in choices] == ["seed 40", "seed 41", "seed 42"]
    texts = {0: "", 1: "", 2: ""}
    for e in server.stream_chat(n=3, seed=40)[:-1]:
        texts[e["choices"][0]["index"]] += e["choices"][0]["delta"].get("content") or ""
    assert texts == {0: "seed 40", 1: "seed 41", 2: "seed 42"}


def test_a_seed_is_drawn_and_reported(serve_api):
    engine = FakeEngine(text_script("x"))
    server = serve_api(engine)
    first, second = server.chat().json(), server.stream_chat()
    assert first["seed"] == engine.calls[0].sampling.seed
    assert second[0]["seed"] == engine.calls[1].sampling.seed != first["seed"]


def test_one_failing_child_ends_all_with_one_error(serve_api):
    engine = FakeEngine(
        lambda call: text_script("hello" * 50, fail_at=2 if call.request_id.endswith("-1") else None, step_s=0.01)
    )
    events = serve_api(engine).stream_chat(n=3)
    assert events[-1] == "[DONE]" and sum("error" in e for e in events if isinstance(e, dict)) == 1
    assert not engine.running and len(engine.aborted) == 2


def test_sse_headers_keep_proxies_from_collecting(serve_api):
    server = serve_api(text_script("x"))
    with requests.post(server.url + "/v1/completions", json={"prompt": "x", "stream": True}, stream=True, timeout=5) as answer:
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-accel-buffering"] == "no"
        assert "content-length" not in answer.headers


def test_the_first_chunk_does_not_wait_for_the_first_token(serve_api):
    server = serve_api(text_script("x", step_s=4.0))
    started = time.monotonic()
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    with requests.post(server.url + "/v1/chat/completions", json=body, stream=True, timeout=5) as answer:
        next(answer.iter_lines())
        assert time.monotonic() - started < 3
