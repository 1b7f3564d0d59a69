"""`code` on Triton: whole numbers for queries, and the scan, exact against the reference; the operator as a whole."""

from __future__ import annotations

import pytest
import torch
from paged_batch import DEVICES

pytest.importorskip("triton")
from qsa.kernels.kv_write_triton import CHUNK_BYTES, kv_write
from qsa.kernels.registry import get_operator
from qsa.kernels.summaries.code import CodeCalibration
from qsa.kernels.summaries.code_ref import code_scan_ref
from qsa.kernels.summaries.code_triton import quantise_queries, scan_codes

SHAPES = [  # num_q_heads, code_dim, slice_size, sink, window, seq_lens
    (1, 32, 64, 32, 64, [129]),  # two slices, one token in the second
    (28, 64, 64, 64, 512, [900, 512, 0, 1600]),  # the 7B shape; a sink of a whole slice; no candidates
    (9, 24, 32, 16, 64, [700]),  # the default model: the code is no power of two
    (3, 128, 64, 32, 64, [400]),  # long codes
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("num_q_heads", "code_dim", "slice_size", "sink", "window", "seq_lens"), SHAPES)
def test_scan(num_q_heads, code_dim, slice_size, sink, window, seq_lens, device):
    torch.manual_seed(0)
    batch = len(seq_lens)
    numbers = torch.randint(-127, 128, (batch, num_q_heads, code_dim), dtype=torch.int8)
    scales = torch.rand(batch, num_q_heads) / 1000
    store = torch.randint(-127, 128, (2 * batch, CHUNK_BYTES), dtype=torch.int8)
    on_device = store.to(device)
    chunks = torch.arange(batch, 0, -1) * 2 - 1
    table = (on_device.data_ptr() + torch.stack((chunks, chunks - 1), 1) * CHUNK_BYTES).to(device)
    max_slices = -(-max(seq_lens) // slice_size)

    got = scan_codes(
        numbers.to(device),
        scales.to(device),
        table,
        torch.tensor(seq_lens, dtype=torch.int32, device=device),
        max_slices=max_slices,
        slice_size=slice_size,
        sink_size=sink,
        window_size=window,
        sm_scale=0.125,
        block_s=2,
        tiles=3,
    ).cpu()

    assert got.shape == (batch, num_q_heads, max_slices)
    for row, seq_len in enumerate(seq_lens):
        last = max(0, seq_len - window)
        count = -(-last // slice_size)
        codes = store[chunks[row]][: count * slice_size * code_dim].view(-1, code_dim).double()
        want = code_scan_ref(numbers[row].double(), (scales[row] * 0.125).double(), codes, slice_size, sink, last)
        empty = want == -torch.inf
        assert (got[row, :, :count][empty] < -1000).all()
        torch.testing.assert_close(got[row, :, :count][~empty].double(), want[~empty], rtol=1e-6, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim", "code_dim"), [(14, 2, 128, 64), (3, 3, 80, 24)])
def test_quantise_queries(num_q_heads, num_kv_heads, head_dim, code_dim, device):
    torch.manual_seed(0)
    q = torch.randn(2, num_q_heads, head_dim).half()
    q[1, 0] = 0
    query = torch.randn(num_kv_heads, head_dim, code_dim)
    numbers, scales = (part.cpu() for part in quantise_queries(q.to(device), query.to(device)))
    rows = query.repeat_interleave(num_q_heads // num_kv_heads, 0).double()
    exact = torch.einsum("bhd,hdc->bhc", q.double(), rows)
    torch.testing.assert_close(scales.double(), exact.abs().amax(-1) / 127, rtol=1e-5, atol=1e-9)
    error = (numbers.double() * scales.unsqueeze(-1).double() - exact).abs()
    assert (error <= 0.501 * scales.unsqueeze(-1).double() + 1e-6).all()
    assert (numbers[1, 0] == 0).all() and numbers.abs().max() == 127


@pytest.mark.parametrize("device", DEVICES)
def test_operator_finds_the_slice_that_was_written(device):
    """Written token by token with kv_write, a slice that holds a query's own direction scores best for it."""
    torch.manual_seed(0)
    num_kv_heads, head_dim, slice_size, window = 2, 32, 16, 32
    width, num_tokens = num_kv_heads * head_dim, 60
    directions = torch.linalg.qr(torch.randn(width, width))[0][:, :32].unsqueeze(0)
    calibration = CodeCalibration(directions * 20, directions / 20, torch.zeros(1, width))
    summary = get_operator("code_summary", "triton")
    summary.init(
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        slice_size=slice_size,
        calibration=calibration,
        device=torch.device(device),
    )
    assert summary.slice_bytes == slice_size * 32
    store = torch.zeros(1, CHUNK_BYTES, dtype=torch.int8, device=device)
    table = torch.tensor([[store.data_ptr()]], device=device)
    pages = torch.zeros(1, num_kv_heads, 2, 128, head_dim, device=device)
    page_table = torch.tensor([[pages.data_ptr()]], device=device)
    keys = torch.randn(num_tokens, num_kv_heads, head_dim)
    keys[21] = 6 * directions[0, :, 0].view(num_kv_heads, head_dim)
    for token in range(num_tokens):
        k = keys[token : token + 1].to(device)
        seq_lens = torch.tensor([token + 1], device=device)
        kv_write(k, k, page_table, seq_lens, kv_dtype=torch.float32, page_size=128, code=summary.write(0, table))
    q = directions[0, :, 0].view(1, num_kv_heads, head_dim).to(device)
    scores = summary.forward(
        0, q, table, seq_lens, max_slices=8, sink_size=8, window_size=window, sm_scale=head_dim**-0.5
    ).cpu()
    assert scores[0, :, :2].argmax(-1).tolist() == [21 // slice_size] * num_kv_heads
    summary.free()
    summary.free()
