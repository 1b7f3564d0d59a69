"""The same layers as the engine's stages in one process and one thread, without Ray or HTTP: what the model itself costs.

    {"prompt": [ids], "num_tokens": 64}  ->  {"prefill_s": 1.2, "decode_ms": 9.1}

Reads one request a line on standard input, as `llamacpp_peer` does; the argument is a configuration as JSON. One thread,
because that is what a stage has on two cores, and one sequence is on one stage at a time.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from qsa.config import EngineConfig, make_config
from qsa.device import prefill_chunk
from qsa.memory.layout import cdiv
from qsa.model.batch import Segment
from qsa.model.build import build_stage
from qsa.model.checkpoint.load import open_checkpoint
from qsa.model.decoder import StageModel
from qsa.plan import find_calibration, sparse_configs

SPARE_CHUNKS = 8  # a layer, for summaries


def build(config: EngineConfig) -> StageModel:
    """All layers of the configured model as one stage."""
    checkpoint = open_checkpoint(config.model.path)
    spec = checkpoint.spec
    calibration = find_calibration(config)
    max_model_len = config.model.max_model_len or spec.max_model_len
    pages = cdiv(max_model_len, 256)
    return build_stage(
        checkpoint,
        first_layer=0,
        last_layer=spec.num_layers,
        num_chunks=spec.num_layers * (pages + SPARE_CHUNKS),
        max_sequences=1,
        max_model_len=max_model_len,
        sparse=sparse_configs(config, calibration)[0],
        calibration_path=calibration,
        dtype=config.model.dtype,
        kv_dtype=config.model.kv_dtype,
        quantization=config.model.quantization,
    )


def run(model: StageModel, config: EngineConfig, prompt: list[int], num_tokens: int) -> dict[str, Any]:
    """Prefill in the engine's chunks, then greedy tokens one by one."""
    sparse_id, chunk = config.default_sparse_id, prefill_chunk(config)
    model.attention.open(0, sparse_id)
    begin = time.perf_counter()
    logits = torch.empty(0)
    for start in range(0, len(prompt), chunk):
        ids = torch.tensor(prompt[start : start + chunk])
        rows = [len(ids) - 1] if start + chunk >= len(prompt) else []
        logits = model.forward([Segment(0, start, start + len(ids), sparse_id, True)], ids, None, rows)
    token = logits.argmax(-1)
    prefill_s = time.perf_counter() - begin
    begin = time.perf_counter()
    for position in range(len(prompt), len(prompt) + num_tokens - 1):
        token = model.forward([Segment(0, position, position + 1, sparse_id, False)], token, None, [0]).argmax(-1)
    decode_ms = (time.perf_counter() - begin) * 1e3 / max(1, num_tokens - 1)
    model.attention.release(0)
    return {"prefill_s": prefill_s, "decode_ms": decode_ms}


def main() -> None:
    config = make_config(json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    model = build(config)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(run(model, config, **json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
