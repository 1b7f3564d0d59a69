"""Which class a `summary` setting names, and how many bytes it takes."""

from __future__ import annotations

from qsa.kernels.summaries.base import Summary
from qsa.kernels.summaries.code import CodeCalibration, CodeSummary
from qsa.kernels.summaries.mean import MeanSummary
from qsa.kernels.summaries.minmax import MinMaxSummary
from qsa.kernels.summaries.sketch import SketchSummary

PLAIN: dict[str, type[MeanSummary] | type[MinMaxSummary] | type[SketchSummary]] = {
    "mean": MeanSummary,
    "minmax": MinMaxSummary,
    "sketch": SketchSummary,
}


def make_summary(name: str, num_kv_heads: int, head_dim: int, slice_size: int, calibration: CodeCalibration | None) -> Summary:
    """The summary of that name.

    Raises:
        ValueError: `code` without a calibration, or one of another model.
    """
    if name != "code":
        return PLAIN[name](num_kv_heads, head_dim, slice_size)
    if calibration is None:
        raise ValueError("sparse.summary is code, but no calibration was given: run `qsa calibrate` or use sketch")
    return CodeSummary(num_kv_heads, head_dim, slice_size, calibration)


def summary_slice_bytes(name: str, num_kv_heads: int, head_dim: int, slice_size: int, code_dim: int | None) -> int:
    """Bytes that summarise one slice in one layer. code_dim: bytes of a token's code, needed for `code` alone."""
    if name != "code":
        return PLAIN[name](num_kv_heads, head_dim, slice_size).slice_bytes
    if code_dim is None:
        raise ValueError("sparse.summary is code, but the code_dim of a calibration was not given")
    return slice_size * code_dim
