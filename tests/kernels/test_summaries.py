"""The four summaries behind their interface: what each score must be, chunk borders, blocks, the calibration file."""

from __future__ import annotations

import pytest
import torch

from qsa.errors import CheckpointError
from qsa.kernels.summaries.code import CodeCalibration, load_calibration, save_calibration
from qsa.kernels.summaries.make import make_summary, summary_slice_bytes
from qsa.memory.layout import CHUNK_BYTES, SummaryLayout

NAMES = ["code", "sketch", "minmax", "mean"]
SHAPES = [  # num_kv_heads, group, head_dim, slice_size, num_slices
    (1, 1, 64, 64, 1),  # smallest
    (3, 3, 64, 64, 20),  # the default model
    (2, 7, 80, 32, 33),  # head_dim is not a power of two
]


def calibration_of(width, code_dim, num_layers=2):
    """Exact when code_dim == width: an orthogonal map, keys of about unit size on 1/30 steps."""
    directions = torch.linalg.qr(torch.randn(num_layers, width, width))[0][:, :, :code_dim].contiguous()
    return CodeCalibration(directions * 30, directions / 30, torch.zeros(num_layers, width), (1, 4))


def filled(name, num_kv_heads, head_dim, slice_size, keys, slices_per_update, store=None):
    """A summary with keys [num_kv_heads, num_slices, slice_size, head_dim] written some slices at a time; chunks fall."""
    torch.manual_seed(1)
    width = num_kv_heads * head_dim
    summary = make_summary(name, num_kv_heads, head_dim, slice_size, calibration_of(width, width // 8))
    layout = SummaryLayout(slice_size, summary.slice_bytes)
    num_chunks = -(-keys.shape[1] // layout.slices_per_chunk)
    if store is None:
        store = torch.full((num_chunks + 1, CHUNK_BYTES), 255, dtype=torch.uint8)  # NaN as float32
    chunks = list(range(num_chunks, 0, -1))
    for first in range(0, keys.shape[1], slices_per_update):
        slices = torch.arange(first, min(first + slices_per_update, keys.shape[1]))
        where = torch.tensor(chunks)[slices // layout.slices_per_chunk], slices % layout.slices_per_chunk
        summary.update(1, store, keys[:, slices], *where)
    return summary, store, chunks


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("num_kv_heads", "group", "head_dim", "slice_size", "num_slices"), SHAPES)
def test_updates_slice_by_slice_equal_one_update(name, num_kv_heads, group, head_dim, slice_size, num_slices):
    torch.manual_seed(0)
    keys = torch.randn(num_kv_heads, num_slices, slice_size, head_dim)
    q = torch.randn(num_kv_heads, group, head_dim)
    summary, at_once, chunks = filled(name, num_kv_heads, head_dim, slice_size, keys, num_slices)
    _, one_by_one, _ = filled(name, num_kv_heads, head_dim, slice_size, keys, 1)
    last = num_slices * slice_size
    scores = summary.scan(1, at_once, q, chunks, 0, last, 0.125)
    assert scores.dtype == torch.float32 and scores.shape == (num_kv_heads, group, num_slices)
    assert torch.isfinite(scores).all()
    torch.testing.assert_close(summary.scan(1, one_by_one, q, chunks, 0, last, 0.125), scores, rtol=0, atol=0.2)
    assert (one_by_one == at_once).float().mean() > 0.999  # rounding of a sum may move a code by one


@pytest.mark.parametrize(("num_kv_heads", "group", "head_dim", "slice_size", "num_slices"), SHAPES)
def test_mean_scores_the_mean_key(num_kv_heads, group, head_dim, slice_size, num_slices):
    torch.manual_seed(0)
    keys = torch.randn(num_kv_heads, num_slices, slice_size, head_dim)
    q = torch.randn(num_kv_heads, group, head_dim)
    summary, store, chunks = filled("mean", num_kv_heads, head_dim, slice_size, keys, 3)
    want = torch.einsum("hgd,hnd->hgn", q, keys.mean(2)) * 0.125
    torch.testing.assert_close(summary.scan(1, store, q, chunks, 0, num_slices * slice_size, 0.125), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("num_kv_heads", "group", "head_dim", "slice_size", "num_slices"), SHAPES)
def test_minmax_bounds_every_key(num_kv_heads, group, head_dim, slice_size, num_slices):
    torch.manual_seed(0)
    keys = torch.randn(num_kv_heads, num_slices, slice_size, head_dim)
    q = torch.randn(num_kv_heads, group, head_dim)
    summary, store, chunks = filled("minmax", num_kv_heads, head_dim, slice_size, keys, 3)
    got = summary.scan(1, store, q, chunks, 0, num_slices * slice_size, 1.0)
    exact = torch.einsum("hgd,hnsd->hgns", q, keys)
    assert (exact.amax(-1) <= got + 1e-4).all()
    wide = q[:, :, None]
    want = torch.maximum(wide * keys.amin(2)[:, None], wide * keys.amax(2)[:, None]).sum(-1)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["sketch", "code"])
@pytest.mark.parametrize(("first", "last_cut"), [(0, 0), (5, 0), (32, 11)])
def test_token_summaries_leave_sink_and_window_out(name, first, last_cut):
    """Scores follow the exact ones of the tokens [first, last): log-sum-exp for sketch, best token for code."""
    torch.manual_seed(0)
    keys = torch.randn(3, 12, 64, 64)
    q = torch.randn(3, 3, 64)
    keys[:, :, :first] *= 1.0
    keys[:, 0, :first] = 50 * q[:, 0:1]  # would outshine everything
    last = 12 * 64 - last_cut
    if last_cut:
        keys[:, 11, -last_cut:] = 50 * q[:, 0:1]
    if name == "sketch":
        summary, store, chunks = filled(name, 3, 64, 64, keys, 5)
    else:  # all directions kept: only the rounding to int8 is left
        summary = make_summary("code", 3, 64, 64, calibration_of(192, 192))
        store, chunks = torch.zeros(2, CHUNK_BYTES, dtype=torch.uint8), [1]
        summary.update(1, store, keys, torch.ones(12, dtype=torch.int64), torch.arange(12))
    exact = torch.einsum("hgd,hnsd->hgns", q, keys).flatten(2) * 0.125
    exact[..., :first] = exact[..., last:] = -torch.inf
    exact = exact.unflatten(2, (12, 64))
    got = summary.scan(1, store, q, chunks, first, last, 0.125)
    want = exact.logsumexp(-1) if name == "sketch" else exact.amax(-1)
    assert (got - want).abs().max() < 0.25 and (got - want).abs().mean() < 0.08


def test_scan_crosses_chunks():
    torch.manual_seed(0)
    for name in NAMES:
        summary = make_summary(name, 8, 128, 64, calibration_of(1024, 128))
        per_chunk = SummaryLayout(64, summary.slice_bytes).slices_per_chunk
        num_slices = per_chunk + 3
        keys = torch.randn(8, num_slices, 64, 128)
        summary, store, chunks = filled(name, 8, 128, 64, keys, 40)
        assert len(chunks) == 2
        q = torch.randn(8, 2, 128)
        both = summary.scan(1, store, q, chunks, 0, num_slices * 64, 0.1)
        assert both.shape[-1] == num_slices
        tail = summary.scan(1, store, q, chunks[1:], 0, 3 * 64, 0.1)
        torch.testing.assert_close(both[..., per_chunk:], tail)


@pytest.mark.parametrize("name", NAMES)
def test_many_rows_are_scanned_in_blocks(name):
    """Prefill scores hundreds of queries over the whole context: block by block, each row as if it were alone."""
    torch.manual_seed(0)
    keys = torch.randn(2, 60, 64, 64)
    q = torch.randn(2, 700, 64)
    summary, store, chunks = filled(name, 2, 64, 64, keys, 60)
    span = (20, 60 * 64 - 100)
    blocks = [base for base, _ in summary.read_blocks(store, chunks, span[1], 1400)]
    assert len(blocks) > 1
    got = summary.scan(1, store, q, chunks, *span, 0.125)
    for row in (0, 399, 699):
        alone = summary.scan(1, store, q[:, row : row + 1], chunks, *span, 0.125)
        torch.testing.assert_close(got[:, row : row + 1], alone, rtol=1e-4, atol=1e-3)


def test_blocks():
    scores = torch.tensor([[1.0, 2, 3, 4, 5]])
    sizes = (2, 64, 64)
    assert make_summary("minmax", *sizes, None).block_scores(scores, 2).tolist() == [[2, 4, 5]]
    assert make_summary("mean", *sizes, None).block_scores(scores, 2).tolist() == [[1.5, 3.5, 5]]
    lse = make_summary("sketch", *sizes, None).block_scores(scores, 2)
    torch.testing.assert_close(lse, torch.stack([scores[:, :2].logsumexp(1), scores[:, 2:4].logsumexp(1), scores[:, 4]], 1))


@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_a_slice(name):
    calibration = calibration_of(192, 24)
    assert make_summary(name, 3, 64, 64, calibration).slice_bytes == summary_slice_bytes(name, 3, 64, 64, 24)
    per_token_and_head = summary_slice_bytes(name, 3, 64, 64, 24) / 64 / 3
    assert per_token_and_head == {"code": 8, "sketch": 34, "minmax": 8, "mean": 4}[name]


def test_calibration_file(tmp_path):
    torch.manual_seed(0)
    calibration = calibration_of(32, 8, num_layers=5)
    path = tmp_path / "calibration.safetensors"
    save_calibration(path, calibration, "tiny")
    part = load_calibration(path, 2, 2)
    assert part.project.dtype == torch.float32 and part.scan_every == (1, 4) and part.code_dim == 8
    for name in ("project", "query", "mean"):
        assert torch.equal(getattr(part, name), getattr(calibration, name)[2:4].half().float())
    with pytest.raises(CheckpointError, match="has 5 layers, but layer 5 is wanted"):
        load_calibration(path, 4, 2)
    with pytest.raises(CheckpointError, match="cannot read calibration file"):
        load_calibration(tmp_path / "none.safetensors", 0, 1)
    path.write_bytes(b"not safetensors")
    with pytest.raises(CheckpointError, match="cannot read calibration file"):
        load_calibration(path, 0, 1)
    with pytest.raises(ValueError, match="run `qsa calibrate` for this model"):
        make_summary("code", 3, 64, 64, calibration)
    with pytest.raises(ValueError, match="no calibration was given"):
        make_summary("code", 3, 64, 64, None)
