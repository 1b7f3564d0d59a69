"""Cases of prefill attention: the sparse kernel on 8192 queries at the end of 262144 tokens, and the dense baseline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu_cases import Case, relative_error
from benchmarks.gpu_inputs import (
    FP8,
    GROUP,
    HEAD_DIM,
    NUM_KV_HEADS,
    NUM_Q_HEADS,
    SEQ_LEN,
    SLICE,
    SM_SCALE,
    WINDOW,
    LayerKV,
    make_kv,
)
from qsa.kernels.dense_prefill_triton import TUNE as DENSE_TUNE
from qsa.kernels.dense_prefill_triton import dense_prefill
from qsa.kernels.sparse_prefill_triton import TUNE, sparse_prefill

CHUNK, TILE, SETS = 8192, 128, 2
START = SEQ_LEN - CHUNK
CHECKED = ((0, 0), (31, 13), (63, 27))  # tile and query head


def make_lists(tokens: int) -> list[torch.Tensor]:
    """Random lists of every tile: with slice 0 and the window as many tokens as asked for."""
    count = (tokens - SLICE - WINDOW) // SLICE
    before = (START + 1 - WINDOW) // SLICE  # slices that are candidates of the first tile
    shape = (CHUNK // TILE, NUM_KV_HEADS, before - 1)
    return [
        (torch.rand(shape, device="cuda").argsort(-1)[..., :count] + 1).sort(-1).values.int().contiguous() for _ in range(SETS)
    ]


def useful_flops(tokens: int) -> float:
    return 4.0 * NUM_Q_HEADS * HEAD_DIM * CHUNK * tokens


def expected(
    q: torch.Tensor, keys: tuple[torch.Tensor, torch.Tensor], lists: torch.Tensor, tile: int, head: int
) -> torch.Tensor:
    """Attention of one tile and head in the type of the keys, from the definition of the attended set."""
    k, v = (part[head // GROUP] for part in keys)
    first = START + tile * TILE
    window = (first + 1 - WINDOW) // SLICE
    slices = torch.cat((torch.zeros_like(lists[tile, 0, :1]), lists[tile, head // GROUP]))
    far = (slices.long()[:, None] * SLICE + torch.arange(SLICE, device="cuda")).flatten()
    tokens = torch.cat((far, torch.arange(window * SLICE, first + TILE, device="cuda")))
    logits = q[tile * TILE : (tile + 1) * TILE, head].to(k.dtype) @ k[tokens].T * SM_SCALE
    hidden = tokens[None, :] > torch.arange(first, first + TILE, device="cuda")[:, None]
    return torch.softmax(logits.float().masked_fill(hidden, -torch.inf), -1).to(k.dtype) @ v[tokens]


def check_sparse(q: torch.Tensor, layer: LayerKV, lists: torch.Tensor, out: torch.Tensor) -> tuple[float, float]:
    exact = layer.keys(0)
    rounded = tuple(part.to(q.dtype) for part in exact)
    errors, own = [], []
    for tile, head in CHECKED:
        want = expected(q, exact, lists, tile, head)
        errors.append(relative_error(out[tile * TILE : (tile + 1) * TILE, head], want))
        own.append(relative_error(expected(q, rounded, lists, tile, head), want))  # type: ignore[arg-type]
    return max(errors), max(own)


def check_dense(q: torch.Tensor, layer: LayerKV, out: torch.Tensor) -> tuple[float, float]:
    errors, own = [], []
    exact = layer.keys(0)
    for head in (0, 27):
        k, v = (part[head // GROUP] for part in exact)
        rows = torch.tensor([0, 1, 127, 4096, 8191], device="cuda")
        hidden = torch.arange(SEQ_LEN, device="cuda")[None, :] > START + rows[:, None]

        def attend(type_: torch.dtype, k: torch.Tensor = k, v: torch.Tensor = v, head: int = head) -> torch.Tensor:
            logits = (q[rows, head].to(type_) @ k.to(type_).T * SM_SCALE).double().masked_fill(hidden, -torch.inf)  # noqa: B023
            return torch.softmax(logits, -1).to(type_) @ v.to(type_)

        want = attend(torch.float64)
        errors.append(relative_error(out[rows, head], want))
        own.append(relative_error(attend(q.dtype), want))
    return max(errors), max(own)


def cases() -> Iterator[Case]:
    for dtype, kv_dtype in ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (torch.float16, FP8)):
        layer = make_kv(kv_dtype, batch=1)
        q = [torch.randn(CHUNK, NUM_Q_HEADS, HEAD_DIM, device="cuda").to(dtype) for _ in range(SETS)]
        sizes: dict[str, Any] = dict(
            first=START, start=START, end=SEQ_LEN, tile_size=TILE, num_kv_heads=NUM_KV_HEADS, slice_size=SLICE
        )
        sizes.update(window_size=WINDOW, sm_scale=SM_SCALE, kv=layer.kv, pool=layer.pool)
        name = "fp8_kv" if kv_dtype == FP8 else str(dtype).removeprefix("torch.")
        for tokens in (4096, 8192):
            lists = make_lists(tokens)
            yield Case(
                f"sparse_prefill_{tokens}_{name}",
                lambda one, launch, lists=lists, q=q, sizes=sizes, layer=layer: sparse_prefill(
                    q[one], layer.page_table[0], lists[one], **sizes, **launch
                ),
                lambda out, lists=lists, q=q, layer=layer: check_sparse(q[0], layer, lists[0], out),
                tune=TUNE if tokens == 4096 else ({}, *TUNE),
                flops=useful_flops(tokens),
                graph=False,
                sets=SETS,
            )
        if dtype == kv_dtype:
            yield Case(
                f"dense_prefill_{name}",
                lambda one, launch, q=q, layer=layer: dense_prefill(
                    q[one],
                    layer.page_table[0],
                    start=START,
                    end=SEQ_LEN,
                    num_kv_heads=NUM_KV_HEADS,
                    sm_scale=SM_SCALE,
                    kv=layer.kv,
                    **launch,
                ),
                lambda out, q=q, layer=layer: check_dense(q[0], layer, out),
                tune=DENSE_TUNE,
                flops=useful_flops(SEQ_LEN - CHUNK // 2),
                graph=False,
                sets=1,
            )
