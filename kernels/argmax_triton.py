"""The greedy token of each row of logits, on the device and inside a CUDA graph.

A row is cut among many programs, so that few rows keep the whole card busy; a second launch chooses among their bests.

Reference: kernels/argmax_ref.py
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qsa.kernels.checks import check_tensor
from qsa.kernels.registry import Operator, register

TUNE = [dict(block=block, num_warps=warps) for block, warps in ((4096, 4), (4096, 8), (8192, 8), (2048, 4))]


@triton.jit
def _best_of(numbers, tokens, is_wrong):
    """The largest number and the first token that has it; the token is -1 where anything is wrong."""
    best = tl.max(numbers, 0)
    token = tl.min(tl.where(numbers == best, tokens, 2147483647), 0)
    return best, tl.where(tl.max(is_wrong.to(tl.int32), 0) > 0, -1, token)


@triton.jit
def _argmax_parts_kernel(
    logits_ptr, best_ptr, token_ptr,
    stride_l_r,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # grid: (cdiv(VOCAB_SIZE, BLOCK), rows)
    row = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * stride_l_r + tokens, mask=tokens < VOCAB_SIZE, other=-3.0e38)
    is_wrong = (tl.abs(logits) < float("inf")) == 0
    best, token = _best_of(logits, tokens, is_wrong)
    place = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(best_ptr + place, best)
    tl.store(token_ptr + place, token)


@triton.jit
def _argmax_kernel(best_ptr, token_ptr, out_ptr, NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr):
    # grid: (rows,)
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < NUM_PARTS
    bests = tl.load(best_ptr + row * NUM_PARTS + offs, mask=mask, other=float("-inf"))
    tokens = tl.load(token_ptr + row * NUM_PARTS + offs, mask=mask, other=2147483647)
    _, token = _best_of(bests, tokens, tokens < 0)
    tl.store(out_ptr + row, token.to(tl.int64))


def greedy_tokens(logits: torch.Tensor, *, block: int = 4096, num_warps: int = 4) -> torch.Tensor:
    """The first of the largest logits of each row.

    Args:
        logits: float32 [rows, vocab_size]
        block:  tokens of a program.

    Returns:
        int64 [rows]; -1 where a logit is NaN or infinite, which no sampler should go on from.
    """
    check_tensor("logits", logits, (None, None), (torch.float32,))
    rows, vocab_size = logits.shape
    if vocab_size == 0 or logits.stride(1) != 1:
        raise ValueError(f"logits must have a token and be contiguous in the last axis, got {list(logits.shape)}")
    num_parts = triton.cdiv(vocab_size, block)
    best = torch.empty(rows, num_parts, dtype=torch.float32, device=logits.device)
    token = torch.empty(rows, num_parts, dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _argmax_parts_kernel[(num_parts, rows)](
            logits, best, token, logits.stride(0), VOCAB_SIZE=vocab_size, BLOCK=block, num_warps=num_warps
        )
        parts = triton.next_power_of_2(num_parts)
        _argmax_kernel[(rows,)](best, token, out, NUM_PARTS=num_parts, BLOCK=parts, num_warps=1)
    return out


class Argmax(Operator):
    """greedy_tokens under its name."""

    forward = staticmethod(greedy_tokens)


register("argmax", "triton", Argmax)
