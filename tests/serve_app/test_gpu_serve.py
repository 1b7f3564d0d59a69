"""The whole product on a card: `qsa serve` with random weights, one stage and two that share the card, say the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import requests

from qsa.config import make_config
from qsa.server_process import running_server

pytestmark = [pytest.mark.gpu, pytest.mark.ray, pytest.mark.timeout(900)]

DEVICE = "cuda"
SHAPE = {
    **dict(architectures=["Qwen2ForCausalLM"], hidden_size=256, intermediate_size=512, num_attention_heads=4, head_dim=64),
    **dict(num_key_value_heads=2, num_hidden_layers=4, max_position_embeddings=16384, rms_norm_eps=1e-6, vocab_size=4096),
}
PROMPT = [(7 * place) % 4000 for place in range(6000)]  # longer than sink, list and window: selection is at work


def ask(url: str, sparse_id: int) -> str:
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "sparse_id": sparse_id}
    answer = requests.post(url + "/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def serve(folder: Path, num_stages: int) -> tuple[list[str], dict[str, Any]]:
    """What it answers, dense and sparse; and its statistics before that."""
    pipeline = {"device": DEVICE, "num_stages": num_stages, "gpus_per_stage": 1 / num_stages, "start_timeout_s": 300}
    model = {"path": str(folder), "load_format": "dummy"}
    cache, limits = {"device_bytes": 256 << 20}, {"prefill_chunk": 2048, "max_sequences": 4}
    config = make_config({"model": model, "pipeline": pipeline, "cache": cache, "limits": limits})
    with running_server(config) as url:
        stats = requests.get(url + "/stats", timeout=10).json()
        return [ask(url, sparse_id) for sparse_id in (0, 1, 1)], stats


def test_one_stage_and_two_on_one_card_say_the_same(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    answers, stats = serve(tmp_path, 1)
    assert [stage["device"] for stage in stats["stages"]] == [DEVICE] and stats["scheduler"]["steps"] == 0
    assert answers[1] == answers[2] and all(answers)
    again, stats = serve(tmp_path, 2)
    assert [stage["layers"] for stage in stats["stages"]] == [[0, 2], [2, 4]]
    assert again == answers
