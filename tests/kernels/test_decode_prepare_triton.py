"""decode_prepare against its reference: queries, K and V through page addresses, codes, numbers; nothing else is touched."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_matches_oracle
from paged_batch import DEVICES, DTYPES, make_batch

pytest.importorskip("triton")
from qsa.kernels.decode_prepare_ref import prepare_ref, query_directions_ref, stored_ref
from qsa.kernels.decode_prepare_triton import decode_prepare
from qsa.kernels.kv_write_triton import CHUNK_BYTES, CodeWrite, slices_per_chunk
from qsa.kernels.pointwise import signed_sine
from qsa.kernels.summaries.code_ref import token_codes_ref
from qsa.model.rope import RopeSpec, rope_table

SHAPES = [  # num_q_heads, num_kv_heads, head_dim, code_dim, has_norm, seq_lens
    (1, 1, 64, 8, False, [1]),  # smallest
    (6, 3, 80, 24, True, [129, 0, 300]),  # nothing is a power of two; a row that writes nothing
    (28, 4, 128, 64, False, [128, 257]),  # the 7B shape; the last place of a page, the first of the next
    (5, 5, 96, 60, True, [40]),  # no groups, more KV heads than are multiplied at a time
]
MIXED = [(torch.float16, torch.float32), (torch.float32, torch.float16), (torch.bfloat16, torch.bfloat16)]
FLOAT8 = [(dtype, torch.float8_e4m3fn) for dtype in (torch.float16, torch.float32, torch.bfloat16)]


def tables(head_dim: int, max_len: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain cosines and sines of every position."""
    cos, sin = rope_table(RopeSpec(head_dim, kind="linear", factor=2.0), max_len)
    return cos.to(device), sin.to(device)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


class Case:
    """Random inputs of a step, and where its codes go: one summary chunk a sequence, every second one of a store."""

    def __init__(self, shape, dtype, kv_dtype, device):
        torch.manual_seed(0)
        self.num_q_heads, self.num_kv_heads, self.head_dim, self.code_dim, has_norm, self.seq_lens = shape
        batch, width = len(self.seq_lens), self.num_kv_heads * self.head_dim
        self.batch = make_batch(self.seq_lens, self.num_kv_heads, self.head_dim, kv_dtype, device)
        num_numbers = (self.num_q_heads + 2 * self.num_kv_heads) * self.head_dim
        self.qkv = torch.randn(batch, num_numbers + 64, device=device).to(dtype)[:, :num_numbers]  # rows with a gap
        self.cos, self.sin = tables(self.head_dim, 512, device)
        self.head_norm = 1 + torch.rand(self.num_q_heads + self.num_kv_heads, self.head_dim, device=device)
        self.eps = 0.01
        if not has_norm:
            self.head_norm, self.eps = None, 0.0
        self.kv_scale = torch.rand(self.num_kv_heads, 2, device=device) / 100 + 0.002  # some numbers saturate
        if kv_dtype != torch.float8_e4m3fn:
            self.kv_scale = None
        self.mean = torch.randn(width)
        self.project = 12 * torch.randn(width, self.code_dim)  # some numbers are beyond 127
        self.query = torch.randn(self.num_kv_heads, self.head_dim, self.code_dim, device=device)
        self.store = torch.full((2 * batch, CHUNK_BYTES), 99, dtype=torch.int8, device=device)
        self.chunks = torch.arange(batch) * 2 + 1
        table = self.store.data_ptr() + torch.stack((self.chunks, self.chunks * 0), 1).to(device) * CHUNK_BYTES
        self.code = CodeWrite(self.project.to(device), -(self.mean @ self.project).to(device), table, 64)
        self.dtype, self.kv_dtype = dtype, kv_dtype
        self.real = [row for row, seq_len in enumerate(self.seq_lens) if seq_len]

    def run(self, rows=slice(None), **wanted):
        code = wanted.get("code")
        if code is not None:
            wanted["code"] = CodeWrite(code.project, code.bias, code.summary_table[rows], code.slice_size)
        return decode_prepare(
            self.qkv[rows],
            self.cos,
            signed_sine(self.sin),
            self.batch.page_table[rows],
            self.batch.seq_lens[rows],
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            kv_dtype=self.kv_dtype,
            page_size=self.batch.page_size,
            head_norm=self.head_norm,
            eps=self.eps,
            kv_scale=self.kv_scale,
            **wanted,
        )

    def reference(self, dtype):
        """q, k, v of the rows that are used."""
        positions = torch.tensor([self.seq_lens[row] - 1 for row in self.real], device=self.cos.device)
        norm = None if self.head_norm is None else self.head_norm.to(dtype)
        sizes = dict(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, head_norm=norm, eps=self.eps)
        return prepare_ref(self.qkv[self.real].to(dtype), self.cos[positions].to(dtype), self.sin[positions].to(dtype), **sizes)

    def place(self, row):
        """The page of a sequence's last token in the pool, and the token's place there."""
        position = self.seq_lens[row] - 1
        page = int(self.batch.page_table[row, position // self.batch.page_size]) - self.batch.pool.data_ptr()
        return page // self.batch.pool[0].nbytes, position % self.batch.page_size


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "kv_dtype"), [(dtype, dtype) for dtype in DTYPES] + MIXED + FLOAT8, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_prepare(shape, dtype, kv_dtype, device):
    case = Case(shape, dtype, kv_dtype, device)
    pool, store = case.batch.pool.clone(), case.store.clone()

    got = case.run(code=case.code, query=case.query)

    exact_q, exact_k, exact_v = case.reference(torch.float64)
    peer_q, peer_k, peer_v = case.reference(dtype)
    real = case.real
    assert got.q.dtype == dtype
    assert_matches_oracle("q", got.q[real], exact_q, peer_q)

    stored = []
    for row in real:
        page, offset = case.place(row)
        stored.append(case.batch.pool[page, :, :, offset])  # [num_kv_heads, 2, head_dim]
        pool[page, :, :, offset] = stored[-1]
    assert torch.equal(bits(case.batch.pool), bits(pool)), "something else in the pool was written"
    k, v = torch.stack([bits(part) for part in stored]).view(kv_dtype).unbind(2)
    scales = (None, None) if case.kv_scale is None else case.kv_scale.unbind(1)
    for name, found, exact, peer, scale in (("k", k, exact_k, peer_k, scales[0]), ("v", v, exact_v, peer_v, scales[1])):
        exact = exact if scale is None else (exact / scale.double().view(-1, 1)).clamp(-448, 448)
        assert_matches_oracle(name, found.float(), exact, stored_ref(peer, kv_dtype, scale).float())
    if case.kv_scale is None:
        assert torch.equal(v, peer_v.to(kv_dtype))

    as_coded, tolerance = k, 1e-3
    if kv_dtype == torch.float8_e4m3fn:
        as_coded, tolerance = exact_k.to(dtype), 0.1  # the key may differ in its last bit
        if dtype == torch.bfloat16 and device == "cpu":
            tolerance = 4.0  # the interpreter cuts numbers to bfloat16 instead of rounding them
    codes = token_codes_ref(as_coded.double().cpu().flatten(1), case.mean.double(), case.project.double())
    for row, exact in zip(real, codes):
        first = (case.seq_lens[row] - 1) * case.code_dim
        found = case.store[int(case.chunks[row]), first : first + case.code_dim]
        assert (found.cpu().double() - exact).abs().max() <= 0.5 + tolerance
        store[int(case.chunks[row]), first : first + case.code_dim] = found
    assert torch.equal(case.store, store)

    directions = query_directions_ref(got.q.double(), case.query.double())
    torch.testing.assert_close(got.scales.double(), directions.abs().amax(-1) / 127, rtol=1e-5, atol=1e-9)
    error = (got.numbers.double() * got.scales.unsqueeze(-1).double() - directions).abs()
    assert (error <= 0.501 * got.scales.unsqueeze(-1).double() + 1e-6).all()
    for row in set(range(len(case.seq_lens))) - set(real):
        assert not got.q[row].any() and not got.numbers[row].any() and not got.scales[row].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wanted", [(), ("code",), ("query",)], ids=str)
def test_what_is_not_wanted_is_not_made(wanted, device):
    case = Case((28, 4, 128, 64, False, [70, 3]), torch.float16, torch.float16, device)
    store = case.store.clone()
    full, pool = case.run(code=case.code, query=case.query), bits(case.batch.pool).clone()
    codes = case.store.clone()
    case.store.copy_(store)
    case.batch.pool[:] = make_batch(case.seq_lens, 4, 128, torch.float16, device).pool  # other K and V, the same NaN
    for row in case.real:
        page, offset = case.place(row)
        case.batch.pool[page] = float("nan")
        assert case.batch.pool[page, 0, 0, offset].isnan().all()

    got = case.run(**{name: getattr(case, name) for name in wanted})

    assert torch.equal(got.q, full.q)
    assert (got.numbers is None) == ("query" not in wanted) == (got.scales is None)
    if got.numbers is not None:
        assert torch.equal(got.numbers, full.numbers) and torch.equal(got.scales, full.scales)
    assert torch.equal(case.store, codes if "code" in wanted else store)
    whole = pool.view(torch.float16).view_as(case.batch.pool)
    for row in case.real:
        page, offset = case.place(row)
        assert torch.equal(case.batch.pool[page, :, :, offset], whole[page, :, :, offset])


@pytest.mark.parametrize("device", DEVICES)
def test_rows_do_not_depend_on_the_batch(device):
    case = Case((14, 2, 64, 32, False, [5, 300, 0, 128, 77]), torch.float16, torch.float16, device)
    together = case.run(code=case.code, query=case.query)
    pool, store = bits(case.batch.pool).clone(), case.store.clone()
    for row in range(5):
        alone = case.run(slice(row, row + 1), code=case.code, query=case.query)
        assert torch.equal(alone.q[0], together.q[row])
        assert torch.equal(alone.numbers[0], together.numbers[row]) and torch.equal(alone.scales[0], together.scales[row])
    assert torch.equal(bits(case.batch.pool), pool) and torch.equal(case.store, store)


@pytest.mark.parametrize("device", DEVICES)
def test_codes_of_the_next_chunk(device):
    """The first token behind a full summary chunk goes to the second chunk of the table."""
    torch.manual_seed(1)
    code_dim = 64
    chunk_tokens = slices_per_chunk(64 * code_dim) * 64
    assert chunk_tokens * code_dim == CHUNK_BYTES
    seq_len = chunk_tokens + 1
    qkv = torch.randn(1, 3 * 64, device=device)
    pages = torch.zeros(2, 1, 2, 128, 64, device=device)
    page_table = torch.full((1, seq_len // 128 + 1), pages.data_ptr(), dtype=torch.int64, device=device)
    store = torch.zeros(2, CHUNK_BYTES, dtype=torch.int8, device=device)
    table = store.data_ptr() + torch.tensor([[CHUNK_BYTES, 0]], device=device)
    code = CodeWrite(torch.eye(64, device=device) * 20, torch.zeros(64, device=device), table, 64)
    cos, sin = tables(64, seq_len, device)
    seq_lens = torch.tensor([seq_len], device=device)
    sizes = dict(num_kv_heads=1, head_dim=64, kv_dtype=torch.float32, page_size=128)
    decode_prepare(qkv, cos, signed_sine(sin), page_table, seq_lens, code=code, **sizes)
    assert torch.equal(store[0, :64], (pages[0, 0, 0, 0] * 20).round().to(torch.int8))
    assert (store[1] == 0).all() and (store[0, 64:] == 0).all()


def test_what_does_not_fit_is_named():
    case = Case((2, 1, 64, 8, False, [5]), torch.float16, torch.float16, "cpu")
    case.kv_scale = torch.ones(1, 2)
    with pytest.raises(ValueError, match="kv_scale belongs to K and V in float8_e4m3fn"):
        case.run()
    case.kv_scale, case.num_kv_heads = None, 2
    with pytest.raises(ValueError, match="qkv has 256 numbers a token: with 2 KV heads of 64, it must hold"):
        case.run()
