"""Cases of decode attention at 8 x 262144 tokens: rerank, a final list, everything, and what stands before them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu_cases import SETS, Case, relative_error
from benchmarks.gpu_inputs import (
    BATCH,
    CODE_DIM,
    FP8,
    GROUP,
    HEAD_DIM,
    NUM_KV_HEADS,
    SEQ_LEN,
    SINK,
    SLICE,
    SM_SCALE,
    WINDOW,
    LayerKV,
    Step,
    far_slices,
    lengths,
    make_kv,
    make_steps,
    projections,
    rows,
)
from qsa.kernels import decode_prepare_triton, dense_attention_triton, rerank_decode_triton, sparse_decode_triton
from qsa.kernels.kv_write_triton import CodeWrite
from qsa.kernels.sparse_decode_ref import sparse_decode_ref

LISTED = {4096: far_slices(4096), 8192: far_slices(8192)}
FACTORS = (2, 3, 4)  # of a pool to its list
CHECKED = (0, BATCH - 1)
SIZES: dict[str, Any] = dict(num_kv_heads=NUM_KV_HEADS, slice_size=SLICE, sink_size=SINK, window_size=WINDOW, sm_scale=SM_SCALE)


def attended(layer: LayerKV, step: Step, pool: torch.Tensor, top_k: int, out: torch.Tensor) -> tuple[float, float]:
    """Errors of sparse attention on two sequences against the reference in float64, and in the type of the queries."""
    errors, own = [], []
    for row in CHECKED:
        exact = layer.keys(row)
        for type_, kept in ((torch.float64, None), (step.q.dtype, own)):
            keys = [part.to(type_) for part in exact]
            sizes = {key: SIZES[key] for key in ("slice_size", "sink_size", "window_size", "sm_scale")}
            got = sparse_decode_ref(step.q[row].to(type_), *keys, pool[row].cpu().long(), top_k=top_k, **sizes)[0]
            if kept is None:
                want = got
                errors.append(relative_error(out[row], want))
            else:
                kept.append(relative_error(got, want))
    return max(errors), max(own)


def everything(layer: LayerKV, q: torch.Tensor, out: torch.Tensor) -> tuple[float, float]:
    errors, own = [], []
    for row in CHECKED:
        k, v = layer.keys(row)
        for head in range(NUM_KV_HEADS):
            mine = slice(head * GROUP, (head + 1) * GROUP)

            def attend(
                type_: torch.dtype, row: int = row, mine: slice = mine, k: Any = k[head], v: Any = v[head]
            ) -> torch.Tensor:
                logits = (q[row, mine].to(type_) @ k.to(type_).T * SM_SCALE).double()
                return torch.softmax(logits, -1).to(type_) @ v.to(type_)

            want = attend(torch.float64)
            errors.append(relative_error(out[row, mine], want))
            own.append(relative_error(attend(q.dtype), want))
    return max(errors), max(own)


def cases() -> Iterator[Case]:
    for dtype, kv_dtype in ((torch.float16, torch.float16), (torch.float16, FP8)):
        yield from layer_cases(dtype, kv_dtype)
        torch.cuda.empty_cache()


def layer_cases(dtype: torch.dtype, kv_dtype: torch.dtype) -> Iterator[Case]:
    suffix = "_fp8_kv" if kv_dtype == FP8 else ""
    layer = make_kv(kv_dtype)
    pools = [count * factor for count in LISTED.values() for factor in FACTORS] + list(LISTED.values())
    steps = make_steps(dtype, tuple(dict.fromkeys(pools)))
    seq_lens, slots, kv = lengths(), rows(), layer.kv
    token_bytes = 2 * HEAD_DIM * NUM_KV_HEADS * BATCH * kv_dtype.itemsize
    yield Case(
        f"dense_decode{suffix}",
        lambda one, launch: dense_attention_triton.dense_decode(
            steps[one].q, layer.page_table, seq_lens, kv=kv, num_kv_heads=NUM_KV_HEADS, sm_scale=SM_SCALE, **launch
        ),
        lambda out: everything(layer, steps[0].q, out),
        tune=getattr(dense_attention_triton, "TUNE", ({},)),
        bytes=token_bytes * SEQ_LEN,
    )
    for tokens, count in LISTED.items():
        yield Case(
            f"sparse_decode_{tokens}{suffix}",
            lambda one, launch, count=count: sparse_decode_triton.sparse_decode(
                steps[one].q, layer.page_table, seq_lens, slots, steps[one].pools[count], kv=kv, **SIZES, **launch
            ),
            lambda out, count=count: attended(layer, steps[0], steps[0].pools[count], count, out),
            tune=getattr(sparse_decode_triton, "TUNE", ({},)),
            bytes=token_bytes * tokens,
        )
        for factor in FACTORS:
            chosen = torch.empty(BATCH, NUM_KV_HEADS, count, dtype=torch.int32, device="cuda")
            size = count * factor
            yield Case(
                f"rerank_decode_{tokens}_pool_{factor}x{suffix}",
                lambda one, launch, count=count, size=size, chosen=chosen: rerank_decode_triton.rerank_decode(
                    steps[one].q, layer.page_table, seq_lens, slots, steps[one].pools[size], chosen,
                    top_k=count, kv=kv, **SIZES, **launch,
                ),
                lambda out, count=count, size=size: attended(layer, steps[0], steps[0].pools[size], count, out),
                tune=getattr(rerank_decode_triton, "TUNE", ({},)),
                bytes=token_bytes * (tokens + tokens * factor - (factor - 1) * (SINK + WINDOW)) / 2,
            )  # fmt: skip
    weights = projections()
    cos, sin = (torch.randn(SEQ_LEN, HEAD_DIM, device="cuda") for _ in range(2))
    bias = torch.zeros(CODE_DIM, device="cuda")
    yield Case(
        f"decode_prepare{suffix}",
        lambda one, launch: decode_prepare_triton.decode_prepare(
            steps[one].qkv, cos, sin, layer.page_table, seq_lens,
            num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, kv_dtype=kv.dtype, page_size=kv.page_size, kv_scale=kv.scale,
            code=CodeWrite(weights["project"], bias, steps[one].summary_table, SLICE), query=weights["query"], **launch,
        ),
        tune=decode_prepare_triton.TUNE,
        sets=SETS,
    )  # fmt: skip
