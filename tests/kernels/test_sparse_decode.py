"""sparse_decode against its reference: what is chosen, what is attended, what is never read."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_matches_oracle
from paged_kv import make_sequence

from qsa.kernels.paged_rows import SliceRows
from qsa.kernels.sparse_decode import mask_rows, plan_near, sparse_decode
from qsa.kernels.sparse_decode_ref import rerank_ref, sparse_decode_ref

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [  # num_q_heads, num_kv_heads, head_dim, seq_len
    (9, 3, 64, 2613),  # the default model, the window cuts a slice
    (7, 1, 80, 1700),  # head_dim is not a power of two
    (2, 2, 128, 2048),  # window begins at a slice's border
]


def run(q, seq, pool, *, top_k, slice_size=64, sink_size=32, window_size=512):
    """sparse_decode of one sequence, with the row numbers worked out here."""
    rows = SliceRows(seq.pages, slice_size)
    bases = rows.bases(torch.tensor(seq.chunks))
    num_kv_heads, seq_len, head_dim = seq.k.shape
    plan = plan_near(
        [seq_len],
        window_size=window_size,
        sink_size=sink_size,
        slice_size=slice_size,
        pool_size=pool.shape[1],
        num_q_heads=len(q),
        num_kv_heads=num_kv_heads,
    )
    num_near = plan.slices.shape[1]
    slices = torch.cat((plan.slices.expand(len(pool), -1), pool.clamp(min=0)), 1)
    key_rows = (bases[slices].expand(num_kv_heads, -1) + rows.head_offsets.view(-1, 1)).unsqueeze(0)
    masked = torch.cat((torch.arange(num_near).expand(len(pool), -1), mask_rows(pool, num_near)), 1).unsqueeze(0)
    out, places = sparse_decode(q.unsqueeze(0), rows, key_rows, masked, plan, top_k, head_dim**-0.5)
    return out[0], pool if places is None else pool.gather(1, places[0])


def reference(q, k, v, pool, *, top_k, slice_size=64, sink_size=32, window_size=512):
    sizes = dict(slice_size=slice_size, sink_size=sink_size, window_size=window_size)
    return sparse_decode_ref(q, k, v, pool, top_k=top_k, sm_scale=q.shape[-1] ** -0.5, **sizes)


def random_pool(lists, num_candidates, size):
    pool = torch.full((lists, size), -1)
    for row in pool:
        count = min(size, num_candidates)
        row[:count] = torch.randperm(num_candidates)[:count].sort().values
    return pool


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("per_layer", [False, True], ids=["kv_head", "layer"])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim", "seq_len"), SHAPES)
def test_chooses_and_attends_like_the_reference(num_q_heads, num_kv_heads, head_dim, seq_len, per_layer, dtype):
    torch.manual_seed(0)
    seq = make_sequence(seq_len, num_kv_heads, head_dim, dtype)
    q = (2 * torch.randn(num_q_heads, head_dim)).to(dtype)
    pool = random_pool(1 if per_layer else num_kv_heads, -(-(seq_len - 512) // 64), 16)

    got, chosen = run(q, seq, pool, top_k=5)

    oracle, want, _ = reference(q.double(), seq.k.double(), seq.v.double(), pool, top_k=5)
    assert torch.equal(chosen, want)
    peer, _, _ = reference(q, seq.k, seq.v, chosen, top_k=5)
    assert_matches_oracle("out", got, oracle, peer)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_geometry(dtype):
    """Slices of 32, list of 16 from a pool of 64, window 256, sink 32."""
    torch.manual_seed(0)
    seq = make_sequence(3001, 3, 64, dtype, slice_size=32)
    q = (2 * torch.randn(9, 64)).to(dtype)
    pool = random_pool(3, -(-(3001 - 256) // 32), 64)
    sizes = dict(top_k=16, slice_size=32, window_size=256)
    got, chosen = run(q, seq, pool, **sizes)
    oracle, want, attended = reference(q.double(), seq.k.double(), seq.v.double(), pool, **sizes)
    assert torch.equal(chosen, want) and all(len(tokens) <= 32 + 16 * 32 + 256 for tokens in attended)
    assert_matches_oracle("out", got, oracle, reference(q, seq.k, seq.v, chosen, **sizes)[0])


def test_covering_pool_equals_dense():
    torch.manual_seed(0)
    seq = make_sequence(1500, 2, 64, torch.float32)
    q = torch.randn(6, 64)
    pool = torch.arange(16).expand(2, 16)  # all 988 tokens before the window
    got, _ = run(q, seq, pool, top_k=16)
    dense = torch.nn.functional.scaled_dot_product_attention(q.view(2, 3, 64), seq.k, seq.v).view(6, 64)
    torch.testing.assert_close(got, dense, rtol=0, atol=2e-6)


def test_window_and_sink_are_attended_and_no_token_twice():
    """With V one-hot in position modulo 64 and equal scores, every token weighs the same: count them."""
    seq = make_sequence(1300, 1, 64, torch.float32)
    for page, chunk in enumerate(seq.chunks):
        seq.pages[chunk, 0, 0] = 0.0
        seq.pages[chunk, 0, 1] = torch.eye(64).repeat(seq.pages.shape[3] // 64, 1)
        assert page == 0
    # slice 0 overlaps the sink (32 tokens), slice 12 is cut by the window start 1300 - 512 = 788 (20 tokens are far)
    got, chosen = run(torch.zeros(1, 64), seq, torch.tensor([[0, 12, -1, -1]]), top_k=2)
    assert chosen.tolist() == [[0, 12]]
    count = 64 + 20 + 512  # slice 0 once with the sink, the far part of slice 12, the window
    expected = torch.zeros(64)
    for token in [*range(64), *range(768, 788), *range(788, 1300)]:
        expected[token % 64] += 1
    torch.testing.assert_close(got[0] * count, expected, rtol=0, atol=1e-4)


def test_padded_pool_gives_a_padded_list():
    seq = make_sequence(1300, 1, 64, torch.float32)
    _, chosen = run(torch.randn(1, 64), seq, torch.tensor([[3, 7, -1, -1, -1, -1]]), top_k=4)
    assert chosen.tolist() == [[3, 7, -1, -1]]


def test_unwritten_pages_are_never_read():
    """The pool's other chunks are NaN, and so is everything behind the sequence's last slice."""
    torch.manual_seed(0)
    seq = make_sequence(1537, 2, 64, torch.bfloat16)  # one token in its last slice
    assert torch.isnan(seq.pages).any()
    got, _ = run(torch.randn(4, 64).bfloat16(), seq, random_pool(2, 17, 12), top_k=4)
    assert torch.isfinite(got).all()


def test_nearly_tied_slices_need_float32():
    """Slices whose scores differ by less than float16 or bfloat16 logits can say: the reference in float64 agrees with us."""
    torch.manual_seed(0)
    seq = make_sequence(2048, 1, 64, torch.bfloat16)
    direction = torch.zeros(64).bfloat16()
    direction[:2] = 1.0
    for index in range(16):  # one key a slice at q.k = 32 + index / 1024; there bfloat16 steps by 1/4, float16 by 1/32
        keys = torch.zeros(64, 64).bfloat16()
        keys[:, 0], keys[:, 1] = 32.0, index / 1024
        seq.k[0, index * 64 : (index + 1) * 64] = keys
        seq.pages[seq.chunks[0], 0, 0, index * 64 : (index + 1) * 64] = keys
    q = direction.view(1, 64)
    pool = torch.arange(16).view(1, 16)
    best = [12, 13, 14, 15]

    _, chosen = run(q, seq, pool, top_k=4)
    assert chosen[0].tolist() == best

    exact = rerank_ref(q.double()[None], seq.k.double(), list(range(16)), 4, 0.125, 64, 0, 1536)
    assert exact == best
    for narrow in (torch.float16, torch.bfloat16):
        logits = (q.to(narrow) @ seq.k[0, :1024].to(narrow).T).view(16, 64)
        assert sorted(torch.logsumexp(logits.float(), -1).argsort(descending=True, stable=True)[:4].tolist()) != best


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_outvoted_head_attends_to_what_was_chosen(dtype):
    """One head has all its mass, 200 nats above the rest, in a slice that three others leave out: no 0 / 0."""
    torch.manual_seed(0)
    seq = make_sequence(1300, 1, 64, dtype)
    for slice_index, channel in ((5, 0), (7, 1)):
        keys = torch.zeros(64, 64).to(dtype)
        keys[:, channel] = 40.0
        tokens = slice(slice_index * 64, (slice_index + 1) * 64)
        seq.k[0, tokens] = seq.pages[seq.chunks[0], 0, 0, tokens] = keys
    q = torch.zeros(4, 64).to(dtype)
    q[0, 0], q[1:, 1] = 40.0, 40.0

    pool = torch.tensor([[2, 5, 7]])
    got, chosen = run(q, seq, pool, top_k=1)

    assert chosen.tolist() == [[7]]
    oracle, _, _ = reference(q.double(), seq.k.double(), seq.v.double(), pool, top_k=1)
    assert_matches_oracle("out", got, oracle, reference(q, seq.k, seq.v, chosen, top_k=1)[0])
