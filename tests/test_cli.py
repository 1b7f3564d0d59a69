"""The command line: what it loads, what it says when something is wrong, its HTTP client, and one run through everything."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from aiohttp import web

from qsa import cli
from qsa.client import Client, Delta, Progress, Timings, server_url
from qsa.commands import batch, bench, chat, doctor
from qsa.commands.demo import Watch
from qsa.config import make_config
from qsa.errors import ConfigError, EngineDeadError, OverloadedError, QSAError, RequestError
from qsa.measure import pace_of
from qsa.server_process import ServerProcess
from qsa.settings import config_from, config_unless_url, parse_setting
from qsa.terminal import WarmUpBar

ROOT = Path(__file__).resolve().parent.parent


def qsa(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "qsa.cli", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, cwd=ROOT, stdin=subprocess.DEVNULL, check=False
    )


# What a user reads first


def test_help_loads_nothing_heavy():
    code = "import sys, qsa.cli; qsa.cli.build_parser().format_help(); print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    assert not {"torch", "ray", "pydantic", "numpy", "aiohttp"} & set(loaded)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_a_module_and_help(command, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0 and cli.COMMANDS[command].help in capsys.readouterr().out.replace("\n", " ")
    text = (ROOT / "qsa" / "commands" / f"{command}.py").read_text()
    assert text.startswith(f'"""`qsa {command}') and "\ndef run(" in text


def targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize(
    "name", ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_commands_and_files_that_the_documents_name_exist(name):
    text = (ROOT / name).read_text()
    code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))
    unknown = [f"make {target}" for target in re.findall(r"\bmake ([a-z]+)", code) if target not in targets()]
    unknown += [f"qsa {command}" for command in re.findall(r"(?:^|[`$ ])qsa ([a-z]+)", code) if command not in cli.COMMANDS]
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    unknown += [link for link in links if not ((ROOT / name).parent / link).exists()]
    assert not unknown, f"{name} names what is not there: {unknown}"


# Arguments and settings


@pytest.mark.parametrize(
    ("text", "value"),
    [("a.b=8", 8), ("a.b=true", True), ("a.b=[1, 2]", [1, 2]), ("a.b=x=y", "x=y"), ("a.b=", None), ("a.b={c: 1}", {"c": 1})],
)
def test_settings_are_typed_by_yaml(text, value):
    assert parse_setting(text) == ("a.b", value)


@pytest.mark.parametrize("text", ["a.b", "=3", "a=[1"])
def test_a_setting_that_cannot_be_read_is_refused(text):
    with pytest.raises(ConfigError, match="--set"):
        parse_setting(text)


def test_short_options_win_over_set(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("server: {port: 1111, host: 127.0.0.3}\n")
    args = cli.build_parser().parse_args(
        ["serve", "m.gguf", "--config", str(file), "--set", "server.port=2222", "--port", "3333", "--stages", "1"]
        + ["--device", "cpu", "--quantization", "int8"]
    )
    config = config_from(args)
    assert (config.pipeline.device, config.model.quantization) == ("cpu", "int8")
    assert (config.server.port, config.server.host, config.model.path, config.pipeline.num_stages) == (
        3333,
        "127.0.0.3",
        "m.gguf",
        1,
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "--set", "limits.max_sequence=3"], "limits.max_sequence"),
        (["plan", "--config", "nowhere.yaml"], "cannot read config file nowhere.yaml"),
        (["batch", "nowhere.jsonl", "out.jsonl"], "cannot read nowhere.jsonl"),
        (["batch", "same.jsonl", "./same.jsonl"], "would overwrite"),
        (["bench", "--context", "12,x"], "--context wants prompt lengths"),
        (["generate", "hi", "--file", "nowhere.txt"], "cannot read nowhere.txt"),
        (["generate", "hi", "--url", "http://127.0.0.1:1", "--stages", "1"], "drop --url, or --stages"),
        (["chat", "m.gguf", "--url", "http://127.0.0.1:1", "--set", "a=1"], "drop --url, or --set, the model"),
        (["bench", "--url", "http://127.0.0.1:1", "--device", "cpu"], "drop --url, or --device"),
        (["plan", "nowhere.gguf"], "nowhere.gguf"),
        (["serve", "nowhere.gguf"], "nowhere.gguf"),
        (
            ["calibrate", "default", "README.md", "--output", "/nowhere/code.safetensors"],
            "cannot write /nowhere/code.safetensors",
        ),
    ],
)
def test_a_wrong_argument_is_one_line_and_exit_code_2(arguments, words, capsys):
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith(f"qsa {arguments[0]}: ") and words in error, error


def test_errors_leave_with_one_line_and_no_traceback(monkeypatch, capsys):
    for error, code in [(EngineDeadError("the engine\nis gone"), 1), (RequestError("bad"), 2), (KeyboardInterrupt(), 130)]:
        monkeypatch.setattr(bench, "run", lambda args, error=error: (_ for _ in ()).throw(error))
        assert cli.main(["bench"]) == code
    assert capsys.readouterr().err == "qsa bench: the engine is gone\nqsa bench: bad\n"


def test_a_request_to_a_running_server_may_name_any_sparse_id():
    args = cli.build_parser().parse_args(["generate", "hi", "--url", "http://127.0.0.1:1", "--sparse", "7"])
    assert config_unless_url(args) == make_config({}) and args.sparse == 7, "the server knows which ones it has"


def test_a_chat_knows_its_words(monkeypatch, capsys):
    words = iter(["/help", "/new", "/quit", "never read"])
    monkeypatch.setattr(chat.console, "input", lambda prompt: next(words))
    args = cli.build_parser().parse_args(["chat", "--url", "http://127.0.0.1:1"])
    assert chat.run(args) == 0
    assert capsys.readouterr().err.count("/quit ends") == 2 and next(words) == "never read"


# Doctor, batch files, figures


def test_doctor_finds_a_taken_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        finding = doctor.check_port("127.0.0.1", port)
    assert finding.state == "fail" and f"127.0.0.1:{port}" in finding.text
    assert doctor.check_port("127.0.0.1", port).state == "ok"


def test_doctor_reports_every_subject_and_fails_on_a_wrong_model(capsys):
    assert cli.main(["doctor", "nowhere.gguf", "--port", "65000"]) == 1
    lines = capsys.readouterr().out
    for subject in ("python", "torch", "ray", "gpu", "memory", "port", "FAIL model"):
        assert re.search(rf"\b{subject}\b", re.sub(" +", " ", lines)), (subject, lines)


def batch_line(custom_id: str, **changes: object) -> str:
    return json.dumps(
        {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": custom_id}} | changes
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "line 1: not JSON"),
        (batch_line("a") + "\n\n" + batch_line("a"), "line 3: custom_id must be"),
        (batch_line("a", url="/v1/embeddings"), "line 1: url must be"),
        (batch_line("a", body={"stream": True}), "stream is not possible"),
        ("[1]", "custom_id"),
    ],
)
def test_a_wrong_batch_line_is_named(tmp_path, content, words):
    path = tmp_path / "in.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=re.escape(words)):
        batch.read_batch(path)


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:8000", "http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1", "127.0.0.1:8000/v1/", "127.0.0.1:8000"],
)
def test_a_server_is_found_by_its_root_or_its_openai_base_url(url):
    assert server_url(url) == "http://127.0.0.1:8000"


def test_figures_of_a_stream():
    timings = Timings(first_text_s=2.0, last_text_s=3.0, usage={"prompt_tokens": 1000, "completion_tokens": 11})
    assert timings.prefill_tokens_per_s == 500 and timings.decode_ms_per_token == 100 and timings.decode_tokens_per_s == 10
    slow = Timings(first_text_s=4.0, last_text_s=7.0, usage=timings.usage)
    pace = pace_of([timings, slow, timings])
    assert (pace.first_token_s, pace.decode_ms, pace.spread) == (2.0, 100.0, 2.0)


def test_the_demo_keeps_the_most_chunks_a_stage_held():
    watch = Watch()
    for free in (90, 40, 70):
        watch.note({"stages": [{"layers": [0, 15], "pool": {"num_chunks": 100, "num_free": free}}]})
    assert (watch.stages[0].most_held, watch.stages[0].layers) == (60, "0 to 14")


def test_a_warm_up_is_a_line_for_every_tenth_where_nobody_watches(capsys):
    bar = WarmUpBar()
    for done in range(41):
        bar.update(done, 40, f"warming up {done}/40: [batch {done}]")
    bar.stop()
    bar.stop()
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"warming up {done}/40: [batch {done}]" for done in range(0, 41, 4)]


# The HTTP client, against a server that says what the test wants


@contextlib.asynccontextmanager
async def scripted_server(handler):
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        await runner.cleanup()


def event_stream(*blocks: bytes):
    async def handler(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for block in blocks:
            await response.write(block)
            await asyncio.sleep(0.02)
        return response

    return handler


def read_stream(handler) -> tuple[list[Progress | Delta], Timings]:
    async def go():
        timings = Timings()
        async with scripted_server(handler) as url, Client(url) as client:
            return [item async for item in client.stream("/v1/completions", {}, timings)], timings

    return asyncio.run(go())


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields, ensure_ascii=False).encode() + b"\n\n"


def test_a_stream_is_read_whole_however_it_is_cut():
    data = b": keep-alive\n\n" + event(prompt_progress={"processed": 512, "total": 900, "cache": 0, "time_ms": 1}, choices=[])
    data += event(choices=[{"delta": {"role": "assistant"}, "finish_reason": None}])
    data += event(choices=[{"delta": {"content": "Grüße 🦆"}, "finish_reason": None}])
    data += event(choices=[{"text": "!", "finish_reason": "stop"}])
    data += event(choices=[], usage={"prompt_tokens": 900, "completion_tokens": 2, "qsa": {"attended_share": 0.25}})
    data += b"data: [DONE]\n\n"
    middle = data.index("🦆".encode()) + 2  # inside a character
    items, timings = read_stream(event_stream(data[:7], data[7:middle], data[middle:]))
    assert items == [Progress(512, 900), Delta("Grüße 🦆"), Delta("!")]
    assert (timings.finish_reason, timings.prompt_tokens, timings.attended_share) == ("stop", 900, 0.25)
    assert timings.first_text_s is not None and timings.first_text_s > 0.03  # the cut character came with the third block


def test_an_error_event_raises():
    error = event(error={"message": "a stage is gone", "type": "server_error", "param": None, "code": None})
    with pytest.raises(QSAError, match="a stage is gone"):
        read_stream(event_stream(event(choices=[{"text": "a", "finish_reason": None}]), error, b"data: [DONE]\n\n"))


def test_a_stream_that_just_ends_is_an_error():
    with pytest.raises(EngineDeadError, match="without a finish reason"):
        read_stream(event_stream(event(choices=[{"text": "a", "finish_reason": None}])))


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (400, {"error": {"message": "too long", "param": "prompt", "code": "context_length_exceeded"}}, RequestError),
        (429, {"error": {"message": "busy"}}, OverloadedError),
        (503, {"error": {"message": "starting"}}, EngineDeadError),
        (500, "not json", QSAError),
    ],
)
def test_a_refusal_becomes_its_exception(status, body, kind):
    async def handler(request):
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(status=status, text=text, headers={"Retry-After": "7"})

    with pytest.raises(kind) as caught:
        read_stream(handler)
    if kind is RequestError:
        assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
    if kind is OverloadedError:
        assert caught.value.retry_after_s == 7


def test_a_batch_keeps_its_order_retries_a_busy_server_and_counts_failures(tmp_path):
    seen: dict[str, int] = {}
    running = peak = 0

    async def handler(request):
        nonlocal running, peak
        name = (await request.json())["prompt"]
        seen[name] = seen.get(name, 0) + 1
        if name == "r1" and seen[name] == 1:
            return web.json_response({"error": {"message": "busy"}}, status=429, headers={"Retry-After": "0"})
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0.3 if name == "r0" else 0.05)  # the first is the slowest
        running -= 1
        if name == "r2":
            return web.json_response({"error": {"message": "bad"}}, status=400)
        return web.json_response({"id": f"cmpl-{name}", "choices": [{"text": name}]})

    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(batch_line(f"r{i}") for i in range(6)))

    async def go():
        async with scripted_server(handler) as url, Client(url) as client:
            with target.open("w") as output:
                return await batch.answer_all(client, batch.read_batch(source), output, concurrency=3)

    assert asyncio.run(go()) == 1
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == [f"r{i}" for i in range(6)]
    assert [line["response"]["status_code"] for line in lines] == [200, 200, 400, 200, 200, 200]
    assert peak == 3 and seen["r1"] == 2


# Through everything


def descendants(pid: int) -> set[int]:
    """Processes that `pid` and its children started, by the kernel's own list."""
    found, todo = set(), [pid]
    while todo:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{todo[-1]}/task").iterdir():
                children = {int(child) for child in (task / "children").read_text().split()} - found
                found |= children
                todo[:0] = children
        todo.pop()
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: set[int], timeout_s: float = 30.0) -> set[int]:
    deadline = time.monotonic() + timeout_s
    while (left := {pid for pid in pids if is_alive(pid)}) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def test_a_server_that_cannot_start_says_why_in_one_line():
    server = ServerProcess(make_config({"model": {"path": "nowhere.gguf"}}))
    try:
        with pytest.raises(ConfigError, match=r"nowhere\.gguf"):
            server.start()
    finally:
        server.stop()


@pytest.mark.ray
def test_demo_answers_from_the_document_and_leaves_nothing(tmp_path):
    document = tmp_path / "note.txt"
    document.write_text("A short note\n\nThe ferry to the island leaves at nine in the morning. " * 60)  # more than one chunk
    command = [sys.executable, "-m", "qsa.cli", "demo", "--file", str(document), "--question", "When does the ferry leave?"]
    child = subprocess.Popen(
        [*command, "--max-tokens", "12"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    )
    started: set[int] = set()
    while child.poll() is None:
        started |= descendants(child.pid)
        time.sleep(0.2)
    output = child.stdout.read() if child.stdout else ""
    assert child.returncode == 0, output
    for line in ("time to first token", "prefill", "decode", "attended", "stage 0", "stage 1", "reading:"):
        assert line in output, output
    assert re.search(r"stage 1 +[1-9]\d* of \d+ chunks", output), output
    assert len(started) > 4, "two stages, a scheduler and Ray itself are processes"
    assert not wait_until_gone(started)


STOPPED_WHILE_STARTING = """
import sys, time
from qsa import cli
from qsa.serve_app import run

def start(config, on_progress):
    print("starting", flush=True)
    time.sleep(60)

run.start_serving = start
sys.exit(cli.main(["serve", "--stages", "1", "--port", sys.argv[1]]))
"""


@pytest.mark.ray
def test_a_server_that_is_stopped_while_it_starts_leaves_nothing_and_prints_no_stack():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", STOPPED_WHILE_STARTING, str(port)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ})
    assert child.stdout is not None and child.stdout.readline() == "starting\n"
    started = descendants(child.pid)
    child.send_signal(signal.SIGTERM)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 128 + signal.SIGTERM and len(said.splitlines()) == 1, said  # "starting default on ..."
    assert started and not wait_until_gone(started)
