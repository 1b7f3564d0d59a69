"""Parts that decode attention kernels share: one tile of an online softmax, and the combination of splits.

Logits are in units of log 2, so that exponentials are exp2.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def kv_type(dtype: torch.dtype) -> tl.dtype:
    """Triton's name of a type of K and V."""
    if dtype not in TYPES:
        raise ValueError(f"K and V must be one of {', '.join(map(str, TYPES))}, got {dtype}")
    return TYPES[dtype]


def merge_kernel_sizes(num_q_heads: int, num_kv_heads: int, head_dim: int) -> tuple[int, int, int]:
    """Query heads per KV head, and rows and columns of a query tile."""
    if num_q_heads % num_kv_heads:
        raise ValueError(f"num_q_heads ({num_q_heads}) must be a multiple of num_kv_heads ({num_kv_heads})")
    group = num_q_heads // num_kv_heads
    return group, max(16, triton.next_power_of_2(group)), max(16, triton.next_power_of_2(head_dim))


@triton.jit
def attend_tile(
    q, address, in_page, mask_n, qk_scale, top, total, acc, offs_n, offs_d,
    KV_TYPE: tl.constexpr, PRECISION: tl.constexpr, PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Add consecutive tokens of one head of a page to an online softmax.

    address: of the page. in_page: the first token's place in it, in rows of HEAD_DIM numbers; V lies PAGE_SIZE rows behind K.
    """
    base = tl.multiple_of(address.to(tl.pointer_type(KV_TYPE)), 16)
    offs_k = (in_page + offs_n)[:, None] * HEAD_DIM + offs_d[None, :]
    mask_k = mask_n[:, None] & (offs_d < HEAD_DIM)[None, :]
    k = tl.load(base + offs_k, mask=mask_k, other=0.0)  # [BLOCK_N, BLOCK_D]
    v = tl.load(base + PAGE_SIZE * HEAD_DIM + offs_k, mask=mask_k, other=0.0)
    logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * qk_scale
    logits = tl.where(mask_n[None, :], logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 1))
    weights = tl.exp2(logits - new_top[:, None])
    factor = tl.exp2(top - new_top)
    total = total * factor + tl.sum(weights, 1)
    acc = acc * factor[:, None] + tl.dot(weights.to(KV_TYPE), v, input_precision=PRECISION)
    return new_top, total, acc


@triton.jit
def _combine_kernel(
    parts_ptr, lse_ptr, out_ptr, num_splits,
    HEAD_DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # grid: (batch * num_q_heads,)
    row = tl.program_id(0).to(tl.int64)
    offs_s = tl.arange(0, BLOCK_S)
    offs_d = tl.arange(0, BLOCK_D)
    mask_s = offs_s < num_splits
    mask_d = offs_d < HEAD_DIM
    lse = tl.load(lse_ptr + row * num_splits + offs_s, mask=mask_s, other=-1.0e30)
    best = tl.max(lse, 0)
    weights = tl.where(lse > -1.0e29, tl.exp2(lse - best), 0.0)
    total = tl.sum(weights, 0)
    offs = (row * num_splits + offs_s)[:, None] * HEAD_DIM + offs_d[None, :]
    parts = tl.load(parts_ptr + offs, mask=mask_s[:, None] & mask_d[None, :], other=0.0)  # [BLOCK_S, BLOCK_D]
    out = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + row * HEAD_DIM + offs_d, out.to(out_ptr.dtype.element_ty), mask=mask_d)


def combine_splits(parts: torch.Tensor, lse: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Attention over all splits from the attention over each.

    Args:
        parts: float32 [batch, num_q_heads, num_splits, head_dim]
        lse:   float32 [batch, num_q_heads, num_splits] in units of log 2, -1e30 for a split that attended to nothing

    Returns:
        [batch, num_q_heads, head_dim]
    """
    batch, num_q_heads, num_splits, head_dim = parts.shape
    out = torch.empty(batch, num_q_heads, head_dim, dtype=dtype, device=parts.device)
    _combine_kernel[(batch * num_q_heads,)](
        parts, lse, out, num_splits,
        HEAD_DIM=head_dim, BLOCK_S=triton.next_power_of_2(num_splits), BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
    )  # fmt: skip
    return out
