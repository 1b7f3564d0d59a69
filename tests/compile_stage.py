"""Compiles all that a stage at the 7B shape launches for an architecture, without a GPU, and prints what each kernel needs.

    python tests/compile_stage.py 90 fp8 int8              # capability, K and V, weights

The stage is a real one, of one layer, on CPU tensors; its launches compile and run nothing. So types, sizes and alignments are
those that a card will see, in every decode batch and in prompts near the start and far from it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import torch
from offline_gpu import compile_launches, resources

from qsa.kernels.registry import SparseConfig, get_operator
from qsa.model.batch import Segment
from qsa.model.build import build_stage
from qsa.model.checkpoint.random import RandomCheckpoint, random_calibration
from qsa.model.rope import RopeSpec
from qsa.model.spec import ModelSpec

SPEC = ModelSpec(
    **dict(architecture="qwen2", name="7b", num_layers=1, hidden_size=3584, intermediate_size=18944, num_q_heads=28),
    **dict(num_kv_heads=4, head_dim=128, vocab_size=8192, max_position_embeddings=32768, rms_norm_eps=1e-6, qkv_bias=True),
    **dict(rope=RopeSpec(128, 1e6), tie_word_embeddings=False),
)
BASE = SparseConfig(sink_size=64, prefill_tile=128, top_k_fine=55)
SPARSE = {
    0: SparseConfig(dense=True),
    1: BASE,
    2: replace(BASE, candidate_factor=1, rerank="none", summary="sketch"),
}


class ZeroCheckpoint(RandomCheckpoint):
    """Weights that take no memory until they are copied."""

    def read(self, name: str) -> torch.Tensor:
        return torch.zeros(self._shapes[name], dtype=torch.bfloat16)


def pretend(capability: int) -> None:
    """Let every wrapper believe that it is on such a card, of 132 multiprocessors."""
    get_operator("argmax", "triton")  # imports all of them
    for name, module in list(sys.modules.items()):
        if name.startswith("qsa.kernels"):
            for function, value in (("capability", divmod(capability, 10)), ("num_multiprocessors", 132)):
                if hasattr(module, function):
                    setattr(module, function, lambda device, value=value: value)


def main() -> None:
    capability, kv_dtype, quantization = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    compiled = compile_launches(capability)
    pretend(capability)
    stage: Any = build_stage(
        ZeroCheckpoint(SPEC),
        first_layer=0,
        last_layer=1,
        num_chunks=100,
        max_sequences=8,
        max_model_len=SPEC.max_model_len,
        sparse=SPARSE,
        calibration=random_calibration(SPEC, 64),
        kv_dtype=kv_dtype,
        quantization=quantization,
        backend="triton",
    )
    needs: dict[str, dict[str, Any]] = {}

    def note(what: str) -> None:
        needs.update({f"{name} {what}": resources(kernel) for name, kernel in compiled.items()})
        compiled.clear()

    for number in SPARSE:
        for size in (8, 1):
            stage._steps.capture(number, size)
            note(f"decode {number} batch {size}")
        stage.attention.open(0, number)
        stage.cache.extend(0, 20000)
        for start, end in ((0, 256), (14000, 14257)):
            stage.forward([Segment(0, start, end, number, True)], torch.zeros(end - start, dtype=torch.int64), None, [0])
            note(f"prefill {number} from {start}")
        stage.attention.release(0)
    print(json.dumps(needs))


if __name__ == "__main__":
    main()
