"""Compiles the decode path's Triton kernels for an architecture, without a GPU, and prints what each needs as JSON.

    python tests/compile_triton.py 89

The operators run at the 7B shape on CPU tensors, with launches replaced by compilation: what is compiled are the parameters
that they would launch with.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from offline_gpu import compile_launches, resources

from qsa.kernels.block_select_triton import block_select
from qsa.kernels.summaries.code_triton import quantise_queries, scan_codes


def launch_all() -> None:
    """Every operator once: 28 query heads, 4 KV heads, head_dim 128, 8 sequences of 262144 tokens."""
    batch, seq_len, num_kv_heads, head_dim, code_dim = 8, 262144, 4, 128, 64
    q = torch.zeros(batch, 28, head_dim, dtype=torch.float16)
    chunks = torch.zeros(batch, 16, dtype=torch.int64)
    seq_lens = torch.full((batch,), seq_len, dtype=torch.int32)
    sliced: dict[str, Any] = dict(slice_size=64, window_size=512)
    numbers, scales = quantise_queries(q, torch.zeros(num_kv_heads, head_dim, code_dim))
    scores = scan_codes(numbers, scales, chunks, seq_lens, max_slices=4096, sink_size=64, sm_scale=0.1, **sliced)
    block_select(scores, seq_lens, 55, num_kv_heads=num_kv_heads, **sliced)


def main() -> None:
    compiled = compile_launches(int(sys.argv[1]))
    launch_all()
    print(json.dumps({name: resources(kernel) for name, kernel in compiled.items()}))


if __name__ == "__main__":
    main()
