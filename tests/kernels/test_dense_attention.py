"""Dense attention over pages, decode and prefill, against plain softmax attention in float64."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_matches_oracle
from paged_kv import make_sequence

from qsa.kernels.dense_attention import dense_decode, dense_prefill, gather_tokens
from qsa.kernels.dense_attention_ref import dense_attention_ref

SHAPES = [  # num_q_heads, num_kv_heads, head_dim, seq_len
    (1, 1, 64, 1),  # smallest
    (9, 3, 64, 2100),  # the default model, three pages
    (7, 1, 80, 1025),  # head_dim is not a power of two
    (4, 4, 128, 600),  # no groups
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim", "seq_len"), SHAPES)
def test_dense_decode(num_q_heads, num_kv_heads, head_dim, seq_len, dtype):
    torch.manual_seed(0)
    seq = make_sequence(seq_len, num_kv_heads, head_dim, dtype)
    q = torch.randn(1, num_q_heads, head_dim).to(dtype)
    sm_scale = head_dim**-0.5

    got = dense_decode(q[0], seq.pages, seq.chunks, seq_len, sm_scale)

    oracle = dense_attention_ref(q.double(), seq.k.double(), seq.v.double(), sm_scale, seq_len - 1)[0]
    assert_matches_oracle("out", got, oracle, dense_attention_ref(q, seq.k, seq.v, sm_scale, seq_len - 1)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim", "seq_len"), SHAPES)
@pytest.mark.parametrize("num_tokens", [1, 70, 10_000])  # one query, a chunk, everything
def test_dense_prefill(num_q_heads, num_kv_heads, head_dim, seq_len, num_tokens, dtype):
    torch.manual_seed(0)
    num_tokens = min(num_tokens, seq_len)
    seq = make_sequence(seq_len, num_kv_heads, head_dim, dtype)
    q = torch.randn(num_tokens, num_q_heads, head_dim).to(dtype)
    sm_scale = head_dim**-0.5

    k, v = gather_tokens(seq.pages, seq.chunks, seq_len)
    got = dense_prefill(q, k, v, sm_scale)

    assert torch.equal(k, seq.k) and torch.equal(v, seq.v)
    first = seq_len - num_tokens
    oracle = dense_attention_ref(q.double(), seq.k.double(), seq.v.double(), sm_scale, first)
    assert_matches_oracle("out", got, oracle, dense_attention_ref(q, seq.k, seq.v, sm_scale, first))
