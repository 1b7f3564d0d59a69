"""Dense attention over paged K and V: the baseline that every sparse configuration is measured against.

In bfloat16 plain products are more than twice as fast as the fused operator, for one decode query over gathered keys and
for a prefill chunk in blocks of queries. Their scores are rounded to bfloat16, an error of the size that q and k have
themselves; they are for attending only, selection has scores of its own, in float32. Other types take the fused operator:
a decode query page by page, a chunk as everything before it (no mask) and itself (causal), merged by log-sum-exp.

Reference: kernels/dense_attention_ref.py
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qsa.kernels.registry import Operator, register

PLAIN_QUERIES = 64  # queries scored at once: their scores against a few thousand keys stay in the cache
MIN_PLAIN_KEYS = 256  # below, the fused operator starts faster
MAX_PLAIN_KEYS = 32768  # above, copies and scores would take too much memory


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sm_scale: float,
    *,
    is_causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and its log-sum-exp. q [batch, heads, num_q, head_dim]; k, v [batch, heads, num_k, head_dim].

    mask: float, added to the scores; broadcasts to [batch, heads, num_q, num_k].

    Returns:
        out [batch, heads, num_q, head_dim] in q's dtype, lse [batch, heads, num_q] in float32.
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(q, k, v, 0.0, is_causal, attn_mask=mask, scale=sm_scale)
    return out, lse


def merge_attention(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Attention over the union of disjoint key sets, from the attention over each. All outs [.., head_dim], lses [..]."""
    if len(outs) == 1:
        return outs[0]
    weights = torch.softmax(torch.stack(tuple(lses)), 0).unsqueeze(-1)  # [parts, .., 1]
    merged = outs[0] * weights[0]
    for out, weight in zip(outs[1:], weights[1:]):
        merged = torch.addcmul(merged, out.to(merged.dtype), weight)
    return merged.to(outs[0].dtype)


def dense_decode(q: torch.Tensor, pages: torch.Tensor, chunks: Sequence[int], seq_len: int, sm_scale: float) -> torch.Tensor:
    """One query against all `seq_len` tokens of its sequence.

    Args:
        q:      [num_q_heads, head_dim]
        pages:  [num_chunks, num_kv_heads, 2, page_size, head_dim]
        chunks: chunk number of every page of the sequence in this layer.

    Returns:
        [num_q_heads, head_dim]
    """
    _, num_kv_heads, _, page_size, head_dim = pages.shape
    grouped = q.view(1, num_kv_heads, -1, head_dim)  # the heads of a group are queries of one KV head
    if q.dtype == torch.bfloat16 and MIN_PLAIN_KEYS < seq_len <= MAX_PLAIN_KEYS:
        k, v = gather_tokens(pages, chunks, seq_len)
        scores = torch.baddbmm(q.new_zeros(1), grouped[0], k.transpose(1, 2), beta=0, alpha=sm_scale)
        return torch.bmm(torch.softmax(scores, -1), v).view(q.shape)
    outs, lses = [], []
    for page, first in enumerate(range(0, seq_len, page_size)):
        length = min(page_size, seq_len - first)
        page_kv = pages[chunks[page]]
        out, lse = attend(grouped, page_kv[None, :, 0, :length], page_kv[None, :, 1, :length], sm_scale)
        outs.append(out)
        lses.append(lse)
    return merge_attention(outs, lses).reshape(q.shape)


def gather_tokens(pages: torch.Tensor, chunks: Sequence[int], seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of tokens [0, seq_len), each [num_kv_heads, seq_len, head_dim], copied out of their pages.

    chunks: chunk numbers of at least the pages that hold these tokens.
    """
    _, num_kv_heads, _, page_size, head_dim = pages.shape
    out = pages.new_empty(2, num_kv_heads, seq_len, head_dim)
    for page, first in enumerate(range(0, seq_len, page_size)):
        length = min(page_size, seq_len - first)
        out[:, :, first : first + length] = pages[chunks[page], :, :, :length].transpose(0, 1)
    return out[0], out[1]


def attend_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float, mask: torch.Tensor, out: torch.Tensor
) -> None:
    """Attention by plain products, one KV head at a time.

    Args:
        q:    [num_kv_heads, num_q, head_dim]
        k, v: [num_kv_heads, num_k, head_dim], contiguous in each head
        mask: [num_kv_heads or 1, num_q, n], added to the scores of the last n keys
        out:  like q, written
    """
    for head in range(len(q)):
        keys = k[head].t()
        scores = torch.addmm(q.new_zeros(1), q[head], keys, beta=0, alpha=sm_scale)
        scores[:, keys.shape[1] - mask.shape[2] :].add_(mask[head % len(mask)])
        torch.mm(torch.softmax(scores, -1), v[head], out=out[head])


def dense_prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float) -> torch.Tensor:
    """Causal attention of the last `num_tokens` tokens of a sequence.

    Args:
        q:    [num_tokens, num_q_heads, head_dim]
        k, v: [num_kv_heads, seq_len, head_dim], the queries are the last tokens of it.

    Returns:
        [num_tokens, num_q_heads, head_dim]
    """
    if q.dtype == torch.bfloat16 and k.shape[1] <= MAX_PLAIN_KEYS:
        return _dense_prefill_plain(q, k, v, sm_scale)
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, seq_len, _ = k.shape
    group_size = num_q_heads // num_kv_heads
    past = seq_len - num_tokens
    heads = q.transpose(0, 1).contiguous()  # [num_q_heads, num_tokens, head_dim]
    own_k = k[:, past:].repeat_interleave(group_size, 0)
    own_v = v[:, past:].repeat_interleave(group_size, 0)
    out, lse = attend(heads[None], own_k[None], own_v[None], sm_scale, is_causal=True)
    if past:
        grouped = heads.view(1, num_kv_heads, group_size * num_tokens, head_dim)
        far, far_lse = attend(grouped, k[None, :, :past], v[None, :, :past], sm_scale)
        out = merge_attention((far.reshape(out.shape), out), (far_lse.reshape(lse.shape), lse))
    return out[0].transpose(0, 1)


def _dense_prefill_plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float) -> torch.Tensor:
    """dense_prefill in blocks of PLAIN_QUERIES queries, each against the keys up to its last one."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, seq_len, _ = k.shape
    group = num_q_heads // num_kv_heads
    past = seq_len - num_tokens
    out = torch.empty_like(q)
    for first in range(0, num_tokens, PLAIN_QUERIES):
        count = min(PLAIN_QUERIES, num_tokens - first)
        block = q[first : first + count].view(count, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
        block = block.reshape(num_kv_heads, group * count, head_dim)
        mask = q.new_full((count, count), -torch.inf).triu_(1).repeat(1, group, 1)
        attended = torch.empty_like(block)
        keys = past + first + count
        attend_heads(block, k[:, :keys], v[:, :keys], sm_scale, mask, attended)
        attended = attended.view(num_kv_heads, group, count, head_dim).permute(2, 0, 1, 3)
        out[first : first + count] = attended.reshape(count, num_q_heads, head_dim)
    return out


class DenseAttention(Operator):
    """Dense attention on the CPU; `forward` is the decode form, `forward_prefill` the other."""

    forward = staticmethod(dense_decode)

    @staticmethod
    def forward_prefill(
        q: torch.Tensor, pages: torch.Tensor, chunks: Sequence[int], seq_len: int, sm_scale: float
    ) -> torch.Tensor:
        """The last tokens of the sequence, q [num_tokens, num_q_heads, head_dim], against all up to themselves."""
        k, v = gather_tokens(pages, chunks, seq_len)
        return dense_prefill(q, k, v, sm_scale)


register("dense_attention", "torch", DenseAttention)
