"""kv_write on Triton: K and V through page addresses, codes beside them, nothing else touched."""

from __future__ import annotations

import pytest
import torch
from paged_batch import DEVICES, DTYPES, make_batch

pytest.importorskip("triton")
from qsa.kernels.kv_write_ref import kv_write_ref
from qsa.kernels.kv_write_triton import CHUNK_BYTES, CodeWrite, kv_write, slices_per_chunk
from qsa.kernels.summaries.code_ref import token_codes_ref

SHAPES = [  # num_kv_heads, head_dim, code_dim, seq_lens
    (1, 64, 8, [1]),  # smallest
    (3, 80, 24, [129, 0, 300]),  # nothing is a power of two; a row that writes nothing
    (4, 128, 64, [128, 257]),  # the last place of a page, the first of the next
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_kv_heads", "head_dim", "code_dim", "seq_lens"), SHAPES)
def test_kv_write(num_kv_heads, head_dim, code_dim, seq_lens, dtype, device):
    torch.manual_seed(0)
    batch = make_batch(seq_lens, num_kv_heads, head_dim, dtype, device)
    width = num_kv_heads * head_dim
    heads = torch.randn(len(seq_lens), 2 * num_kv_heads + 1, head_dim, device=device)
    k, v = heads[:, :num_kv_heads], heads[:, num_kv_heads : 2 * num_kv_heads]  # views, as the layer hands them on
    mean = torch.randn(width)
    project = 12 * torch.randn(width, code_dim)  # some numbers are beyond 127
    store = torch.full((2 * len(seq_lens), CHUNK_BYTES), 99, dtype=torch.int8, device=device)
    chunks = torch.arange(len(seq_lens)) * 2 + 1
    table = store.data_ptr() + torch.stack((chunks, chunks * 0), 1).to(device) * CHUNK_BYTES
    code = CodeWrite(project.to(device), -(mean @ project).to(device), table, 64)
    want = batch.pool.clone()
    want_store = store.clone()

    kv_write(k, v, batch.page_table, batch.seq_lens, kv_dtype=dtype, page_size=batch.page_size, code=code)

    real = [row for row, seq_len in enumerate(seq_lens) if seq_len]
    places = [
        (int(batch.page_table[row, (seq_lens[row] - 1) // 128]) - batch.pool.data_ptr()) // want[0].nbytes for row in real
    ]
    kv_write_ref(k[real], v[real], want, torch.tensor(places), torch.tensor([(seq_lens[row] - 1) % 128 for row in real]))
    assert torch.equal(batch.pool.nan_to_num(7.5), want.nan_to_num(7.5))
    exact = token_codes_ref(k[real].to(dtype).double().cpu().flatten(1), mean.double(), project.double())
    for row, numbers in zip(real, exact):
        first = (seq_lens[row] - 1) * code_dim
        found = store[int(chunks[row]), first : first + code_dim]
        assert (found.cpu().double() - numbers).abs().max() <= 0.5 + 1e-3
        want_store[int(chunks[row]), first : first + code_dim] = found
    assert exact.abs().max() == 127 or code_dim == 8
    assert torch.equal(store, want_store)


@pytest.mark.parametrize("device", DEVICES)
def test_codes_of_the_next_chunk(device):
    """The first token behind a full summary chunk goes to the second chunk of the table."""
    torch.manual_seed(1)
    code_dim = 64
    chunk_tokens = slices_per_chunk(64 * code_dim) * 64
    assert chunk_tokens * code_dim == CHUNK_BYTES
    seq_len = chunk_tokens + 1
    k = torch.randn(1, 1, 64, device=device)
    page = torch.zeros(2, 1, 2, 128, 64, device=device)
    page_table = torch.full((1, seq_len // 128 + 1), page.data_ptr(), dtype=torch.int64, device=device)
    store = torch.zeros(2, CHUNK_BYTES, dtype=torch.int8, device=device)
    table = store.data_ptr() + torch.tensor([[CHUNK_BYTES, 0]], device=device)
    code = CodeWrite(torch.eye(64, device=device) * 20, torch.zeros(64, device=device), table, 64)
    seq_lens = torch.tensor([seq_len], device=device)
    kv_write(k, k, page_table, seq_lens, kv_dtype=torch.float32, page_size=128, code=code)
    assert torch.equal(store[0, :64], (k[0, 0] * 20).round().to(torch.int8))
    assert (store[1] == 0).all() and (store[0, 64:] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_without_codes(device):
    batch = make_batch([5], 2, 64, torch.float16, device)
    k, v = torch.randn(2, 1, 2, 64, device=device).half()
    kv_write(k, v, batch.page_table, batch.seq_lens, kv_dtype=torch.float16, page_size=batch.page_size)
    assert torch.equal(batch.pool[1, :, 0, 4], k[0]) and torch.equal(batch.pool[1, :, 1, 4], v[0])
