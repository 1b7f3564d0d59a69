"""Compiles the prefill kernels for an architecture, without a GPU, and prints what each launch needs as JSON.

    python tests/compile_prefill.py 90

The operators run at the 7B shape on CPU tensors, with launches replaced by compilation, as in compile_select.py.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch
from offline_gpu import compile_launches, resources

from qsa.kernels import sparse_prefill_triton
from qsa.kernels.dense_prefill_triton import gather_pages, merge_parts
from qsa.kernels.paged_kv import PagedKV

CASES: dict[str, dict[str, Any]] = {
    "float16": {},
    "bfloat16": dict(dtype=torch.bfloat16),
    "by descriptor": dict(dtype=torch.bfloat16, use_tma=True),
    "tiles of 64": dict(tile_size=64),
    "tiles of 64, one head": dict(tile_size=64, heads=1),
    "head_dim 80": dict(head_dim=80),
    "fp8": dict(kv_dtype=torch.float8_e4m3fn),
    "fp8 by descriptor": dict(kv_dtype=torch.float8_e4m3fn, use_tma=True),
}


def launch(
    dtype: torch.dtype = torch.float16,
    kv_dtype: torch.dtype | None = None,
    head_dim: int = 128,
    tile_size: int = 128,
    **how: Any,
) -> None:
    """sparse_prefill of the last 8192 tokens of 262144: 28 query heads, 4 KV heads, lists of 64 slices."""
    q = torch.zeros(8192, 28, head_dim, dtype=dtype)
    lists = torch.zeros(8192 // tile_size, 4, 64, dtype=torch.int32)
    kv = PagedKV(kv_dtype or dtype, 512, torch.ones(4, 2) if kv_dtype else None)
    sparse_prefill_triton.sparse_prefill(
        q, torch.zeros(512, dtype=torch.int64), lists, first=253952, start=253952, end=262144, tile_size=tile_size,
        num_kv_heads=4, slice_size=64, window_size=512, sm_scale=0.1, kv=kv,
        pool=torch.zeros(4, 1 << 20, dtype=torch.uint8), **how,
    )  # fmt: skip


def main() -> None:
    capability = int(sys.argv[1])
    compiled = compile_launches(capability)
    sparse_prefill_triton.capability = lambda device: divmod(capability, 10)  # type: ignore[attr-defined]
    needs = {}
    for name, case in CASES.items():
        if capability < 90 and "use_tma" in case:
            continue
        launch(**case)
        kernel = compiled.pop("_sparse_prefill_kernel")
        units = re.findall(r"wgmma\.mma_async|mma\.sync|cp\.async\.bulk\.tensor", kernel.asm["ptx"])
        needs[name] = {**resources(kernel), "units": sorted(set(units))}
    kv = PagedKV(torch.float8_e4m3fn, 512, torch.ones(4, 2))
    gather_pages(torch.zeros(512, dtype=torch.int64), 0, 65536, 4, 128, kv)
    part = torch.zeros(1, 28, 64, 128, dtype=torch.bfloat16), torch.zeros(1, 28, 64)
    merge_parts([part, part], torch.bfloat16)
    needs.update({name: resources(kernel) for name, kernel in compiled.items()})
    print(json.dumps(needs))


if __name__ == "__main__":
    main()
