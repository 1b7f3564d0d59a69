"""Low-bit weights: every type equals the gguf library's dequantisation, and parts are exact."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_gguf import dequantize, quantize, random_blocks

from qsa.model.checkpoint.quantized import KINDS, PART_KINDS, QuantizedTensor

SHAPE = (37, 512)  # rows are no multiple of anything; two blocks of 256 and sixteen of 32 in each


def make(kind: str, shape=SHAPE):
    rng = np.random.default_rng(0)
    if kind in PART_KINDS:
        stored = quantize(rng.standard_normal(shape).astype(np.float32), kind)
    else:
        stored = random_blocks(shape, kind, rng)
    return QuantizedTensor(kind, shape, torch.from_numpy(stored[0])), torch.from_numpy(dequantize(stored))


@pytest.mark.parametrize("kind", KINDS)
def test_dequantize(kind):
    tensor, expected = make(kind)
    assert torch.isfinite(expected).all() and expected.std() > 0
    assert torch.equal(tensor.dequantize(), expected)
    assert torch.equal(tensor.dequantize(torch.bfloat16), expected.bfloat16())
    assert tensor.nbytes == tensor.data.numel()


@pytest.mark.parametrize("kind", KINDS)
def test_rows(kind):
    tensor, expected = make(kind)
    rows = torch.tensor([36, 0, 5, 5])
    chosen = tensor.select_rows(rows)
    assert chosen.shape == (4, SHAPE[1])
    assert torch.equal(chosen.dequantize(), expected[rows])


@pytest.mark.parametrize("kind", PART_KINDS)
def test_parts_are_exact(kind):
    tensor, expected = make(kind)
    values, scale, minimum = tensor.parts()
    assert values.shape == SHAPE and scale.shape == minimum.shape == (SHAPE[0], SHAPE[1] // 32)
    assert (values.dtype, scale.dtype, minimum.dtype) == (torch.int8 if kind == "Q8_0" else torch.uint8, *[torch.float32] * 2)
    if kind != "Q8_0":
        assert int(values.max()) <= 15
    again = values.float() * scale.repeat_interleave(32, 1) + minimum.repeat_interleave(32, 1)
    assert torch.equal(again, expected)
    assert torch.equal(tensor.values, values) and torch.equal(tensor.scale, scale) and torch.equal(tensor.minimum, minimum)


def test_parts_of_other_kinds_are_refused():
    tensor, _ = make("Q6_K")
    assert not tensor.has_parts
    with pytest.raises(ValueError, match="Q6_K"):
        tensor.parts()


def test_more_rows_than_one_step():
    tensor, expected = make("Q4_0", (9000, 1024))
    assert torch.equal(tensor.dequantize(), expected)
