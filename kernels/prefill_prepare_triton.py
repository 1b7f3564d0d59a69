"""From the QKV product of a prefill chunk to what attention needs: each number is read once and written once.

Queries and keys get their norm (Qwen3) and rotation, K and V go into the pages; then the keys' codes are multiplied from the
keys just stored, on the tensor cores. A tile of tokens begins at a multiple of its size, so it lies in one page and in one
summary chunk.

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
from qsa.kernels.registry import Operator, register

MAX_COLUMNS = 128  # of a code, made by one program
TUNE = [
    *(
        dict(block_t=tokens, heads=heads, num_warps=warps)
        for tokens, warps in ((32, 4), (64, 8), (16, 4))
        for heads in (4, 1, 7)
    ),
    *(dict(block_n=tokens, block_d=numbers, num_stages=2) for tokens, numbers in ((64, 64), (32, 64), (128, 32))),
]


@triton.jit
def _load_heads(
    x_ptr, norm_ptr, head, mask_t, offs_h, eps, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr
):  # fmt: skip
    """The halves of a head of some tokens in float32, after its norm; x_ptr [tokens, 1] points to their rows."""
    mask_h = offs_h < HEAD_DIM // 2
    mask = mask_t[:, None] & mask_h[None, :]
    offs = head * HEAD_DIM + offs_h
    first = tl.load(x_ptr + offs[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + HEAD_DIM // 2 + offs[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        factor = head_factor(first, second, eps, HEAD_DIM)
        first *= factor * tl.load(norm_ptr + offs, mask=mask_h, other=0.0)[None, :]
        second *= factor * tl.load(norm_ptr + HEAD_DIM // 2 + offs, mask=mask_h, other=0.0)[None, :]
    return first, second


@triton.jit
def _load_turns(cos_ptr, sin_ptr, positions, mask_t, offs_h, HEAD_DIM: tl.constexpr):
    """Cosines and sines [tokens, half a head] of some positions."""
    mask = mask_t[:, None] & (offs_h < HEAD_DIM // 2)[None, :]
    offs = positions.to(tl.int64)[:, None] * HEAD_DIM + offs_h[None, :]
    return tl.load(cos_ptr + offs, mask=mask, other=0.0), tl.load(sin_ptr + HEAD_DIM // 2 + offs, mask=mask, other=0.0)


@triton.jit
def _store_heads(out_ptr, first, second, mask_t, offs_h, HEAD_DIM: tl.constexpr):
    """out_ptr [tokens, 1] points to where the head of each token begins."""
    mask = mask_t[:, None] & (offs_h < HEAD_DIM // 2)[None, :]
    tl.store(out_ptr + offs_h[None, :], first, mask=mask)
    tl.store(out_ptr + HEAD_DIM // 2 + offs_h[None, :], second, mask=mask)


@triton.jit
def _store_kv(
    page_ptr, kv_scale_ptr, first, second, row, mask_t, offs_h,
    KV_TYPE: tl.constexpr, PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_SCALE: tl.constexpr,
):  # fmt: skip
    """Row `row` of a page is K of head row / 2, or V where it is odd; page_ptr [tokens, 1] points to places of row 0."""
    if HAS_SCALE:
        scale = tl.load(kv_scale_ptr + row)
        first, second = first / scale, second / scale
    out_ptr = page_ptr + row * (PAGE_SIZE * HEAD_DIM)
    _store_heads(out_ptr, to_stored(first, KV_TYPE), to_stored(second, KV_TYPE), mask_t, offs_h, HEAD_DIM)


@triton.jit(do_not_specialize=["num_tokens", "start"])  # they differ from chunk to chunk: compiled once
def _prefill_prepare_kernel(
    qkv_ptr, cos_ptr, sin_ptr, page_table_ptr, head_norm_ptr, kv_scale_ptr, q_ptr, keys_ptr,
    num_tokens, start, eps,
    stride_x_t,
    KV_TYPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_KEYS: tl.constexpr,      # keys are wanted beside the pages too
    BLOCK_T: tl.constexpr,       # tokens of a tile
    BLOCK_H: tl.constexpr,       # half of HEAD_DIM, rounded up to a power of two
    HEADS: tl.constexpr,         # heads of a program: of q, of K or of V
):  # fmt: skip
    # grid: (cdiv(num_q_heads, HEADS) + 2 * cdiv(num_kv_heads, HEADS), tiles of BLOCK_T positions that the chunk touches)
    part = tl.program_id(0)
    Q_PARTS: tl.constexpr = (NUM_Q_HEADS + HEADS - 1) // HEADS
    KV_PARTS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    tile_start = (start // BLOCK_T + tl.program_id(1)) * BLOCK_T
    offs_h = tl.arange(0, BLOCK_H)
    positions = tile_start + tl.arange(0, BLOCK_T)
    tokens = (positions - start).to(tl.int64)
    mask_t = (tokens >= 0) & (tokens < num_tokens)
    x_ptr = qkv_ptr + (tokens * stride_x_t)[:, None]
    if part < Q_PARTS:
        cos, sin = _load_turns(cos_ptr, sin_ptr, positions, mask_t, offs_h, HEAD_DIM)
        out_ptr = q_ptr + (tokens * (NUM_Q_HEADS * HEAD_DIM))[:, None]
        first_head = part * HEADS
        for head in tl.range(first_head, tl.minimum(first_head + HEADS, NUM_Q_HEADS)):
            first, second = _load_heads(x_ptr, head_norm_ptr, head, mask_t, offs_h, eps, HEAD_DIM, HAS_NORM)
            first, second = rotate_halves(first, second, cos, sin)
            _store_heads(out_ptr + head * HEAD_DIM, first, second, mask_t, offs_h, HEAD_DIM)  # the store rounds
    else:
        address = tl.load(page_table_ptr + tile_start // PAGE_SIZE)
        page_ptr = tl.multiple_of(address.to(tl.pointer_type(KV_TYPE)), 16) + (positions % PAGE_SIZE * HEAD_DIM)[:, None]
        if part < Q_PARTS + KV_PARTS:
            cos, sin = _load_turns(cos_ptr, sin_ptr, positions, mask_t, offs_h, HEAD_DIM)
            first_head = (part - Q_PARTS) * HEADS
            for kv_head in tl.range(first_head, tl.minimum(first_head + HEADS, NUM_KV_HEADS)):
                head = NUM_Q_HEADS + kv_head
                first, second = _load_heads(x_ptr, head_norm_ptr, head, mask_t, offs_h, eps, HEAD_DIM, HAS_NORM)
                first, second = rotate_halves(first, second, cos, sin)
                if HAS_KEYS:
                    out_ptr = keys_ptr + ((tokens * NUM_KV_HEADS + kv_head) * HEAD_DIM)[:, None]
                    _store_heads(out_ptr, first, second, mask_t, offs_h, HEAD_DIM)
                _store_kv(
                    page_ptr, kv_scale_ptr, first, second, kv_head * 2, mask_t, offs_h,
                    KV_TYPE, PAGE_SIZE, HEAD_DIM, HAS_SCALE,
                )  # fmt: skip
        else:
            first_head = (part - Q_PARTS - KV_PARTS) * HEADS
            for kv_head in tl.range(first_head, tl.minimum(first_head + HEADS, NUM_KV_HEADS)):
                head = NUM_Q_HEADS + NUM_KV_HEADS + kv_head
                first, second = _load_heads(x_ptr, head_norm_ptr, head, mask_t, offs_h, eps, HEAD_DIM, False)
                _store_kv(
                    page_ptr, kv_scale_ptr, first, second, kv_head * 2 + 1, mask_t, offs_h,
                    KV_TYPE, PAGE_SIZE, HEAD_DIM, HAS_SCALE,
                )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "start"])
def _prefill_codes_kernel(
    keys_ptr, page_table_ptr, project_ptr, bias_ptr, summary_table_ptr,
    num_tokens, start,
    KEY_TYPE: tl.constexpr,
    IN_PAGES: tl.constexpr,      # keys are read from the pages, else from keys [num_tokens, num_kv_heads, head_dim]
    PAGE_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CODE_DIM: tl.constexpr,
    CHUNK_TOKENS: tl.constexpr,  # tokens whose codes one summary chunk holds
    BLOCK_T: tl.constexpr,       # tokens of a tile
    BLOCK_D: tl.constexpr,       # numbers of a head multiplied at a time
    BLOCK_C: tl.constexpr,       # columns of the code made by one program
):  # fmt: skip
    # grid: (cdiv(code_dim, BLOCK_C), tiles of BLOCK_T positions that the chunk touches)
    tile_start = (start // BLOCK_T + tl.program_id(1)) * BLOCK_T
    positions = tile_start + tl.arange(0, BLOCK_T)
    tokens = (positions - start).to(tl.int64)
    mask_t = (tokens >= 0) & (tokens < num_tokens)
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < CODE_DIM
    if IN_PAGES:
        address = tl.load(page_table_ptr + tile_start // PAGE_SIZE)
        first_ptr = tl.multiple_of(address.to(tl.pointer_type(KEY_TYPE)), 16)
        rows = (positions % PAGE_SIZE * HEAD_DIM)[:, None]
        stride_h = 2 * PAGE_SIZE * HEAD_DIM
    else:
        first_ptr = keys_ptr
        rows = (tokens * (NUM_KV_HEADS * HEAD_DIM))[:, None]
        stride_h = HEAD_DIM
    code = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    PARTS: tl.constexpr = (HEAD_DIM + BLOCK_D - 1) // BLOCK_D
    for part in tl.range(0, NUM_KV_HEADS * PARTS):
        offs_d = part % PARTS * BLOCK_D + tl.arange(0, BLOCK_D)
        mask_d = offs_d < HEAD_DIM
        key_ptr = first_ptr + part // PARTS * stride_h + rows + offs_d[None, :]
        keys = tl.load(key_ptr, mask=mask_t[:, None] & mask_d[None, :], other=0.0)
        offs_p = (part // PARTS * HEAD_DIM + offs_d)[:, None] * CODE_DIM + offs_c[None, :]
        project = tl.load(project_ptr + offs_p, mask=mask_d[:, None] & mask_c[None, :], other=0.0)  # [BLOCK_D, BLOCK_C]
        if tl.float32 == KEY_TYPE:
            code = tl.dot(keys, project, code, input_precision="ieee")
        else:  # a sum of numbers of the keys' type stands for a direction: all of its products are exact
            for _ in tl.static_range(3 if tl.bfloat16 == KEY_TYPE else 2):
                piece = project.to(KEY_TYPE)
                project -= piece.to(tl.float32)
                code = tl.dot(keys, piece, code)
    code += tl.load(bias_ptr + offs_c, mask=mask_c, other=0.0)[None, :]
    numbers = round_to_even(tl.minimum(tl.maximum(code, -127.0), 127.0)).to(tl.int8)
    chunk = tl.load(summary_table_ptr + tile_start // CHUNK_TOKENS)
    out_ptr = tl.multiple_of(chunk.to(tl.pointer_type(tl.int8)), 16)
    offs_o = (positions % CHUNK_TOKENS * CODE_DIM)[:, None] + offs_c[None, :]
    tl.store(out_ptr + offs_o, numbers, mask=mask_t[:, None] & mask_c[None, :])


def prefill_prepare(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    page_table: torch.Tensor,
    start: int,
    *,
    num_kv_heads: int,
    head_dim: int,
    kv_dtype: torch.dtype,
    page_size: int,
    head_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    kv_scale: torch.Tensor | None = None,
    code: CodeWrite | None = None,
    block_t: int = 32,
    heads: int = 4,
    num_warps: int = 4,
    block_n: int = 64,
    block_d: int = 32,
    num_stages: int = 3,
) -> torch.Tensor:
    """Turn the tokens of a chunk of one sequence, and write their K, V and codes.

    Args:
        qkv:        [num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim], query heads first, biases added.
        page_table: int64 [max_pages], address of each page of the sequence in this layer.
        start:      position of the chunk's first token.
        code:       as for decode_prepare, with the summary_table of this sequence, [max_summary_chunks].

    The other arguments are those of decode_prepare. A tile has `block_t` tokens and `heads` heads, one of codes `block_n`
    tokens, multiplied `block_d` numbers at a time.

    Returns:
        q [num_tokens, num_q_heads, head_dim] in the type of qkv.
    """
    num_tokens = qkv.shape[0]
    sizes = check_prepare(
        qkv, cos, sin,
        num_kv_heads=num_kv_heads, head_dim=head_dim, kv_dtype=kv_dtype, head_norm=head_norm, kv_scale=kv_scale, code=code,
    )  # fmt: skip
    check_tensor("page_table", page_table, (None,), (torch.int64,), qkv.device)
    if not page_table.is_contiguous():
        raise ValueError("page_table must be contiguous")
    if not 0 <= start <= cos.shape[0] - num_tokens:
        raise ValueError(f"cos has {cos.shape[0]} positions, but {start} to {start + num_tokens} are wanted")
    q = torch.empty(num_tokens, sizes.num_q_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    is_float8 = kv_dtype == torch.float8_e4m3fn
    keys = None  # what the codes are made from, where the pages do not hold it
    if code is not None and is_float8:
        keys = torch.empty(num_tokens, num_kv_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if num_tokens == 0:
        return q
    block_t, block_n = min(block_t, page_size), min(block_n, page_size)
    num_parts = triton.cdiv(sizes.num_q_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads)
    _prefill_prepare_kernel[(num_parts, triton.cdiv(start % block_t + num_tokens, block_t))](
        qkv, cos, sin, page_table, head_norm, kv_scale, q, keys,
        num_tokens, start, eps,
        qkv.stride(0),
        KV_TYPE=stored_type(kv_dtype), PAGE_SIZE=page_size, NUM_Q_HEADS=sizes.num_q_heads, NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim, HAS_NORM=head_norm is not None, HAS_SCALE=kv_scale is not None, HAS_KEYS=keys is not None,
        BLOCK_T=block_t, BLOCK_H=triton.next_power_of_2(head_dim // 2), HEADS=heads, num_warps=num_warps,
    )  # fmt: skip
    if code is not None:
        check_tensor("code.summary_table", code.summary_table, (None,), (torch.int64,), qkv.device)
        block_c = max(16, min(MAX_COLUMNS, triton.next_power_of_2(sizes.code_dim)))
        _prefill_codes_kernel[(triton.cdiv(sizes.code_dim, block_c), triton.cdiv(start % block_n + num_tokens, block_n))](
            keys, page_table, code.project, code.bias, code.summary_table,
            num_tokens, start,
            KEY_TYPE=key_type(kv_dtype, qkv.dtype), IN_PAGES=keys is None, PAGE_SIZE=page_size, NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim, CODE_DIM=sizes.code_dim, CHUNK_TOKENS=sizes.chunk_tokens,
            BLOCK_T=block_n, BLOCK_D=min(block_d, triton.next_power_of_2(head_dim)), BLOCK_C=block_c,
            num_warps=4, num_stages=num_stages,
        )  # fmt: skip
    return q


class PrefillPrepare(Operator):
    """prefill_prepare under its name."""

    forward = staticmethod(prefill_prepare)


register("prefill_prepare", "triton", PrefillPrepare)
