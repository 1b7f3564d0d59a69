"""Dense prefill on a GPU, every way of computing it, against plain softmax attention in float64."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from oracle import assert_matches_oracle
from paged_batch import DEVICES, PagedBatch, make_batch

pytest.importorskip("triton")
from qsa.kernels import dense_prefill_triton
from qsa.kernels.dense_attention_ref import dense_attention_ref
from qsa.kernels.dense_prefill_triton import dense_prefill, gather_pages, merge_parts

SHAPES = [  # num_q_heads, num_kv_heads, head_dim, start, end
    (7, 1, 128, 300, 400),  # group of 7, a chunk that begins inside a page
    (4, 2, 64, 0, 130),  # nothing before the chunk
    (6, 2, 80, 512, 640),  # head_dim is not a power of two
    (8, 1, 96, 511, 512),  # one query
]


def run(q: torch.Tensor, batch: PagedBatch, start: int, end: int, way: str, **how: Any) -> torch.Tensor:
    if way in ("cudnn", "flash") and not q.is_cuda:
        pytest.skip("needs a card")
    sizes = dict(start=start, end=end, num_kv_heads=batch.num_kv_heads)
    return dense_prefill(
        q, batch.page_table[0], **sizes, sm_scale=q.shape[2] ** -0.5, kv=batch.kv, way=way, pool=batch.pool, **how
    )


def expected(q: torch.Tensor, batch: PagedBatch, start: int, dtype: torch.dtype) -> torch.Tensor:
    args = (part.cpu().to(dtype) for part in (q, batch.k[0], batch.v[0]))
    return dense_attention_ref(*args, q.shape[2] ** -0.5, start)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", ["cudnn", "flash", "triton", "math"])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim", "start", "end"), SHAPES)
def test_matches_reference(num_q_heads, num_kv_heads, head_dim, start, end, way, dtype, device):
    if device == "cpu" and dtype == torch.bfloat16 and way == "triton":
        pytest.skip("the interpreter's bfloat16 products are wrong")
    torch.manual_seed(0)
    batch = make_batch([end], num_kv_heads, head_dim, dtype, device)
    q = torch.randn(end - start, num_q_heads, head_dim).to(dtype).to(device)
    got = run(q, batch, start, end, way, piece_tokens=192)
    assert_matches_oracle("out", got.cpu(), expected(q, batch, start, torch.float64), expected(q, batch, start, dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", ["cudnn", "triton", "math"])
def test_keys_and_values_in_fp8(way, device):
    torch.manual_seed(1)
    batch = make_batch([400], 2, 64, torch.float8_e4m3fn, device)
    q = torch.randn(100, 6, 64).half().to(device)
    got = run(q, batch, 300, 400, way)
    assert_matches_oracle("out", got.cpu(), expected(q, batch, 300, torch.float64), expected(q, batch, 300, torch.float16))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("first", "last"), [(0, 1), (0, 300), (64, 192), (70, 299)])
def test_gathered_tokens_are_those_of_the_pages(first, last, device):
    torch.manual_seed(2)
    batch = make_batch([300], 2, 80, torch.bfloat16, device)
    got = gather_pages(batch.page_table[0], first, last, 2, 80, batch.kv)
    assert torch.equal(got[0], batch.k[0][:, first:last])
    assert torch.equal(got[1], batch.v[0][:, first:last])


@pytest.mark.parametrize("device", DEVICES)
def test_parts_whose_weights_are_far_apart(device):
    """A part whose log-sum-exp is far below counts for nothing; layouts of the parts may differ."""
    torch.manual_seed(3)
    outs = [torch.randn(1, 3, 40, 64, device=device), torch.randn(1, 40, 3, 64, device=device).transpose(1, 2)]
    lses = [torch.full((1, 3, 40, 1), 200.0, device=device), torch.full((1, 3, 40), -200.0, device=device)]
    assert torch.equal(merge_parts(list(zip(outs, lses)), torch.float32), outs[0][0].transpose(0, 1))


def test_what_is_refused_is_warned_of_once_and_not_asked_again(monkeypatch, caplog):
    asked = []

    def refuse(*args):
        asked.append(1)
        raise RuntimeError("no such engine")

    monkeypatch.setattr(dense_prefill_triton, "_refused", set())
    monkeypatch.setitem(dense_prefill_triton.PREFERRED, "cpu", ("cudnn", "math"))
    monkeypatch.setitem(dense_prefill_triton.WAYS, "cudnn", refuse)
    torch.manual_seed(4)
    batch = make_batch([130], 1, 64, torch.float16, "cpu")
    q = torch.randn(30, 2, 64).half()
    sizes = dict(num_kv_heads=1, sm_scale=0.125, kv=batch.kv)
    with caplog.at_level(logging.WARNING):
        first, second = (dense_prefill(q, batch.page_table[0], 100, 130, **sizes) for _ in range(2))
    assert torch.equal(first, second)
    assert asked == [1]
    assert [record.getMessage() for record in caplog.records] == [
        "dense attention by cudnn is refused here, taking the next way: no such engine"
    ]
