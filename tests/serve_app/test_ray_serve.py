"""The whole product on a real Ray cluster: `serve deploy`, eight clients, leaving, redeploys, killed processes, the end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import requests
import yaml
from fakes import wait_until
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient
from ray.util.state import list_actors
from ray_cluster import RayCluster, free_ports

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
APP = "qsa-test"
DOCUMENT = "The harbour of Tessel has four cranes, nine warehouses and a lighthouse. " * 40
SETTINGS: dict[str, Any] = {"limits": {"max_waiting": 8}, "cache": {"device_bytes": 256 << 20}, "server": {"drain_s": 3}}


@dataclass
class Deployed:
    """The application on the test cluster, and the commands that change it."""

    cluster: RayCluster
    port: int
    folder: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=60)

    def command(self, *arguments: str) -> str:
        """Run Ray's own command line against the cluster."""
        env = self.cluster.env | {"RAY_DASHBOARD_ADDRESS": self.cluster.dashboard_url}  # what `serve` looks at
        done = subprocess.run([*arguments], env=env, cwd=self.folder, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def deploy(self, **settings: Any) -> None:
        config = yaml.safe_load((ROOT / "serve.yaml").read_text())
        config["http_options"]["port"] = self.port
        (application,) = config["applications"]
        application["name"] = APP
        application["args"] = SETTINGS | settings
        path = self.folder / "serve.yaml"
        path.write_text(yaml.safe_dump(config))
        self.command("serve", "deploy", str(path))
        self.wait_until_running()

    def status(self) -> dict[str, Any]:
        """What `serve status` shows, without the seconds its process takes."""
        details = ServeSubmissionClient(self.cluster.dashboard_url).get_serve_details()
        return details["applications"].get(APP, {})

    def wait_until_running(self) -> None:
        """And warm: where a warm-up takes long, as on a busy machine, the application is RUNNING before it answers."""

        def is_running() -> bool:
            status = self.status()
            assert status.get("status") != "DEPLOY_FAILED", status
            return status.get("status") == "RUNNING"

        wait_until(is_running, 120)
        wait_until(lambda: requests.get(self.url + "/ready", timeout=30).status_code == 200, 120)

    def stats(self) -> dict[str, Any]:
        return requests.get(self.url + "/stats", timeout=10).json()

    def is_idle(self) -> bool:
        """Nothing runs, waits or holds memory, on any stage."""
        stats = self.stats()
        scheduler = stats["scheduler"]
        counts = [scheduler[name] for name in ("num_waiting", "num_running", "num_in_flight", "num_slots")]
        return not any([*counts, *scheduler["held_chunks"]]) and all(
            stage["pool"]["num_free"] == stage["pool"]["num_chunks"] and not stage["pool"]["num_sequences"]
            for stage in stats["stages"]
        )

    def actors(self) -> dict[str, int]:
        """Process ids of the living actors that belong to the application, by name."""
        found = list_actors(address=self.cluster.dashboard_url, filters=[("state", "=", "ALIVE")], limit=1000)
        return {a.name: a.pid for a in found if a.name.startswith((f"qsa/{APP}/", f"SERVE_REPLICA::{APP}#"))}

    def ask(self, **fields: Any) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4, "temperature": 0, **fields}
        answer = requests.post(self.url + "/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture(scope="module")
def deployed(ray_cluster, tmp_path_factory) -> Iterator[Deployed]:
    (port,) = free_ports(1)
    app = Deployed(ray_cluster, port, tmp_path_factory.mktemp("serve"))
    try:
        app.deploy()
        yield app
    finally:
        app.command("serve", "shutdown", "-y")


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_serve_deploy_then_a_request(deployed):
    answer = deployed.ask()
    assert answer["choices"][0]["message"]["content"] and answer["usage"]["completion_tokens"] > 0
    assert requests.get(deployed.url + "/ready", timeout=10).status_code == 200
    assert yaml.safe_load(deployed.command("serve", "status"))["applications"][APP]["status"] == "RUNNING"
    names = {name.rsplit("/", 1)[1] for name in deployed.actors() if name.startswith("qsa/")}
    assert names == {"stage0", "stage1", "scheduler"}
    assert "layers" in deployed.command("ray", "list", "actors", "--detail", "--limit", "1000")


def test_eight_streams_at_once_equal_their_solo_runs(deployed):
    def stream(index: int) -> tuple[str, str]:
        length = 2500 if index == 7 else 40 + 80 * index  # one that is longer than a chunk
        prompt = f"{DOCUMENT[:length]}\n\nWrite a story, number {index}."
        chunks = deployed.client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": prompt}],
            temperature=0.8,
            seed=100 + index,
            max_tokens=24,
            stream=True,
        )
        text, reason = "", None
        for chunk in chunks:
            text += chunk.choices[0].delta.content or ""
            reason = chunk.choices[0].finish_reason or reason
        return text, reason

    solo = [stream(index) for index in range(8)]
    assert len(set(solo)) == 8
    together: dict[int, tuple[str, str]] = {}
    threads = [threading.Thread(target=lambda i=i: together.update({i: stream(i)})) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[index] for index in range(8)] == solo
    wait_until(deployed.is_idle)
    assert deployed.stats()["scheduler"]["aborted"] == 0


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_frees_the_memory_of_both_stages(deployed, stream):
    before = deployed.stats()["scheduler"]
    body = {"messages": [{"role": "user", "content": DOCUMENT}], "max_tokens": 5000, "stream": stream, "ignore_eos": True}
    post = {"json": body, "stream": True, "timeout": (5, 1.0)}
    with (
        contextlib.suppress(requests.Timeout, requests.ConnectionError),
        requests.post(deployed.url + "/v1/chat/completions", **post) as answer,
    ):
        next(answer.iter_lines())
    wait_until(deployed.is_idle)
    after = deployed.stats()["scheduler"]
    assert after["aborted"] == before["aborted"] + 1
    assert after["generated_tokens"] - before["generated_tokens"] < 1000


def test_wrong_requests_pass_the_proxy_unharmed(deployed):
    for path, body, status in (
        ("/v1/chat/completions", b"{", 400),
        ("/v1/completions", b'{"prompt": ""}', 400),
        ("/v1/nothing", b"{}", 404),
        ("/v1/completions", b'{"prompt": "x", "max_tokens": 100000}', 400),
    ):
        answer = requests.post(deployed.url + path, data=body, timeout=10)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_more_than_can_wait_are_told_429_by_the_engine(deployed):
    statuses = []

    def ask() -> None:
        body = {"prompt": DOCUMENT[:300], "max_tokens": 12, "ignore_eos": True}
        answer = requests.post(deployed.url + "/v1/completions", json=body, timeout=60)
        statuses.append(answer.status_code)
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "rate_limit_exceeded"

    threads = [threading.Thread(target=ask) for _ in range(24)]  # 8 run, 8 wait
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(statuses) == {200, 429} and statuses.count(200) >= 16
    wait_until(deployed.is_idle)


def test_a_redeploy_leaves_no_actor_and_no_process(deployed):
    before = deployed.actors()
    assert len(before) == 4
    results = []
    thread = threading.Thread(target=lambda: results.append(stream_events(deployed)))
    thread.start()
    wait_until(lambda: deployed.stats()["scheduler"]["num_running"] == 1, 30)
    deployed.deploy(pipeline={"num_stages": 1})
    wait_until(lambda: not any(map(is_alive, before.values())), 90)
    after = deployed.actors()
    assert len(after) == 3 and not set(after) & set(before)
    deployed.ask()
    thread.join(30)
    # its replica was drained: the stream got server.drain_s, then an error event and its end
    assert results[0][-1] == "[DONE]" and '"error"' in results[0][-2]


def stream_events(deployed: Deployed, max_tokens: int = 5000) -> list[str]:
    """Without the comments that keep a connection open while nothing comes."""
    body = {"prompt": "Once", "max_tokens": max_tokens, "stream": True, "ignore_eos": True, "seed": 1}
    with requests.post(deployed.url + "/v1/completions", json=body, stream=True, timeout=60) as answer:
        return [line.decode().removeprefix("data: ") for line in answer.iter_lines() if line and not line.startswith(b":")]


def stream_under(deployed: Deployed, kill) -> list[str]:
    """The events of a stream under which something is killed."""
    results, tokens = [], deployed.stats()["scheduler"]["generated_tokens"]
    thread = threading.Thread(target=lambda: results.append(stream_events(deployed, max_tokens=100)))
    thread.start()
    wait_until(lambda: deployed.stats()["scheduler"]["generated_tokens"] > tokens + 8, 30)
    kill()
    thread.join(60)
    return results[0]


def text_of(events: list[str]) -> str:
    assert events[-1] == "[DONE]", events[-2:]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def test_streams_go_on_after_kill_9_of_a_stage(deployed):
    before = deployed.actors()
    stage = next(pid for name, pid in before.items() if name.endswith("stage0"))
    undisturbed = stream_under(deployed, lambda: None)

    def kill():
        os.kill(stage, signal.SIGKILL)
        wait_until(lambda: requests.get(deployed.url + "/health", timeout=5).status_code == 503, 30)

    events = stream_under(deployed, kill)
    assert text_of(events) == text_of(undisturbed)
    assert requests.get(deployed.url + "/health", timeout=5).status_code == 200
    now = deployed.actors()
    changed = {name for name in now if before[name] != now[name]}
    assert now.keys() == before.keys() and {name.rpartition("/")[2] for name in changed} == {"stage0"}, "not the replica"
    deployed.ask()


def test_kill_9_of_the_scheduler_ends_streams_and_heals(deployed):
    before = deployed.actors()
    scheduler = next(pid for name, pid in before.items() if name.endswith("scheduler"))
    events = stream_under(deployed, lambda: os.kill(scheduler, signal.SIGKILL))
    assert events[-1] == "[DONE]" and '"error"' in events[-2] and sum('"error"' in event for event in events) == 1
    wait_until(lambda: requests.get(deployed.url + "/ready", timeout=30).status_code == 200, 90)
    now = deployed.actors()
    assert {name.rpartition("/")[2] for name in now if before[name] != now[name]} == {"scheduler"}
    deployed.ask()


def test_kill_9_of_the_replica_leaves_nothing_and_heals(deployed):
    before = deployed.actors()
    replica = next(pid for name, pid in before.items() if name.startswith("SERVE_REPLICA"))
    os.kill(replica, signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, before.values())), 60)
    wait_until(lambda: len(set(deployed.actors()) - set(before)) == len(before), 120)
    deployed.wait_until_running()
    deployed.ask()


def test_deleting_the_application_leaves_nothing(deployed):
    before = deployed.actors()
    deployed.command(sys.executable, "-c", f"from ray import serve; import ray; ray.init(); serve.delete({APP!r})")
    wait_until(lambda: not any(map(is_alive, before.values())) and not deployed.actors(), 90)


def test_an_engine_that_cannot_start_fails_the_deployment_with_its_reason(deployed):
    with pytest.raises(AssertionError, match=r"DEPLOY_FAILED"):
        deployed.deploy(model={"path": "/no/such/model"})
    assert "CheckpointError: /no/such/model" in str(deployed.status())
    wait_until(lambda: not [name for name in deployed.actors() if name.startswith("qsa/")], 60)
