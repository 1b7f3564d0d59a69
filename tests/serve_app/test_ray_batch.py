"""examples/batch_job.py as its users run it: submitted as a Ray job, and from a Ray client."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import wait_until
from ray.util.state import list_actors

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[2]
CHAT = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 6, "temperature": 0}


@pytest.fixture
def prompts(tmp_path):
    lines = [
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "default", **CHAT}},
        {
            "custom_id": "text",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": ["One,", "Two,"], "max_tokens": 3},
        },
        {"custom_id": "wrong", "method": "POST", "url": "/v1/completions", "body": {"prompt": ""}},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def assert_answered(path: Path) -> None:
    answers = [json.loads(line) for line in path.read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == ["chat", "text", "wrong"]
    assert [answer["response"]["status_code"] for answer in answers] == [200, 200, 400]
    assert all(answer["error"] is None and answer["id"].startswith("batch_req_") for answer in answers)
    chat, text, wrong = (answer["response"]["body"] for answer in answers)
    assert chat["choices"][0]["message"]["content"] and chat["usage"]["completion_tokens"] <= 6
    assert len(text["choices"]) == 2
    assert wrong["error"]["param"] == "prompt"


def assert_nothing_left(cluster) -> None:
    def living() -> list[str]:
        actors = list_actors(address=cluster.dashboard_url, filters=[("state", "=", "ALIVE")], limit=1000)
        return [a.name or a.class_name for a in actors if a.name.startswith("qsa/batch/") or a.class_name == "BatchWorker"]

    wait_until(lambda: not living(), 60)


def test_submitted_as_a_ray_job(ray_cluster, prompts):
    output = prompts.with_name("answers.jsonl")
    command = [sys.executable, str(ROOT / "examples/batch_job.py"), str(prompts), str(output)]
    done = subprocess.run(
        ["ray", "job", "submit", "--", *command], env=ray_cluster.env, capture_output=True, text=True, timeout=200, check=False
    )
    assert "2 of 3 requests answered" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 1, "a request failed, and the job says so"
    assert_answered(output)
    assert_nothing_left(ray_cluster)


def test_from_a_ray_client(ray_cluster, prompts):
    output = prompts.with_name("answers.jsonl")
    command = [sys.executable, str(ROOT / "examples/batch_job.py"), str(prompts), str(output)]
    env = {name: value for name, value in ray_cluster.env.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [*command, "--address", ray_cluster.client_url], env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert "2 of 3 requests answered" in done.stdout, done.stdout + done.stderr
    assert "batch_job: starting a worker: it reserves 0.25 CPU, the cluster has " in done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("batch_job: ")]
    assert len(told) > 1, "and how far the engine's start is, once a second"
    assert_answered(output)
    assert_nothing_left(ray_cluster)


@pytest.mark.parametrize("lost", [2, 3])
def test_a_client_whose_server_was_lost_connects_again(monkeypatch, capsys, lost):
    spec = importlib.util.spec_from_file_location("batch_job", ROOT / "examples/batch_job.py")
    batch_job = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(batch_job)
    replies = [ConnectionAbortedError("Initialization failure from server:\nTraceback\nRuntimeError: no server")] * lost + [
        None
    ]

    def init(address, **_):
        assert address == "ray://head:10001"
        if reply := replies.pop(0):
            raise reply

    monkeypatch.setattr(batch_job.ray, "init", init)
    if lost < batch_job.CONNECT_ATTEMPTS:
        batch_job.connect("ray://head:10001")
    else:
        with pytest.raises(ConnectionAbortedError, match="no server"):
            batch_job.connect("ray://head:10001")
    assert len(replies) == lost + 1 - batch_job.CONNECT_ATTEMPTS
    assert [line.endswith("RuntimeError: no server") for line in capsys.readouterr().err.splitlines()] == [True, True]


def test_an_engine_that_cannot_start_is_one_line(ray_cluster, prompts):
    output = prompts.with_name("answers.jsonl")
    command = [sys.executable, str(ROOT / "examples/batch_job.py"), str(prompts), str(output), "--model", "/no/such/model"]
    done = subprocess.run(command, env=ray_cluster.env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "/no/such/model" in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
    assert_nothing_left(ray_cluster)
