"""Compiles the decode attention kernels for an architecture, without a GPU, and prints what each needs as JSON.

    python tests/compile_decode.py 89

The operators run at the 7B shape on CPU tensors, with launches replaced by compilation: what is compiled are the parameters
that they would launch with.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import torch
from offline_gpu import compile_cases, compile_launches

from qsa.kernels import split_triton
from qsa.kernels.dense_attention_triton import dense_decode
from qsa.kernels.paged_kv import PagedKV
from qsa.kernels.rerank_decode_triton import rerank_decode
from qsa.kernels.sparse_decode_triton import sparse_decode

CASES = {  # type of activations, of K and V, slices beside sink and window, lists
    "float16": (torch.float16, torch.float16, 55, 4),
    "bfloat16, one list": (torch.bfloat16, torch.bfloat16, 55, 1),
    "float8": (torch.bfloat16, torch.float8_e4m3fn, 55, 4),
    "float16, 8192 tokens": (torch.float16, torch.float16, 119, 4),
}


def launch_all(dtype: torch.dtype, kv_dtype: torch.dtype, top_k: int, lists: int) -> None:
    """28 query heads, 4 KV heads, head_dim 128, 8 sequences of 262144 tokens, pools of four times a list."""
    scale = torch.ones(4, 2) if kv_dtype == torch.float8_e4m3fn else None
    batch = torch.zeros(8, 28, 128, dtype=dtype), torch.zeros(8, 512, dtype=torch.int64), torch.zeros(8, dtype=torch.int32)
    slots = torch.zeros(8, dtype=torch.int32)
    heads: dict[str, Any] = dict(num_kv_heads=4, sm_scale=0.1, kv=PagedKV(kv_dtype, 512 * 2 // kv_dtype.itemsize, scale))
    sliced: dict[str, Any] = dict(slice_size=64, sink_size=64, window_size=512)
    pool, chosen = (torch.zeros(8, lists, count, dtype=torch.int32) for count in (4 * top_k, top_k))
    rerank_decode(*batch, slots, pool, chosen, top_k=top_k, **heads, **sliced)
    sparse_decode(*batch, slots, chosen, **heads, **sliced)
    dense_decode(*batch, **heads)


def main() -> None:
    capability = int(sys.argv[1])
    split_triton.casts_e4m3 = lambda device: capability >= 89
    compiled = compile_launches(capability)
    print(json.dumps(compile_cases(compiled, {name: partial(launch_all, *case) for name, case in CASES.items()})))


if __name__ == "__main__":
    main()
