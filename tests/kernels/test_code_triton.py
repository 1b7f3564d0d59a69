"""`code` on Triton: whole numbers for queries, and both scans, exact against the reference; the operator as a whole."""

from __future__ import annotations

import pytest
import torch
from paged_batch import DEVICES

pytest.importorskip("triton")
from qsa.kernels.decode_prepare_triton import decode_prepare
from qsa.kernels.paged_kv import DecodeInputs
from qsa.kernels.registry import get_operator
from qsa.kernels.summaries.base import slices_per_chunk
from qsa.kernels.summaries.code import CodeCalibration
from qsa.kernels.summaries.code_ref import code_scan_ref
from qsa.kernels.summaries.code_rows_triton import quantise_queries, scan_code_rows
from qsa.kernels.summaries.code_triton import scan_codes
from qsa.kernels.summaries.scan_triton import CHUNK_BYTES

SHAPES = [  # num_q_heads, code_dim, slice_size, sink, window, seq_lens, block_s, num_warps
    (1, 32, 64, 32, 64, [129], 4, 4),  # two slices, one token in the second
    (28, 64, 64, 64, 512, [900, 512, 0, 1600], 4, 4),  # the 7B shape; a sink of a whole slice; no candidates
    (9, 24, 32, 16, 64, [700], 4, 2),  # the default model: the code is no power of two; two slices a warp
    (3, 128, 16, 8, 64, [400], 8, 4),  # long codes, the smallest slices
    (40, 16, 64, 0, 64, [200], 4, 4),  # more heads than a tile of the 7B shape, no sink
]


def make_store(tables: int, chunks: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random codes of every chunk [tables, chunks, chunk bytes], and on the device: the same in falling order, its table.

    Every second chunk of the store belongs to nobody; a table's last entry is no address.
    """
    codes = torch.randint(-127, 128, (tables, chunks, CHUNK_BYTES), dtype=torch.int8)
    store = torch.zeros(2 * tables * chunks, CHUNK_BYTES, dtype=torch.int8)
    store[1::2] = codes.view(-1, CHUNK_BYTES).flip(0)
    on_device = store.to(device)
    places = 2 * torch.arange(tables * chunks).flip(0).view(tables, chunks) + 1
    table = torch.full((tables, chunks + 1), 7, dtype=torch.int64)
    table[:, :chunks] = on_device.data_ptr() + places * CHUNK_BYTES
    return codes, on_device, table.to(device)


def joined(codes: torch.Tensor, slice_bytes: int) -> torch.Tensor:
    """What the chunks of one sequence hold, end to end: [slices, slice_bytes]."""
    per_chunk = slices_per_chunk(CHUNK_BYTES, slice_bytes)
    return codes[:, : per_chunk * slice_bytes].reshape(-1, slice_bytes)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("num_q_heads", "code_dim", "slice_size", "sink", "window", "seq_lens", "block_s", "num_warps"), SHAPES
)
def test_scan(num_q_heads, code_dim, slice_size, sink, window, seq_lens, block_s, num_warps, device):
    torch.manual_seed(0)
    batch = len(seq_lens)
    numbers = torch.randint(-127, 128, (batch, num_q_heads, code_dim), dtype=torch.int8)
    scales = torch.rand(batch, num_q_heads) / 1000
    codes, _keep, table = make_store(batch, 1, device)
    max_slices = -(-max(seq_lens) // slice_size)
    sizes = dict(slice_size=slice_size, sink_size=sink, window_size=window, sm_scale=0.125)

    def scan(rows: slice, due: list[int]) -> torch.Tensor:
        lengths = torch.tensor(seq_lens[rows], dtype=torch.int32, device=device)
        flags = torch.tensor(due, dtype=torch.int32, device=device)
        parts = numbers[rows].to(device), scales[rows].to(device), table[rows], lengths, flags
        return scan_codes(*parts, max_slices=max_slices, block_s=block_s, num_warps=num_warps, **sizes).cpu()

    got = scan(slice(None), [1] * batch)
    assert got.shape == (batch, num_q_heads, max_slices)
    for row, seq_len in enumerate(seq_lens):
        last = max(0, seq_len - window)
        count = -(-last // slice_size)
        tokens = joined(codes[row], slice_size * code_dim)[:count].view(-1, code_dim).double()
        want = code_scan_ref(numbers[row].double(), (scales[row] * 0.125).double(), tokens, slice_size, sink, last)
        torch.testing.assert_close(got[row, :, :count].double(), want, rtol=1e-6, atol=0)
        assert got[row, :, count:].isnan().all()  # nothing behind the candidates is written
        alone = scan(slice(row, row + 1), [1])
        assert torch.equal(alone[0, :, :count], got[row, :, :count])

    due = [row % 2 for row in range(batch)]
    some = scan(slice(None), due)
    for row, flag in enumerate(due):
        torch.testing.assert_close(some[row], got[row] if flag else got[row] * torch.nan, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
def test_scan_crosses_chunks(device):
    """Programs' shares begin and end anywhere: 1024 slices of 16 tokens a chunk, two and a half chunks."""
    torch.manual_seed(0)
    code_dim, slice_size, window = 64, 16, 32
    codes, _keep, table = make_store(2, 3, device)
    numbers = torch.randint(-127, 128, (2, 2, code_dim), dtype=torch.int8)
    scales = torch.ones(2, 2)
    seq_lens = [2560 * slice_size + window - 3, 5 * slice_size + window]
    got = scan_codes(
        numbers.to(device), scales.to(device), table, torch.tensor(seq_lens, device=device),
        torch.ones(2, dtype=torch.int32, device=device), max_slices=2600, slice_size=slice_size, sink_size=0,
        window_size=window, sm_scale=1.0, block_s=32, programs=1,
    ).cpu()  # fmt: skip
    for row, seq_len in enumerate(seq_lens):
        last = seq_len - window
        count = -(-last // slice_size)
        tokens = joined(codes[row], slice_size * code_dim)[:count].view(-1, code_dim).float()
        want = code_scan_ref(numbers[row].float(), scales[row], tokens, slice_size, 0, last)
        assert torch.equal(got[row, :, :count], want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("num_rows", "num_q_heads", "code_dim", "slice_size", "num_slices", "launch"),
    [
        (1, 1, 64, 64, 1, {}),  # smallest
        (5, 28, 64, 64, 11, {}),  # the 7B shape, rows and slices that fill no tile
        (3, 9, 24, 32, 70, dict(block_m=16, block_s=2, parts=2)),  # the code is no power of two
        (2, 4, 1024, 32, 34, dict(block_m=16, block_s=1, parts=1)),  # two chunks of 32 slices
        (9, 2, 128, 16, 37, dict(block_m=16, block_s=4, parts=1)),
    ],
)
def test_scan_rows(num_rows, num_q_heads, code_dim, slice_size, num_slices, launch, device):
    torch.manual_seed(0)
    codes, _keep, table = make_store(1, 2, device)
    numbers = torch.randint(-127, 128, (num_rows, num_q_heads, code_dim), dtype=torch.int8)
    scales = torch.rand(num_rows, num_q_heads) / 1000
    got = scan_code_rows(
        numbers.to(device), scales.to(device), table[0], num_slices=num_slices, slice_size=slice_size, sm_scale=0.125, **launch
    ).cpu()
    assert got.shape == (num_rows, num_q_heads, num_slices)
    tokens = joined(codes[0], slice_size * code_dim)[:num_slices].view(-1, code_dim).double()
    factor = (scales * 0.125).double()
    for row in range(num_rows):
        want = code_scan_ref(numbers[row].double(), factor[row], tokens, slice_size, 0, len(tokens))
        torch.testing.assert_close(got[row].double(), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("num_rows", "num_q_heads", "num_kv_heads", "head_dim", "code_dim"), [(18, 14, 2, 128, 64), (2, 3, 3, 80, 24)]
)
def test_quantise_queries(num_rows, num_q_heads, num_kv_heads, head_dim, code_dim, device):
    torch.manual_seed(0)
    q = torch.randn(num_rows, num_q_heads, head_dim).half()
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
    """Written token by token with decode_prepare, a slice that holds a query's own direction scores best for it."""
    torch.manual_seed(0)
    num_kv_heads, head_dim, slice_size, window = 2, 32, 16, 32
    width, num_tokens = num_kv_heads * head_dim, 60
    directions = torch.linalg.qr(torch.randn(width, width))[0][:, :32].unsqueeze(0)
    calibration = CodeCalibration(directions * 20, directions / 20, torch.zeros(1, width))
    summary = get_operator("code_summary", "triton")
    sizes = dict(num_kv_heads=num_kv_heads, head_dim=head_dim, slice_size=slice_size)
    summary.init(**sizes, calibration=calibration, device=torch.device(device))
    assert summary.slice_bytes == slice_size * 32
    store = torch.zeros(1, CHUNK_BYTES, dtype=torch.int8, device=device)
    table = torch.tensor([[store.data_ptr()]], device=device)
    pages = torch.zeros(1, num_kv_heads, 2, 128, head_dim, device=device)
    page_table = torch.tensor([[pages.data_ptr()]], device=device)
    keys = torch.randn(num_tokens, num_kv_heads, head_dim)
    keys[21] = 6 * directions[0, :, 0].view(num_kv_heads, head_dim)
    unturned = torch.ones(num_tokens, head_dim, device=device), torch.zeros(num_tokens, head_dim, device=device)
    for token in range(num_tokens):
        qkv = keys[token].flatten().repeat(1, 3).to(device)
        seq_lens = torch.tensor([token + 1], device=device)
        decode_prepare(
            qkv, *unturned, page_table, seq_lens, num_kv_heads=num_kv_heads, head_dim=head_dim,
            kv_dtype=torch.float32, page_size=128, code=summary.code_write(0, table),
        )  # fmt: skip
    q = directions[0, :, 0].view(1, num_kv_heads, head_dim).to(device)
    inputs = DecodeInputs(q, *quantise_queries(q, summary.query(0)))
    due = torch.ones(1, dtype=torch.int32, device=device)
    near = dict(sink_size=8, window_size=window)
    scores = summary.scan(0, inputs, table, seq_lens, due, max_slices=8, sm_scale=head_dim**-0.5, **near).cpu()
    assert scores[0, :, :2].argmax(-1).tolist() == [21 // slice_size] * num_kv_heads
    rows = summary.scan_rows(0, q, table[0], num_slices=2, sm_scale=head_dim**-0.5).cpu()
    assert rows[0].argmax(-1).tolist() == [21 // slice_size] * num_kv_heads
    with pytest.raises(ValueError, match="numbers and scales"):
        summary.scan(0, DecodeInputs(q), table, seq_lens, due, max_slices=8, sm_scale=1.0, **near)
    summary.free()
    summary.free()


def test_refused():
    with pytest.raises(ValueError, match="no calibration was given"):
        get_operator("code_summary", "triton").init(num_kv_heads=2, head_dim=32, slice_size=64)
    directions = torch.zeros(1, 64, 32)
    calibration = CodeCalibration(directions, directions, torch.zeros(1, 64))
    with pytest.raises(ValueError, match="run `qsa calibrate` for this model"):
        get_operator("code_summary", "triton").init(num_kv_heads=4, head_dim=32, slice_size=64, calibration=calibration)
    with pytest.raises(ValueError, match="at least 16 tokens, got 8"):
        get_operator("code_summary", "triton").init(num_kv_heads=2, head_dim=32, slice_size=8, calibration=calibration)
