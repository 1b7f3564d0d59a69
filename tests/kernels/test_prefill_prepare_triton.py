"""prefill_prepare against its reference and against decode_prepare, for chunks that begin and end anywhere."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from oracle import assert_matches_oracle
from paged_batch import DEVICES, DTYPES

pytest.importorskip("triton")
from qsa.kernels.decode_prepare_ref import prepare_ref, stored_ref
from qsa.kernels.decode_prepare_triton import decode_prepare
from qsa.kernels.kv_write_triton import CHUNK_BYTES, CodeWrite
from qsa.kernels.pointwise import signed_sine
from qsa.kernels.prefill_prepare_triton import TUNE, prefill_prepare
from qsa.kernels.summaries.code_ref import token_codes_ref
from qsa.model.rope import RopeSpec, rope_table

FLOAT8 = torch.float8_e4m3fn
SHAPES = [  # num_q_heads, num_kv_heads, head_dim, code_dim, page_size, has_norm, start, num_tokens
    (1, 1, 64, 16, 64, False, 0, 1),  # smallest
    (6, 3, 80, 24, 64, True, 50, 117),  # nothing is a power of two; three pages, cut at both ends
    (28, 4, 128, 64, 128, False, 127, 34),  # the 7B shape; the last place of a page
    (5, 5, 96, 160, 32, True, 33, 64),  # no groups; more columns of the code than a program makes; small pages
]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


class Case:
    """Random inputs of a chunk; its pages lie in falling order among pages of NaN, table entries around it are garbage."""

    def __init__(self, shape, dtype, kv_dtype, device):
        torch.manual_seed(0)
        num_q_heads, self.num_kv_heads, self.head_dim, self.code_dim, page_size, has_norm, self.start, n = shape
        width, num_heads = self.num_kv_heads * self.head_dim, num_q_heads + 2 * self.num_kv_heads
        self.num_tokens, self.dtype, self.kv_dtype, self.page_size = n, dtype, kv_dtype, page_size
        self.qkv = torch.randn(n, num_heads * self.head_dim + 64, device=device).to(dtype)[:, :-64]  # rows with a gap
        cos, sin = rope_table(RopeSpec(self.head_dim, kind="linear", factor=2.0), self.start + n)
        self.cos, self.sin = cos.to(device), sin.to(device)
        self.head_norm = 1 + torch.rand(num_heads - self.num_kv_heads, self.head_dim, device=device) if has_norm else None
        self.eps = 0.01 if has_norm else 0.0
        is_float8 = kv_dtype == FLOAT8
        self.kv_scale = torch.rand(self.num_kv_heads, 2, device=device) / 100 + 0.002 if is_float8 else None
        pages = range(self.start // page_size, (self.start + n - 1) // page_size + 1)
        shape = (2 * len(pages) + 1, self.num_kv_heads, 2, page_size, self.head_dim)
        self.pool = torch.full(shape, float("nan"), device=device).to(kv_dtype)
        table = torch.full((pages[-1] + 3,), 8, dtype=torch.int64)  # 8 is no address
        self.places = 2 * (len(pages) - torch.arange(len(pages))) - 1
        table[pages[0] : pages[-1] + 1] = self.pool.data_ptr() + self.places * self.pool[0].nbytes
        self.page_table = table.to(device)
        self.mean, self.project = torch.randn(width), 12 * torch.randn(width, self.code_dim)
        self.store = torch.full((CHUNK_BYTES,), 99, dtype=torch.int8, device=device)
        chunks = torch.tensor([self.store.data_ptr(), 8], device=device)
        self.code = CodeWrite(self.project.to(device), -(self.mean @ self.project).to(device), chunks, 64)
        self.sizes = dict(
            num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, kv_dtype=kv_dtype, page_size=page_size,
            head_norm=self.head_norm, eps=self.eps, kv_scale=self.kv_scale,
        )  # fmt: skip

    def run(self, first=0, last=None, **wanted):
        """prefill_prepare of tokens [first, last) of the chunk."""
        last = self.num_tokens if last is None else last
        start = self.start + first
        sin = signed_sine(self.sin)
        return prefill_prepare(self.qkv[first:last], self.cos, sin, self.page_table, start, **self.sizes, **wanted)

    def reference(self, dtype):
        rows = slice(self.start, None)
        norm = None if self.head_norm is None else self.head_norm.to(dtype)
        sizes = dict(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, head_norm=norm, eps=self.eps)
        return prepare_ref(self.qkv.to(dtype), self.cos[rows].to(dtype), self.sin[rows].to(dtype), **sizes)

    def written(self, pool=None):
        """A view of the chunk's tokens in the pool, as index: [num_tokens, num_kv_heads, 2, head_dim]."""
        pool = self.pool if pool is None else pool
        positions = torch.arange(self.start, self.start + self.num_tokens)
        pages = self.places[positions // self.page_size - self.start // self.page_size]
        return pool.view(torch.uint8)[pages, :, :, positions % self.page_size].view(self.kv_dtype)

    def written_codes(self):
        first = self.start * self.code_dim
        return self.store[first : first + self.num_tokens * self.code_dim].view(self.num_tokens, self.code_dim)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(dtype, dtype) for dtype in DTYPES] + [(torch.float32, torch.float16), (torch.float16, FLOAT8), (torch.float32, FLOAT8)],
    ids=str,
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill_prepare(shape, dtype, kv_dtype, device):
    case = Case(shape, dtype, kv_dtype, device)
    check(case, case.run(code=case.code))


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FLOAT8], ids=str)
@pytest.mark.parametrize("launch", [{}, *TUNE], ids=str)
def test_in_bfloat16(launch, kv_dtype):
    case = Case(SHAPES[2], torch.bfloat16, kv_dtype, "cuda")
    check(case, case.run(code=case.code, **launch))


def check(case, q):
    exact_q, exact_k, exact_v = case.reference(torch.float64)
    peer_q, peer_k, peer_v = case.reference(case.dtype)
    assert q.dtype == case.dtype
    assert_matches_oracle("q", q, exact_q, peer_q)
    k, v = case.written().unbind(2)
    scales = (None, None) if case.kv_scale is None else case.kv_scale.unbind(1)
    for name, found, exact, peer, scale in (("k", k, exact_k, peer_k, scales[0]), ("v", v, exact_v, peer_v, scales[1])):
        exact = exact if scale is None else (exact / scale.double().view(-1, 1)).clamp(-448, 448)
        assert_matches_oracle(name, found.float(), exact, stored_ref(peer, case.kv_dtype, scale).float())
    if case.kv_scale is None:
        assert torch.equal(v, peer_v.to(case.kv_dtype))
    untouched = case.pool.clone()
    positions = torch.arange(case.start, case.start + case.num_tokens)
    pages = case.places[positions // case.page_size - case.start // case.page_size]
    untouched.view(torch.uint8)[pages, :, :, positions % case.page_size] = bits(
        torch.full((), float("nan"), device=q.device).to(case.kv_dtype).expand(case.head_dim)
    )
    assert torch.isnan(untouched.float()).all(), "something else in the pool was written"

    as_coded, tolerance = k, 1e-3
    if case.kv_dtype == FLOAT8:
        as_coded, tolerance = exact_k.to(case.dtype), 0.1  # the key may differ in its last bit
    codes = token_codes_ref(as_coded.double().cpu().flatten(1), case.mean.double(), case.project.double())
    assert (case.written_codes().cpu().double() - codes).abs().max() <= 0.5 + tolerance
    case.written_codes().fill_(99)
    assert (case.store == 99).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_dtype", [torch.float16, FLOAT8], ids=str)
def test_without_codes(kv_dtype, device):
    case = Case(SHAPES[1], torch.float16, kv_dtype, device)
    q = case.run(code=case.code)
    pool = bits(case.pool).clone()
    case.pool.fill_(1)
    case.store.fill_(7)
    assert torch.equal(case.run(), q)
    assert torch.equal(bits(case.written()), bits(case.written(pool.view(case.pool.dtype).view_as(case.pool))))
    assert (case.store == 7).all()


@pytest.mark.parametrize("device", DEVICES)
def test_chunks_make_what_the_whole_makes(device):
    """Wherever a prompt is cut, its tokens' q, K, V and codes are the same bits."""
    case = Case((14, 2, 64, 32, 64, False, 5, 150), torch.float16, torch.float16, device)
    whole, pool, store = case.run(code=case.code), bits(case.pool).clone(), case.store.clone()
    case.pool.fill_(float("nan"))
    case.store.fill_(99)
    cuts = [0, 1, 59, 60, 140, 150]
    pieces = [case.run(first, last, code=case.code) for first, last in pairwise(cuts)]
    assert torch.equal(torch.cat(pieces), whole)
    found = torch.isnan(case.pool) | (bits(case.pool).view(torch.int16) == pool.view(torch.int16)).view_as(case.pool)
    assert found.all() and torch.equal(case.store, store)
    assert not torch.isnan(case.written()).any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_dtype", [torch.float32, FLOAT8], ids=str)
def test_decode_makes_the_same(kv_dtype, device):
    case = Case((6, 3, 80, 24, 64, True, 60, 8), torch.float32, kv_dtype, device)
    q, k = case.run(code=case.code), case.written().clone()
    codes = case.written_codes().clone()
    case.pool.fill_(1)
    case.store.fill_(99)
    n = case.num_tokens
    rows = torch.arange(case.start + 1, case.start + n + 1, dtype=torch.int32, device=device)
    chunks = case.code.summary_table.expand(n, -1)
    code = CodeWrite(case.code.project, case.code.bias, chunks, 64)
    table = case.page_table.expand(n, -1)
    got = decode_prepare(case.qkv, case.cos, signed_sine(case.sin), table, rows, code=code, **case.sizes)
    torch.testing.assert_close(got.q, q, rtol=1e-5, atol=1e-6)
    close = dict(rtol=0.13, atol=0.01) if kv_dtype == FLOAT8 else dict(rtol=1e-5, atol=1e-6)  # a step of float8 is 1/8
    torch.testing.assert_close(case.written().float(), k.float(), **close)
    assert (case.written_codes().int() - codes.int()).abs().max() <= 1
    assert (case.written_codes() == codes).float().mean() > 0.99


@pytest.mark.parametrize("device", DEVICES)
def test_every_number_in_float8(device):
    """V of every float16 there is, stored as float8: torch's cast of what is within +-448, NaN stays NaN."""
    numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16).to(device)
    head_dim, num_kv_heads, page_size = 128, 2, 256
    v = numbers.view(page_size, num_kv_heads * head_dim)
    qkv = torch.cat((torch.zeros_like(v), torch.zeros_like(v), v), 1)
    pool = torch.zeros(1, num_kv_heads, 2, page_size, head_dim, dtype=FLOAT8, device=device)
    cos = torch.ones(page_size, head_dim, device=device)
    table, scale = torch.tensor([pool.data_ptr()], device=device), torch.ones(num_kv_heads, 2, device=device)
    sizes = dict(num_kv_heads=num_kv_heads, head_dim=head_dim, kv_dtype=FLOAT8, page_size=page_size)
    prefill_prepare(qkv, cos, cos, table, 0, kv_scale=scale, block_t=128, **sizes)
    want = stored_ref(v.view(page_size, num_kv_heads, head_dim).float(), FLOAT8)
    got = pool[0, :, 1].transpose(0, 1)
    assert torch.equal(got.float().isnan(), want.float().isnan())
    assert torch.equal(got.float().nan_to_num(9.0), want.float().nan_to_num(9.0))


@pytest.mark.gpu
def test_offsets_beyond_two_billion():
    """The last tokens of a chunk of more than 2^31 numbers, all of whose pages are one page."""
    n, head_dim = (1 << 31) // (40 * 64) + 100, 64
    qkv = torch.zeros(n, 40 * head_dim, dtype=torch.float16, device="cuda")
    qkv[-64:] = torch.randn(64, 40 * head_dim, device="cuda").half()
    pool = torch.zeros(1, 4, 2, 64, head_dim, dtype=torch.float16, device="cuda")
    cos, sin = (part.cuda() for part in rope_table(RopeSpec(head_dim), n))
    table = torch.full((n // 64 + 1,), pool.data_ptr(), dtype=torch.int64, device="cuda")
    sizes = dict(num_kv_heads=4, head_dim=head_dim)
    q = prefill_prepare(qkv, cos, signed_sine(sin), table, 0, kv_dtype=torch.float16, page_size=64, **sizes)
    args = qkv[-64:], cos[-64:], sin[-64:]
    exact, peer = prepare_ref(*(arg.double() for arg in args), **sizes)[0], prepare_ref(*args, **sizes)[0]
    assert_matches_oracle("q", q[-64:], exact, peer)


def test_what_does_not_fit_is_named():
    case = Case(SHAPES[0], torch.float16, torch.float16, "cpu")
    case.start = 1
    with pytest.raises(ValueError, match="cos has 1 positions, but 1 to 2 are wanted"):
        case.run()
