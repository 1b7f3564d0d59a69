"""From the QKV product of a decode step to what attention needs, in one launch.

Queries and keys get their norm (Qwen3) and rotation; K and V of the new tokens go into their pages, the new keys' codes into
the summaries, and the queries become the whole numbers that the scan of codes multiplies with.

A program makes one head of one sequence, or some columns of its code, for which it turns all the keys once more: that costs
less than waiting for those who store them. Loads that need no position are issued before it is known.

Reference: kernels/decode_prepare_ref.py, and kernels/summaries/code_ref.py for the codes.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qsa.kernels.checks import check_tensor
from qsa.kernels.kv_write_triton import (
    CodeWrite,
    check_prepare,
    head_factor,
    key_type,
    rotate_halves,
    round_to_even,
    stored_type,
    to_stored,
)
from qsa.kernels.paged_kv import DecodeInputs
from qsa.kernels.registry import Operator, register

TUNE = [dict(num_warps=warps, block_c=columns) for warps in (4, 8, 2) for columns in (16, 8, 32)]


@triton.jit
def _load_head(row_ptr, norm_ptr, head, offs_h, eps, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr):
    """The halves of a head in float32, after its norm."""
    mask_h = offs_h < HEAD_DIM // 2
    offs = head * HEAD_DIM + offs_h
    first = tl.load(row_ptr + offs, mask=mask_h, other=0.0).to(tl.float32)
    second = tl.load(row_ptr + HEAD_DIM // 2 + offs, mask=mask_h, other=0.0).to(tl.float32)
    if HAS_NORM:
        factor = head_factor(first, second, eps, HEAD_DIM)
        first *= factor * tl.load(norm_ptr + offs, mask=mask_h, other=0.0)
        second *= factor * tl.load(norm_ptr + HEAD_DIM // 2 + offs, mask=mask_h, other=0.0)
    return first, second


@triton.jit
def _store_head(head_ptr, first, second, offs_h, HEAD_DIM: tl.constexpr):
    mask_h = offs_h < HEAD_DIM // 2
    tl.store(head_ptr + offs_h, first, mask=mask_h)
    tl.store(head_ptr + HEAD_DIM // 2 + offs_h, second, mask=mask_h)


@triton.jit
def _make_query(
    row_ptr, cos_ptr, sin_ptr, head_norm_ptr, query_ptr, q_ptr, numbers_ptr, scales_ptr, is_used, row, head, eps,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, CODE_DIM: tl.constexpr, HAS_NORM: tl.constexpr, HAS_QUERY: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Store query head `head` as row `row` of q, and as whole numbers; zeros where the sequence is not used."""
    HALF: tl.constexpr = HEAD_DIM // 2
    offs_h = tl.arange(0, BLOCK_H)
    mask_h = offs_h < HALF
    offs_c = tl.arange(0, BLOCK_Q)
    mask_c = offs_c < CODE_DIM
    if HAS_QUERY:  # loaded first, since it waits for nothing
        weight_ptr = query_ptr + (head // GROUP * HEAD_DIM + offs_h)[:, None] * CODE_DIM + offs_c[None, :]
        mask_w = mask_h[:, None] & mask_c[None, :]
        first_weight = tl.load(weight_ptr, mask=mask_w, other=0.0)  # [BLOCK_H, BLOCK_Q]
        second_weight = tl.load(weight_ptr + HALF * CODE_DIM, mask=mask_w, other=0.0)
    first, second = _load_head(row_ptr, head_norm_ptr, head, offs_h, eps, HEAD_DIM, HAS_NORM)
    cos = tl.load(cos_ptr + offs_h, mask=mask_h, other=0.0)
    sin = tl.load(sin_ptr + offs_h, mask=mask_h, other=0.0)
    first, second = rotate_halves(first, second, cos, sin)
    first = tl.where(is_used, first, 0.0).to(q_ptr.dtype.element_ty)
    second = tl.where(is_used, second, 0.0).to(q_ptr.dtype.element_ty)
    _store_head(q_ptr + row * HEAD_DIM, first, second, offs_h, HEAD_DIM)
    if HAS_QUERY:
        products = first.to(tl.float32)[:, None] * first_weight + second.to(tl.float32)[:, None] * second_weight
        direction = tl.sum(products, 0)  # [BLOCK_Q]
        scale = tl.max(tl.abs(direction), 0) / 127.0
        numbers = round_to_even(direction / tl.where(scale > 0, scale, 1.0)).to(tl.int8)
        tl.store(numbers_ptr + row * CODE_DIM + offs_c, numbers, mask=mask_c)
        tl.store(scales_ptr + row, scale)


@triton.jit
def _write_kv(
    row_ptr, cos_ptr, sin_ptr, head_norm_ptr, kv_scale_ptr, address, place, kv_head, eps,
    KV_TYPE: tl.constexpr, PAGE_SIZE: tl.constexpr, NUM_Q_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr, HAS_SCALE: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Store K and V of a head at a place of the page at `address`."""
    offs_h = tl.arange(0, BLOCK_H)
    mask_h = offs_h < HEAD_DIM // 2
    head = NUM_Q_HEADS + kv_head
    first, second = _load_head(row_ptr, head_norm_ptr, head, offs_h, eps, HEAD_DIM, HAS_NORM)
    first_v, second_v = _load_head(row_ptr, head_norm_ptr, head + NUM_KV_HEADS, offs_h, eps, HEAD_DIM, False)
    cos = tl.load(cos_ptr + offs_h, mask=mask_h, other=0.0)
    sin = tl.load(sin_ptr + offs_h, mask=mask_h, other=0.0)
    first, second = rotate_halves(first, second, cos, sin)
    if HAS_SCALE:
        k_scale = tl.load(kv_scale_ptr + kv_head * 2)
        v_scale = tl.load(kv_scale_ptr + kv_head * 2 + 1)
        first, second = first / k_scale, second / k_scale
        first_v, second_v = first_v / v_scale, second_v / v_scale
    page_ptr = tl.multiple_of(address.to(tl.pointer_type(KV_TYPE)), 16)
    k_ptr = page_ptr + (kv_head.to(tl.int64) * (2 * PAGE_SIZE) + place) * HEAD_DIM
    _store_head(k_ptr, to_stored(first, KV_TYPE), to_stored(second, KV_TYPE), offs_h, HEAD_DIM)
    v_ptr = k_ptr + PAGE_SIZE * HEAD_DIM
    _store_head(v_ptr, to_stored(first_v, KV_TYPE), to_stored(second_v, KV_TYPE), offs_h, HEAD_DIM)


@triton.jit
def _write_code(
    row_ptr, cos_ptr, sin_ptr, head_norm_ptr, project_ptr, bias_ptr, address, place, column, eps,
    KEY_TYPE: tl.constexpr, NUM_Q_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    CODE_DIM: tl.constexpr, HAS_NORM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Store columns [column, column + BLOCK_C) of the token's code at a place of the summary chunk at `address`."""
    HALF: tl.constexpr = HEAD_DIM // 2
    offs_w = tl.arange(0, BLOCK_G * BLOCK_H)  # BLOCK_G heads' halves, end to end
    offs_h = offs_w % BLOCK_H
    mask_h = offs_h < HALF
    offs_c = column + tl.arange(0, BLOCK_C)
    mask_c = offs_c < CODE_DIM
    cos = tl.load(cos_ptr + offs_h, mask=mask_h, other=0.0)
    sin = tl.load(sin_ptr + offs_h, mask=mask_h, other=0.0)
    code = tl.load(bias_ptr + offs_c, mask=mask_c, other=0.0)
    for first_head in tl.range(0, NUM_KV_HEADS, BLOCK_G):
        heads = first_head + offs_w // BLOCK_H
        mask_k = (heads < NUM_KV_HEADS) & mask_h
        mask_w = mask_k[:, None] & mask_c[None, :]
        weight_ptr = project_ptr + (heads * HEAD_DIM + offs_h)[:, None] * CODE_DIM + offs_c[None, :]
        first_weight = tl.load(weight_ptr, mask=mask_w, other=0.0)  # [BLOCK_G * BLOCK_H, BLOCK_C]
        second_weight = tl.load(weight_ptr + HALF * CODE_DIM, mask=mask_w, other=0.0)
        offs_x = (NUM_Q_HEADS + heads) * HEAD_DIM + offs_h
        first = tl.load(row_ptr + offs_x, mask=mask_k, other=0.0).to(tl.float32)
        second = tl.load(row_ptr + offs_x + HALF, mask=mask_k, other=0.0).to(tl.float32)
        if HAS_NORM:
            first_heads = tl.reshape(first, [BLOCK_G, BLOCK_H])
            second_heads = tl.reshape(second, [BLOCK_G, BLOCK_H])
            factor = tl.broadcast_to(head_factor(first_heads, second_heads, eps, HEAD_DIM), [BLOCK_G, BLOCK_H])
            factor = tl.reshape(factor, [BLOCK_G * BLOCK_H])
            first *= factor * tl.load(head_norm_ptr + offs_x, mask=mask_k, other=0.0)
            second *= factor * tl.load(head_norm_ptr + offs_x + HALF, mask=mask_k, other=0.0)
        first, second = rotate_halves(first, second, cos, sin)
        first, second = first.to(KEY_TYPE).to(tl.float32), second.to(KEY_TYPE).to(tl.float32)
        code += tl.sum(first[:, None] * first_weight + second[:, None] * second_weight, 0)
    numbers = round_to_even(tl.minimum(tl.maximum(code, -127.0), 127.0)).to(tl.int8)
    tl.store(address.to(tl.pointer_type(tl.int8)) + place * CODE_DIM + offs_c, numbers, mask=mask_c)


@triton.jit
def _decode_prepare_kernel(
    qkv_ptr, cos_ptr, sin_ptr, page_table_ptr, seq_lens_ptr, head_norm_ptr, kv_scale_ptr,
    project_ptr, bias_ptr, summary_table_ptr, query_ptr, q_ptr, numbers_ptr, scales_ptr,
    eps,
    stride_x_b, stride_pt_b, stride_st_b,
    KV_TYPE: tl.constexpr,
    KEY_TYPE: tl.constexpr,      # of the keys that codes are made from
    PAGE_SIZE: tl.constexpr,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_QUERY: tl.constexpr,
    HAS_CODE: tl.constexpr,
    CODE_DIM: tl.constexpr,
    CHUNK_TOKENS: tl.constexpr,  # tokens whose codes one summary chunk holds
    BLOCK_H: tl.constexpr,       # half of HEAD_DIM, rounded up to a power of two
    BLOCK_Q: tl.constexpr,       # CODE_DIM rounded up to a power of two
    BLOCK_C: tl.constexpr,       # columns of a new code made by one program
    BLOCK_G: tl.constexpr,       # KV heads multiplied with their columns at a time
):  # fmt: skip
    # grid: (num_q_heads + num_kv_heads + cdiv(code_dim, BLOCK_C), batch)
    part = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    position = tl.load(seq_lens_ptr + batch).to(tl.int32) - 1
    is_used = position >= 0
    row_ptr = qkv_ptr + batch * stride_x_b
    cos_ptr += tl.maximum(position, 0).to(tl.int64) * HEAD_DIM
    sin_ptr += tl.maximum(position, 0).to(tl.int64) * HEAD_DIM + HEAD_DIM // 2
    if part < NUM_Q_HEADS:
        _make_query(
            row_ptr, cos_ptr, sin_ptr, head_norm_ptr, query_ptr, q_ptr, numbers_ptr, scales_ptr,
            is_used, batch * NUM_Q_HEADS + part, part, eps,
            NUM_Q_HEADS // NUM_KV_HEADS, HEAD_DIM, CODE_DIM, HAS_NORM, HAS_QUERY, BLOCK_H, BLOCK_Q,
        )  # fmt: skip
    elif is_used:
        if part < NUM_Q_HEADS + NUM_KV_HEADS:
            address = tl.load(page_table_ptr + batch * stride_pt_b + position // PAGE_SIZE)
            _write_kv(
                row_ptr, cos_ptr, sin_ptr, head_norm_ptr, kv_scale_ptr,
                address, position % PAGE_SIZE, part - NUM_Q_HEADS, eps,
                KV_TYPE, PAGE_SIZE, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, HAS_NORM, HAS_SCALE, BLOCK_H,
            )  # fmt: skip
        elif HAS_CODE:
            address = tl.load(summary_table_ptr + batch * stride_st_b + position // CHUNK_TOKENS)
            _write_code(
                row_ptr, cos_ptr, sin_ptr, head_norm_ptr, project_ptr, bias_ptr,
                address, position % CHUNK_TOKENS, (part - NUM_Q_HEADS - NUM_KV_HEADS) * BLOCK_C, eps,
                KEY_TYPE, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, CODE_DIM, HAS_NORM, BLOCK_H, BLOCK_G, BLOCK_C,
            )  # fmt: skip


def decode_prepare(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    num_kv_heads: int,
    head_dim: int,
    kv_dtype: torch.dtype,
    page_size: int,
    head_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    kv_scale: torch.Tensor | None = None,
    code: CodeWrite | None = None,
    query: torch.Tensor | None = None,
    block_c: int = 16,
    num_warps: int | None = None,
) -> DecodeInputs:
    """Turn the new token of every sequence, and write its K, V and code.

    Args:
        qkv:        [batch, (num_q_heads + 2 * num_kv_heads) * head_dim], query heads first, biases added.
        cos, sin:   float32 [max_model_len, head_dim] from rope_table, sin through signed_sine; the halves of a row share
                    their angles, so one half of each is read.
        page_table: int64 [batch, max_pages], address of each page `[num_kv_heads][K|V][page_size][head_dim]` of this layer.
        seq_lens:   int32 or int64 [batch], the new token included; a row with 0 writes nothing and yields zeros.
        kv_dtype:   type of K and V in the pages; float8_e4m3fn saturates at 448.
        head_norm:  float32 [num_q_heads + num_kv_heads, head_dim], weights of an RMSNorm with `eps` before the rotation.
        kv_scale:   float32 [num_kv_heads, 2], what K and V are divided by before they become float8_e4m3fn.
        code:       None: no codes are kept. A code is made from the key as it is stored; with float8_e4m3fn, from the
                    unscaled key in the type of qkv.
        query:      float32 [num_kv_heads, head_dim, code_dim]; None: no numbers are wanted.

    Returns:
        q in the type of qkv; numbers and scales where `query` is given.
    """
    batch = qkv.shape[0]
    sizes = check_prepare(
        qkv, cos, sin,
        num_kv_heads=num_kv_heads, head_dim=head_dim, kv_dtype=kv_dtype, head_norm=head_norm, kv_scale=kv_scale, code=code,
    )  # fmt: skip
    check_tensor("page_table", page_table, (batch, None), (torch.int64,), qkv.device)
    check_tensor("seq_lens", seq_lens, (batch,), (torch.int32, torch.int64), qkv.device)
    if page_table.stride(1) != 1:
        raise ValueError("page_table must be contiguous in its last axis")
    code_dim, num_heads = sizes.code_dim, sizes.num_q_heads + num_kv_heads
    project = bias = numbers = scales = None
    summary_table = page_table  # not read without codes
    if code is not None:
        project, bias, summary_table = code.project, code.bias, code.summary_table
        check_tensor("code.summary_table", summary_table, (batch, None), (torch.int64,), qkv.device)
        num_parts = num_heads + triton.cdiv(code_dim, block_c)
    else:
        num_parts = num_heads
    if query is not None:
        code_dim = query.shape[-1] if code is None else code_dim
        check_tensor("query", query, (num_kv_heads, head_dim, code_dim), (torch.float32,), qkv.device)
        if not query.is_contiguous():
            raise ValueError("query must be contiguous")
        numbers = torch.empty(batch, sizes.num_q_heads, code_dim, dtype=torch.int8, device=qkv.device)
        scales = torch.empty(batch, sizes.num_q_heads, dtype=torch.float32, device=qkv.device)
    q = torch.empty(batch, sizes.num_q_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    block_h, block_q = triton.next_power_of_2(head_dim // 2), triton.next_power_of_2(code_dim)
    _decode_prepare_kernel[(num_parts, batch)](
        qkv, cos, sin, page_table, seq_lens, head_norm, kv_scale, project, bias, summary_table, query, q, numbers, scales,
        eps,
        qkv.stride(0), page_table.stride(0), summary_table.stride(0),
        KV_TYPE=stored_type(kv_dtype), KEY_TYPE=key_type(kv_dtype, qkv.dtype), PAGE_SIZE=page_size,
        NUM_Q_HEADS=sizes.num_q_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        HAS_NORM=head_norm is not None, HAS_SCALE=kv_scale is not None, HAS_QUERY=query is not None, HAS_CODE=code is not None,
        CODE_DIM=code_dim, CHUNK_TOKENS=sizes.chunk_tokens,
        BLOCK_H=block_h, BLOCK_Q=block_q, BLOCK_C=block_c,
        BLOCK_G=min(triton.next_power_of_2(num_kv_heads), max(1, 256 // block_h)),
        num_warps=num_warps or max(4, min(16, block_h * block_q // 1024)),  # directions stay in registers
    )  # fmt: skip
    return DecodeInputs(q, numbers, scales)


class DecodePrepare(Operator):
    """decode_prepare under its name."""

    forward = staticmethod(decode_prepare)


register("decode_prepare", "triton", DecodePrepare)
