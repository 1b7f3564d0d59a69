"""`minmax` on a GPU: a slice is scored by an upper bound of q.k from its keys' per-channel minimum and maximum.

Source:    Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", 2024, arXiv 2406.10774.
Reference: kernels/summaries/vectors_ref.py
"""

from __future__ import annotations

from qsa.kernels.registry import register
from qsa.kernels.summaries.vectors_triton import VectorSummary


class MinMaxSummary(VectorSummary):
    """Per slice minimum and maximum of its keys, float32 [num_kv_heads, 2, head_dim]."""

    num_vectors = 2


register("minmax_summary", "triton", MinMaxSummary)
