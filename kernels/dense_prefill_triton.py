"""Dense attention of a prefill chunk on a GPU, the fastest there is: the baseline that sparse prefill is measured against.

K and V are copied out of their pages in pieces of bounded size; what lies before the chunk is attended without a mask,
the chunk itself causally, and the parts are merged by their log-sum-exp. The attention is cuDNN's, asked for by name
(what scaled_dot_product_attention chooses by itself is slower); where it refuses, once and with a warning, PyTorch's
flash attention, and where that does too, sparse_prefill over lists of everything.

Reference: kernels/dense_attention_ref.py
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from qsa.kernels.checks import FLOATS, check_tensor
from qsa.kernels.paged_kv import PagedKV
from qsa.kernels.registry import Operator, register
from qsa.kernels.sparse_prefill_triton import as_multiplied, sparse_prefill
from qsa.kernels.split_triton import kv_constants, load_scale, product_type

logger = logging.getLogger(__name__)
PIECE_TOKENS = 65536  # K and V copied at once: cuDNN plans every length that it has not seen, so lengths should repeat
TUNE = [dict(piece_tokens=tokens) for tokens in (32768, PIECE_TOKENS, 131072, 262144)]
Attention = tuple[torch.Tensor, torch.Tensor]  # out [1, num_q_heads, num_q, head_dim], lse [1, num_q_heads, num_q]


@triton.jit(do_not_specialize=["first", "last"])
def _gather_kernel(
    page_table_ptr, kv_scale_ptr, out_ptr, first, last, stride_o_p, stride_o_h,
    STORED: tl.constexpr,
    TYPE: tl.constexpr,
    E4M3: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,  # divides PAGE_SIZE
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    # grid: (blocks, num_kv_heads, 2), blocks of tokens counted from the one that holds `first`
    kv_head = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2).to(tl.int64)  # 0: K, 1: V
    begin = (first // BLOCK_N + tl.program_id(0)) * BLOCK_N
    tokens = begin + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    mask = ((tokens >= first) & (tokens < last))[:, None] & (offs_d < HEAD_DIM)[None, :]
    base = tl.multiple_of(tl.load(page_table_ptr + begin // PAGE_SIZE).to(tl.pointer_type(STORED)), 16)
    rows = (2 * kv_head + part) * PAGE_SIZE + tokens % PAGE_SIZE
    values = as_multiplied(tl.load(base + rows[:, None] * HEAD_DIM + offs_d[None, :], mask=mask, other=0), TYPE, E4M3)
    if HAS_SCALE:
        values = values.to(tl.float32) * load_scale(kv_scale_ptr, kv_head, part, HAS_SCALE, E4M3)
    offs_o = part * stride_o_p + kv_head * stride_o_h + (tokens - first).to(tl.int64)[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(out_ptr + offs_o, values.to(TYPE), mask=mask)


def gather_pages(
    page_table: torch.Tensor, first: int, last: int, num_kv_heads: int, head_dim: int, kv: PagedKV
) -> torch.Tensor:
    """K and V of tokens [first, last), multiplied with their scales: [2, num_kv_heads, last - first, head_dim]."""
    out = torch.empty(2, num_kv_heads, last - first, head_dim, dtype=product_type(kv), device=page_table.device)
    block_n = min(64, kv.page_size)
    blocks = triton.cdiv(last, block_n) - first // block_n
    _gather_kernel[(blocks, num_kv_heads, 2)](
        page_table, kv.scale, out, first, last, out.stride(0), out.stride(1),
        **kv_constants(kv, page_table.device), HEAD_DIM=head_dim, BLOCK_N=block_n,
        BLOCK_D=triton.next_power_of_2(head_dim), num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_parts", "num_tokens"])
def _merge_kernel(
    outs_ptr, lses_ptr, merged_ptr, num_parts, num_tokens, stride_p, stride_h, stride_t,
    HEAD_DIM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # grid: (cdiv(num_tokens, BLOCK_T), num_q_heads)
    head = tl.program_id(1).to(tl.int64)
    num_heads = tl.num_programs(1)
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_d = tl.arange(0, BLOCK_D)
    mask_t = tokens < num_tokens
    mask = mask_t[:, None] & (offs_d < HEAD_DIM)[None, :]
    offs_l = lses_ptr + head * num_tokens + tokens
    offs_o = outs_ptr + head * stride_h + tokens[:, None] * stride_t + offs_d[None, :]
    top = tl.full([BLOCK_T], float("-inf"), tl.float32)
    for part in range(num_parts):
        top = tl.maximum(top, tl.load(offs_l + part * num_heads * num_tokens, mask=mask_t, other=0.0))
    total = tl.zeros([BLOCK_T], tl.float32)
    acc = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for part in range(num_parts):
        lse = tl.load(offs_l + part * num_heads * num_tokens, mask=mask_t, other=0.0)
        weight = tl.exp(lse - top)
        total += weight
        acc += tl.load(offs_o + part * stride_p, mask=mask, other=0.0).to(tl.float32) * weight[:, None]
    offs_m = (tokens * num_heads + head)[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(merged_ptr + offs_m, (acc / total[:, None]).to(merged_ptr.dtype.element_ty), mask=mask)


def merge_parts(parts: list[Attention], dtype: torch.dtype) -> torch.Tensor:
    """Attention over disjoint sets of keys from the attention over each: [num_q, num_q_heads, head_dim]."""
    if len(parts) == 1:
        return parts[0][0][0].transpose(0, 1).to(dtype).contiguous()
    outs = torch.cat([out for out, _ in parts])  # [num_parts, num_q_heads, num_q, head_dim]
    lses = torch.cat([lse.reshape(out.shape[:3]) for out, lse in parts]).contiguous()
    num_parts, num_heads, num_tokens, head_dim = outs.shape
    if outs.stride(3) != 1:
        outs = outs.contiguous()
    merged = torch.empty(num_tokens, num_heads, head_dim, dtype=dtype, device=outs.device)
    _merge_kernel[(triton.cdiv(num_tokens, 32), num_heads)](
        outs, lses, merged, num_parts, num_tokens, *outs.stride()[:3],
        HEAD_DIM=head_dim, BLOCK_T=32, BLOCK_D=triton.next_power_of_2(head_dim), num_warps=4,
    )  # fmt: skip
    return merged


def _attend_cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float, is_causal: bool) -> Attention:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, is_causal, False, scale=sm_scale
    )
    return out, lse


def _attend_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float, is_causal: bool) -> Attention:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=sm_scale)
    return out, lse


def _attend_math(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float, is_causal: bool) -> Attention:
    """Plain products in float32, for the CPU."""
    k, v = (part.float().repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
    scores = q.float() @ k.transpose(2, 3) * sm_scale
    if is_causal:
        scores.masked_fill_(torch.ones_like(scores[0, 0], dtype=torch.bool).triu_(1), -torch.inf)
    lse = torch.logsumexp(scores, -1)
    return (torch.exp(scores - lse.unsqueeze(-1)) @ v).to(q.dtype), lse


# q [1, num_q_heads, num_q, head_dim], k and v [1, num_kv_heads, num_k, head_dim]
WAYS: dict[str, Callable[..., Attention]] = {"cudnn": _attend_cudnn, "flash": _attend_flash, "math": _attend_math}
PREFERRED = {"cuda": ("cudnn", "flash", "triton"), "cpu": ("math",)}
_refused: set[tuple[str, torch.dtype, int]] = set()  # way, type of K and V, head_dim


def _prefill_gathered(
    way: str,
    q: torch.Tensor,
    page_table: torch.Tensor,
    start: int,
    end: int,
    num_kv_heads: int,
    sm_scale: float,
    kv: PagedKV,
    piece_tokens: int,
) -> torch.Tensor:
    heads = q.to(product_type(kv)).transpose(0, 1).unsqueeze(0)
    parts = []
    for first in (*range(0, start, piece_tokens), start):
        last = end if first == start else min(first + piece_tokens, start)
        k, v = gather_pages(page_table, first, last, num_kv_heads, q.shape[2], kv).unsqueeze(1)
        parts.append(WAYS[way](heads, k, v, sm_scale, first == start))
    return merge_parts(parts, q.dtype)


def dense_prefill(
    q: torch.Tensor,
    page_table: torch.Tensor,
    start: int,
    end: int,
    *,
    num_kv_heads: int,
    sm_scale: float,
    kv: PagedKV,
    pool: torch.Tensor | None = None,
    way: str | None = None,
    piece_tokens: int = PIECE_TOKENS,
) -> torch.Tensor:
    """Causal attention of the queries at positions [start, end) of one sequence to everything up to themselves.

    Args:
        q:            [end - start, num_q_heads, head_dim]
        page_table:   int64 [max_pages], addresses of the sequence's pages in this layer; K and V of [0, end) are in them.
        pool:         as for sparse_prefill, used where that is the way.
        way:          "cudnn", "flash", "triton" or "math"; None: the first of them that this machine does not refuse.
        piece_tokens: tokens before the chunk that are copied out of their pages at once.

    Returns:
        [end - start, num_q_heads, head_dim]
    """
    _, num_q_heads, head_dim = q.shape
    check_tensor("q", q, (end - start, num_q_heads, head_dim), FLOATS)
    check_tensor("page_table", page_table, (None,), (torch.int64,), q.device)
    if q.stride(2) != 1:
        q = q.contiguous()
    page_table = page_table.contiguous()
    for one in PREFERRED[q.device.type] if way is None else (way,):
        case = one, kv.dtype, head_dim
        if way is None and case in _refused:
            continue
        if one == "triton":
            break
        try:
            return _prefill_gathered(one, q, page_table, start, end, num_kv_heads, sm_scale, kv, piece_tokens)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if way is not None:
                raise
            logger.warning("dense attention by %s is refused here, taking the next way: %s", one, error)
            _refused.add(case)
    return sparse_prefill(
        q, page_table, None, first=start // 128 * 128, start=start, end=end, tile_size=128, num_kv_heads=num_kv_heads,
        slice_size=min(64, kv.page_size), window_size=1, sm_scale=sm_scale, kv=kv, pool=pool,
    )  # fmt: skip


class DensePrefill(Operator):
    """Dense prefill attention on a GPU."""

    forward = staticmethod(dense_prefill)


register("dense_prefill", "triton", DensePrefill)
