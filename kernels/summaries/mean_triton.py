"""`mean` on a GPU: a slice is scored by its mean key (the article's summary).

Reference: kernels/summaries/vectors_ref.py
"""

from __future__ import annotations

from qsa.kernels.registry import register
from qsa.kernels.summaries.vectors_triton import VectorSummary


class MeanSummary(VectorSummary):
    """Per slice and KV head the mean of its keys, float32 [num_kv_heads, head_dim]."""

    num_vectors = 1
    block_pool = "mean"  # the score of the block's mean key, since q.k is linear


register("mean_summary", "triton", MeanSummary)
