"""Compiles the kernels of scans and selection for an architecture, without a GPU, and prints what each launch needs as JSON.

    python tests/compile_select.py 90

The operators run on CPU tensors, with launches replaced by compilation: what is compiled are the parameters that they would
launch with.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from types import ModuleType
from typing import Any

import torch
from offline_gpu import compile_cases, compile_launches

from qsa.kernels.block_select_triton import select_decode, select_tiles
from qsa.kernels.paged_kv import DecodeInputs, PagedKV
from qsa.kernels.registry import get_operator
from qsa.kernels.summaries import code_rows_triton, code_triton, sketch_triton, vectors_triton
from qsa.kernels.summaries.code import CodeCalibration
from qsa.kernels.summaries.code_rows_triton import quantise_queries

MODULES: list[ModuleType] = [code_triton, code_rows_triton, sketch_triton, vectors_triton]
MODELS = {  # num_q_heads, num_kv_heads, head_dim, code_dim
    "7B": (28, 4, 128, 64),
    "default": (9, 3, 64, 24),
    "wide": (40, 8, 80, 128),
}


def launch_scans(name: str, shape: tuple[int, int, int, int]) -> None:
    """Both scans and both updates of one summary: 8 sequences of 262144 tokens, or 128 queries of one."""
    num_q_heads, num_kv_heads, head_dim, code_dim = shape
    width = num_kv_heads * head_dim
    directions = torch.zeros(1, width, code_dim)
    summary = get_operator(f"{name}_summary", "triton")
    sizes: dict[str, Any] = dict(num_kv_heads=num_kv_heads, head_dim=head_dim, slice_size=64)
    summary.init(**sizes, calibration=CodeCalibration(directions, directions, torch.zeros(1, width)))
    q, rows = (torch.zeros(count, num_q_heads, head_dim, dtype=torch.float16) for count in (8, 128))
    table, flags = torch.zeros(8, 128, dtype=torch.int64), torch.zeros(8, dtype=torch.int32)
    inputs = DecodeInputs(q, *(quantise_queries(q, summary.query(0)) if name == "code" else ()))
    near: dict[str, Any] = dict(max_slices=4096, sink_size=64, window_size=512, sm_scale=0.1)
    summary.scan(0, inputs, table, flags, flags, **near)
    summary.scan_rows(0, rows, table[0], num_slices=4096, sm_scale=0.1)
    kv = PagedKV(torch.float16, 512)
    summary.update_decode(0, table, table, flags, kv)
    summary.update(0, table[0], table[0], 3, 100, kv)


def launch_selections(num_q_heads: int, num_kv_heads: int, max_slices: int, **options: Any) -> None:
    """Pools of 256 slices of 8 sequences, and lists of 128 of 64 tiles of two queries."""
    flags, pools = torch.zeros(8, dtype=torch.int32), torch.zeros(8, num_kv_heads, 256, dtype=torch.int32)
    sizes: dict[str, Any] = dict(num_kv_heads=num_kv_heads, **options)
    edges = torch.zeros(8, num_kv_heads, 2)
    decode = dict(slice_size=64, window_size=512, **sizes)
    select_decode(torch.zeros(8, num_q_heads, max_slices), flags, flags, flags, pools, edges, **decode)
    scores = torch.zeros(64, 2, num_q_heads, max_slices)
    select_tiles(scores, torch.zeros(64, 2), torch.zeros(64, dtype=torch.int32), 128, **sizes)


def main() -> None:
    capability = int(sys.argv[1])
    compiled = compile_launches(capability)
    for module in MODULES:
        for name, value in (("capability", divmod(capability, 10)), ("num_multiprocessors", 132)):
            if hasattr(module, name):
                setattr(module, name, lambda device, value=value: value)
    blocks = dict(top_k_coarse=32, slices_per_block=16, block_pool="lse")
    cases = {
        f"{summary} {model}": partial(launch_scans, summary, shape)
        for model, shape in MODELS.items()
        for summary in ("code", "sketch", "minmax", "mean")
    }
    cases |= {
        "slices": partial(launch_selections, 28, 4, 4096),
        "blocks": partial(launch_selections, 28, 4, 4096, **blocks),
        "short": partial(launch_selections, 9, 3, 128),
        "1M": partial(launch_selections, 28, 4, 16384),
    }
    print(json.dumps(compile_cases(compiled, cases)))


if __name__ == "__main__":
    main()
