"""What happens once on a card: kernels compiled in every form that requests will need, decode graphs captured.

Triton compiles a kernel anew for arguments that are 1, multiples of 16, or neither, and libraries choose by sizes. So prompts
are prefilled that begin and end at all such positions, near the start and where selection is at work, over K and V of zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from qsa.kernels.dense_prefill_triton import PIECE_TOKENS
from qsa.kernels.registry import SparseConfig
from qsa.kernels.sparse_prefill import first_sparse_tile
from qsa.memory.layout import sequence_chunks
from qsa.model.batch import Segment
from qsa.model.decode_graph import DecodeSteps
from qsa.model.sampler import SampleRow, sample

if TYPE_CHECKING:
    from qsa.model.gpu_decoder import GpuStageModel

Report = Callable[[int, int, str], None]
SLOT = 0  # of the sequence that is prefilled
MIN_SLICES = 16


def warm_up(model: GpuStageModel, steps: DecodeSteps, prefill_chunk: int, report: Report | None = None) -> None:
    """Run every form of prefill and capture every decode graph; leaves all slots free.

    Args:
        prefill_chunk: most tokens of a prefill segment.
        report:        told steps done, steps in all, and what is being done.

    Raises:
        RuntimeError: a slot is open.
    """
    cache, sparse = model.cache, model.attention.sparse
    if cache.stats().num_sequences:
        raise RuntimeError("a stage is warmed up before its first sequence, but slots are open")
    prompts = {number: _pieces(model, number, prefill_chunk) for number in sparse}
    graphs = [
        (number, size, scans_rare)
        for size in steps.sizes
        for number in sparse
        for scans_rare in model.attention.scan_forms(number)
    ]
    total = sum(map(len, prompts.values())) + len(graphs) + 1
    done = 0

    def step(what: str) -> None:
        nonlocal done
        done += 1
        if report is not None:
            report(done, total, what)

    with torch.inference_mode():
        for number, pieces in prompts.items():
            _prefill(model, number, pieces, step)
        for number, size, scans_rare in graphs:
            steps.capture(number, size, scans_rare)
            step(f"decode, configuration {number}, batch {size}")
        if model.is_last:
            _sample(model)
        step("sampling")
    model.attention.take_stats()
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def _pieces(model: GpuStageModel, number: int, chunk: int) -> list[tuple[int, int]]:
    """Start and end of the chunks to prefill under a configuration, those that the pool has room for."""
    config, most = model.attention.sparse[number], _longest(model, number)
    chunk = min(chunk, most)
    far = max(0, most - chunk) // 16 * 16
    starts, whole, odd = {0, 16, 17, far, far + 1}, {0, far}, set()
    if config.dense:
        whole |= set(range(0, PIECE_TOKENS + 1, chunk))
    else:
        selects, size = _first_that_selects(config), config.block_size_fine
        starts |= {selects - 16, selects - 15, selects, selects + 1}
        whole |= {selects // 16 * 16}
        slices = MIN_SLICES  # choosing among 2^n slices at most is compiled for every n
        while slices * size < most:
            last = slices * size + config.window_size
            odd |= {last, last + 3 * size + 1}
            slices *= 2
    pieces = {(start, start + length) for start in starts for length in (1, 16, 33)}
    pieces |= {(start, start + 33) for start in odd} | {(start, start + chunk) for start in whole} | {(far, far + chunk - 1)}
    return sorted((start, end) for start, end in pieces if 0 <= start < end <= most)


def _first_that_selects(config: SparseConfig) -> int:
    """Position of the first query of a prompt that does not attend to everything."""
    list_size = config.prefill_factor * config.top_k_fine
    return first_sparse_tile(0, config.prefill_tile, config.window_size, config.block_size_fine, list_size)


def _longest(model: GpuStageModel, number: int) -> int:
    """Tokens of the longest sequence of that configuration that an empty pool holds."""
    cache, layout = model.cache, model.attention.summary_layout(number)
    low, high = 0, cache.max_seq_len
    while low < high:
        middle = (low + high + 1) // 2
        fits = sequence_chunks(cache.kv, layout, cache.num_layers, middle) <= cache.pool.num_chunks
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _prefill(model: GpuStageModel, number: int, pieces: Sequence[tuple[int, int]], step: Callable[[str], None]) -> None:
    """Chunks of a sequence of zeros; on the last stage with the logits of their last tokens."""
    attention, cache = model.attention, model.cache
    attention.open(SLOT, number)
    try:
        cache.extend(SLOT, max(end for _, end in pieces))
        for chunks in (cache.page_chunks, cache.summary_chunks):
            owned = chunks[:, SLOT].flatten()
            for part in owned[owned >= 0].split(256):
                cache.pool.buffer.index_fill_(0, part, 0)
        for start, end in pieces:
            segment = Segment(SLOT, start, end, number, True)
            if model.is_first:
                model.forward([segment], torch.zeros(end - start, dtype=torch.int64), None, [end - start - 1])
            else:
                hidden = torch.zeros(end - start, model.spec.hidden_size, dtype=model.dtype)
                model.forward([segment], None, hidden, [end - start - 1])
            step(f"prefill, configuration {number}")
    finally:
        attention.release(SLOT)


def _sample(model: GpuStageModel) -> None:
    """Rows of every kind, alone and together."""
    kinds = [
        SampleRow(temperature=0.0),
        SampleRow(min_p=0.1),
        SampleRow(top_k=20, top_p=0.9, logprobs=5),
        SampleRow(counts=((0, 1),), presence_penalty=1.0, logit_bias=((0, 1.0),)),
    ]
    logits = torch.zeros(len(kinds), model.spec.vocab_size, device=model.device)
    logits[:, 0] = 1.0
    for rows in (kinds, *([kind] for kind in kinds)):
        sample(logits[: len(rows)], rows)
