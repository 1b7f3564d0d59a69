"""Compiles the kernels around attention and linear layers for an architecture, without a GPU; prints what each needs as JSON.

    python tests/compile_prepare.py 90

The operators run at the 7B shape on CPU tensors, with launches replaced by compilation: what is compiled are the parameters
that they would launch with.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from offline_gpu import compile_cases, compile_launches, resources

from qsa.kernels.argmax_triton import greedy_tokens
from qsa.kernels.decode_prepare_triton import decode_prepare
from qsa.kernels.kv_write_triton import CodeWrite
from qsa.kernels.pointwise_triton import add_rms_norm, rotate, silu_multiply
from qsa.kernels.prefill_prepare_triton import prefill_prepare

TYPES = {  # of activations, of K and V
    "float16": (torch.float16, torch.float16),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "bfloat16 float8": (torch.bfloat16, torch.float8_e4m3fn),
}


def prepare(operator: Callable[..., Any], rows: int, dtype: torch.dtype, kv_dtype: torch.dtype, has_norm: bool) -> None:
    """decode_prepare of 8 sequences, or prefill_prepare of a chunk: 28 query heads, 4 KV heads, head_dim 128, 262144 tokens."""
    is_decode, is_float8 = operator is decode_prepare, kv_dtype == torch.float8_e4m3fn
    page_size = 1024 if is_float8 else 512
    pages = torch.zeros((rows, 512) if is_decode else (512,), dtype=torch.int64)
    chunks = torch.zeros((rows, 16) if is_decode else (16,), dtype=torch.int64)
    table = torch.zeros(16384, 128)
    query = dict(query=torch.zeros(4, 128, 64)) if is_decode else {}
    operator(
        torch.zeros(rows, 36 * 128, dtype=dtype), table, table, pages,
        torch.zeros(rows, dtype=torch.int32) if is_decode else 4097,
        num_kv_heads=4, head_dim=128, kv_dtype=kv_dtype, page_size=page_size,
        head_norm=torch.zeros(32, 128) if has_norm else None, eps=1e-6, kv_scale=torch.ones(4, 2) if is_float8 else None,
        code=CodeWrite(torch.zeros(512, 64), torch.zeros(64), chunks, 64), **query,
    )  # fmt: skip


def prepare_both(*case: Any) -> None:
    prepare(decode_prepare, 8, *case)
    prepare(prefill_prepare, 8192, *case)


def main() -> None:
    compiled = compile_launches(int(sys.argv[1]))
    cases = {
        f"{name} {has_norm}": partial(prepare_both, *types, has_norm)
        for name, types in TYPES.items()
        for has_norm in (False, True)
    }
    needs = compile_cases(compiled, cases)
    x = torch.zeros(8, 3584, dtype=torch.bfloat16)
    for num_parts in (1, 8):
        add_rms_norm(x, torch.zeros(num_parts, 8, 3584), x[0], 1e-6)
        needs[f"_add_rms_norm_kernel {num_parts}"] = resources(compiled.pop("_add_rms_norm_kernel"))
    silu_multiply(torch.zeros(8192, 2 * 18944, dtype=torch.bfloat16))
    rotate(x.view(8, 28, 128), torch.zeros(8, 1, 128), torch.zeros(8, 1, 128))
    greedy_tokens(torch.zeros(8, 152064))
    needs.update({name: resources(kernel) for name, kernel in compiled.items()})
    print(json.dumps(needs))


if __name__ == "__main__":
    main()
