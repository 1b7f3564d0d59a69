"""A StageAttention over a small cache full of NaN, and sequences of random q, k, v to run through it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from qsa.kernels.registry import SparseConfig
from qsa.kernels.summaries.code import CodeCalibration
from qsa.memory.kv_cache import KVCache
from qsa.memory.layout import KVLayout
from qsa.model.attention import StageAttention
from qsa.model.batch import Segment

FIRST_LAYER, NUM_LAYERS = 2, 2
SMALL = dict(window_size=64, sink_size=16, block_size_coarse=64, block_size_fine=32, top_k_fine=4, prefill_tile=32)


@dataclass
class Sequence:
    """Random q [n, num_q_heads, head_dim], k and v [n, num_kv_heads, head_dim] of each layer."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def random(cls, num_tokens: int, seed: int, dtype: torch.dtype, heads=(9, 3, 64)) -> Sequence:
        rng = torch.Generator().manual_seed(seed)
        num_q_heads, num_kv_heads, head_dim = heads
        shapes = [(NUM_LAYERS, num_tokens, count, head_dim) for count in (num_q_heads, num_kv_heads, num_kv_heads)]
        q, k, v = (torch.randn(shape, generator=rng).to(dtype) for shape in shapes)
        return cls(2 * q, k, v)


def make_attention(
    sparse: Mapping[int, SparseConfig], dtype: torch.dtype, *, heads=(9, 3, 64), max_seq_len=2048, slots=4, backend="torch"
):
    num_q_heads, num_kv_heads, head_dim = heads
    kv = KVLayout(num_kv_heads, head_dim, dtype.itemsize)
    num_chunks = NUM_LAYERS * slots * (kv.num_pages(max_seq_len) + 2)
    cache = KVCache(
        kv,
        dtype,
        num_layers=NUM_LAYERS,
        num_chunks=num_chunks,
        max_sequences=slots,
        max_seq_len=max_seq_len,
        device=torch.device("cpu"),
    )
    cache.pool.buffer.view(torch.bfloat16).fill_(float("nan"))
    width = num_kv_heads * head_dim
    rng = torch.Generator().manual_seed(7)
    directions = torch.linalg.qr(torch.randn(NUM_LAYERS, width, width, generator=rng))[0][:, :, : width // 8].contiguous()
    calibration = CodeCalibration(directions * 30, directions / 30, torch.zeros(NUM_LAYERS, width))
    return StageAttention(
        cache,
        first_layer=FIRST_LAYER,
        num_layers=NUM_LAYERS,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        sm_scale=head_dim**-0.5,
        sparse=sparse,
        calibration=calibration,
        backend=backend,
    )


def run_group(attention: StageAttention, segments: list[Segment], sequences: list[Sequence]) -> torch.Tensor:
    """One group through every layer: [num_layers, num_tokens, num_q_heads, head_dim]."""
    step = attention.prepare(segments)
    outs = []
    for layer in range(NUM_LAYERS):
        q, k, v = (
            torch.cat([getattr(seq, name)[layer, segment.start : segment.end] for segment, seq in zip(segments, sequences)])
            for name in "qkv"
        )
        outs.append(attention.forward(FIRST_LAYER + layer, q, k, v, step).view(q.shape))
    return torch.stack(outs)


def run_prompt(attention, slot, seq, num_tokens, sparse_id, chunk=256) -> torch.Tensor:
    """Prefill tokens [0, num_tokens) in chunks."""
    outs = []
    for start in range(0, num_tokens, chunk):
        segment = Segment(slot, start, min(start + chunk, num_tokens), sparse_id, True)
        outs.append(run_group(attention, [segment], [seq]))
    return torch.cat(outs, 1)


def run_decode(attention, slot, seq, start, end, sparse_id) -> torch.Tensor:
    """Decode tokens [start, end) one by one."""
    steps = [run_group(attention, [Segment(slot, p, p + 1, sparse_id, False)], [seq]) for p in range(start, end)]
    return torch.cat(steps, 1)


def dense_ref(seq: Sequence, layer: int) -> torch.Tensor:
    """Causal attention in the sequence's dtype: [num_tokens, num_q_heads, head_dim]."""
    q, k, v = seq.q[layer], seq.k[layer], seq.v[layer]
    num_tokens, num_q_heads, head_dim = q.shape
    k, v = (t.repeat_interleave(num_q_heads // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * head_dim**-0.5
    hidden = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    return torch.einsum("hts,shd->thd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
