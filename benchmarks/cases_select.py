"""Cases of selection on a card: the scan of codes and the choice, for a decode step of 8 sequences and for a prefill chunk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu_cases import SETS, Case
from benchmarks.gpu_inputs import (
    BATCH,
    CHUNK_BYTES,
    CODE_DIM,
    GROUP,
    HEAD_DIM,
    NUM_CANDIDATES,
    NUM_KV_HEADS,
    NUM_Q_HEADS,
    NUM_SLICES,
    SEQ_LEN,
    SINK,
    SLICE,
    SM_SCALE,
    SUMMARY_CHUNKS,
    WINDOW,
    far_slices,
    lengths,
    make_kv,
    make_steps,
    projections,
    rows,
)
from qsa.kernels import block_select_triton, pointwise_triton
from qsa.kernels.block_select_ref import block_select_ref
from qsa.kernels.block_select_triton import select_decode, select_tiles
from qsa.kernels.paged_kv import DecodeInputs
from qsa.kernels.selection_figures_triton import selection_figures
from qsa.kernels.summaries import sketch_triton, vectors_triton
from qsa.kernels.summaries.code_ref import code_scan_ref
from qsa.kernels.summaries.code_rows_triton import TUNE_ROWS, quantise_queries, scan_code_rows
from qsa.kernels.summaries.code_triton import TUNE_SCAN, scan_codes
from qsa.kernels.summaries.make import make_summary

CHUNK, TILE = 8192, 128
POOLS = (far_slices(4096), 2 * far_slices(4096), 4 * far_slices(4096), 4 * far_slices(8192))
HIDDEN, INTERMEDIATE = 3584, 18944


def decode() -> Iterator[Case]:
    steps, seq_lens, slots = make_steps(torch.float16, ()), lengths(), rows()
    query = projections()["query"]
    numbers = [quantise_queries(step.q, query) for step in steps]
    due, not_due = torch.ones(BATCH, dtype=torch.int32, device="cuda"), torch.zeros(BATCH, dtype=torch.int32, device="cuda")
    sizes: dict[str, Any] = dict(max_slices=NUM_SLICES, slice_size=SLICE, sink_size=SINK, window_size=WINDOW, sm_scale=SM_SCALE)

    def scan(one: int, launch: dict[str, Any], due: torch.Tensor = due) -> torch.Tensor:
        return scan_codes(*numbers[one], steps[one].summary_table, seq_lens, due, **sizes, **launch)

    def check_scan(out: torch.Tensor) -> tuple[float, float]:
        worst = 0.0
        for row in (0, BATCH - 1):
            places = (steps[0].summary_table[row] - steps[0].codes.data_ptr()) // (1 << 20)
            codes = steps[0].codes[places].view(SEQ_LEN, CODE_DIM).double()
            found, scales = (part[row].double() for part in numbers[0])
            want = code_scan_ref(found, scales * SM_SCALE, codes, SLICE, SINK, SEQ_LEN - WINDOW)
            seen = want > -torch.inf
            got = out[row, :, :NUM_CANDIDATES].double()[seen]
            worst = max(worst, float((got - want[seen]).abs().max() / want[seen].abs().max()))
        return worst, 1e-6

    yield Case("code_scan", scan, check_scan, tune=TUNE_SCAN, bytes=BATCH * (SEQ_LEN - WINDOW) * CODE_DIM)
    yield Case("code_scan_nothing_due", lambda one, launch: scan(one, launch, not_due))
    scores = [scan(one, {}) for one in range(SETS)]
    for count in POOLS:
        pools = torch.empty(BATCH, NUM_KV_HEADS, count, dtype=torch.int32, device="cuda")
        edges = torch.empty(BATCH, NUM_KV_HEADS, 2, device="cuda")

        def select(
            one: int, launch: dict[str, Any], pools: torch.Tensor = pools, edges: torch.Tensor = edges, due: torch.Tensor = due
        ) -> torch.Tensor:
            select_decode(
                scores[one], seq_lens, due, slots, pools, edges,
                num_kv_heads=NUM_KV_HEADS, slice_size=SLICE, window_size=WINDOW, **launch,
            )  # fmt: skip
            return pools

        def check(out: torch.Tensor, count: int = count) -> tuple[float, float]:
            shape = (BATCH, NUM_KV_HEADS, GROUP, NUM_CANDIDATES)
            want = block_select_ref(scores[0][:, :, :NUM_CANDIDATES].reshape(shape).cpu(), count)
            same = (out.cpu().unsqueeze(-1) == want.unsqueeze(-2)).any(-1)
            return 1 - float(same.float().mean()), 0.001  # shares that differ in their last bits only

        yield Case(f"select_decode_{count}", select, check, tune=block_select_triton.TUNE_DECODE)
        if count == POOLS[-1]:
            yield Case("select_decode_nothing_due", lambda one, launch, select=select: select(one, launch, due=not_due))
    chosen = torch.randint(0, 4000, (28, BATCH, NUM_KV_HEADS, POOLS[0]), dtype=torch.int32, device="cuda")
    edges = torch.rand(28, BATCH, NUM_KV_HEADS, 2, device="cuda")
    yield Case(
        "selection_figures_28_layers",
        lambda one, launch: selection_figures(
            chosen, chosen.clone(), edges, slots, seq_lens, sink_size=SINK, slice_size=SLICE, window_size=WINDOW
        ),
    )


def other_summaries() -> Iterator[Case]:
    """The scans of what `code` is measured against, of summaries made from K by their own operators."""
    layer, seq_lens = make_kv(torch.float16), lengths()
    q = [torch.randn(BATCH, NUM_Q_HEADS, HEAD_DIM, device="cuda").half() for _ in range(SETS)]
    due = torch.ones(BATCH, dtype=torch.int32, device="cuda")
    for name, tune in (
        ("sketch", sketch_triton.TUNE_SCAN),
        ("minmax", vectors_triton.TUNE_SCAN),
        ("mean", vectors_triton.TUNE_SCAN),
    ):
        summary = make_summary(name, NUM_KV_HEADS, HEAD_DIM, SLICE, None, "triton")
        chunks = -(-NUM_SLICES // summary.chunk_slices)  # type: ignore[attr-defined]
        store = torch.zeros(BATCH * chunks, CHUNK_BYTES, dtype=torch.uint8, device="cuda")
        table = store.data_ptr() + torch.randperm(len(store), device="cuda").view(BATCH, chunks) * CHUNK_BYTES
        for row in range(BATCH):
            summary.update(0, layer.page_table[row], table[row], 0, NUM_SLICES, layer.kv)
        sizes: dict[str, Any] = dict(max_slices=NUM_SLICES, sink_size=SINK, window_size=WINDOW, sm_scale=SM_SCALE)
        yield Case(
            f"{name}_scan",
            lambda one, launch, summary=summary, table=table, sizes=sizes: summary.scan(
                0, DecodeInputs(q[one]), table, seq_lens, due, **sizes, **launch
            ),
            tune=tune,
            bytes=BATCH * NUM_SLICES * summary.slice_bytes,
        )


def prefill() -> Iterator[Case]:
    tiles = CHUNK // TILE
    query = projections()["query"]
    codes = torch.randint(-127, 128, (SUMMARY_CHUNKS, 1 << 20), dtype=torch.int8, device="cuda")
    table = codes.data_ptr() + torch.randperm(SUMMARY_CHUNKS, device="cuda") * (1 << 20)
    for samples in (1, 2, 4):
        q = torch.randn(tiles * samples, NUM_Q_HEADS, HEAD_DIM, device="cuda").half()
        found = quantise_queries(q, query)
        for tokens in (SEQ_LEN // 2, SEQ_LEN):
            sizes: dict[str, Any] = dict(num_slices=tokens // SLICE, slice_size=SLICE, sm_scale=SM_SCALE)

            def scan(one: int, launch: dict[str, Any], found: Any = found, sizes: Any = sizes) -> torch.Tensor:
                return scan_code_rows(*found, table, **sizes, **launch)

            yield Case(
                f"prefill_scan_{samples}_of_{tokens}",
                scan,
                tune=TUNE_ROWS if tokens == SEQ_LEN and samples == 2 else ({},),
                flops=2.0 * tiles * samples * NUM_Q_HEADS * tokens * CODE_DIM,
                graph=False,
                sets=1,
            )
            scores = scan(0, {}).view(tiles, samples, NUM_Q_HEADS, -1)
            weights = torch.ones(tiles, samples, device="cuda")
            ends = torch.full((tiles,), tokens // SLICE - 10, dtype=torch.int32, device="cuda")

            def choose(one: int, launch: dict[str, Any], given: Any = (scores, weights, ends)) -> torch.Tensor:
                return select_tiles(*given, far_slices(4096), num_kv_heads=NUM_KV_HEADS, **launch)

            yield Case(
                f"select_tiles_{samples}_of_{tokens}",
                choose,
                tune=block_select_triton.TUNE_TILES if tokens == SEQ_LEN and samples == 2 else ({},),
                bytes=scores.nbytes,
                graph=False,
                sets=1,
            )


def pointwise() -> Iterator[Case]:
    x = torch.randn(8, HIDDEN, device="cuda").bfloat16()
    weight = torch.ones(HIDDEN, device="cuda").bfloat16()
    parts = torch.randn(4, 8, HIDDEN, device="cuda")
    yield Case("add_rms_norm_8", lambda one, launch: pointwise_triton.add_rms_norm(x, parts, weight, 1e-6, **launch))
    rows_ = torch.randn(CHUNK, HIDDEN, device="cuda").bfloat16()
    added = torch.randn(CHUNK, HIDDEN, device="cuda").bfloat16()
    yield Case(
        "add_rms_norm_8192",
        lambda one, launch: pointwise_triton.add_rms_norm(rows_, added, weight, 1e-6, **launch),
        bytes=4 * rows_.nbytes,
    )
    wide = torch.randn(CHUNK, 2 * INTERMEDIATE, device="cuda").bfloat16()
    yield Case(
        "silu_multiply_8192",
        lambda one, launch: pointwise_triton.silu_multiply(wide, **launch),
        bytes=1.5 * wide.nbytes,
        sets=1,
    )


def cases() -> Iterator[Case]:
    yield from decode()
    yield from other_summaries()
    yield from prefill()
    yield from pointwise()
