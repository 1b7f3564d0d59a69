"""Which operator a `summary` setting names, and how many bytes it takes."""

from __future__ import annotations

from qsa.kernels.registry import get_operator
from qsa.kernels.summaries.base import Summary
from qsa.kernels.summaries.code import CodeCalibration


def make_summary(
    name: str,
    num_kv_heads: int,
    head_dim: int,
    slice_size: int,
    calibration: CodeCalibration | None,
    backend: str = "torch",
) -> Summary:
    """The summary of that name, set up.

    Raises:
        ValueError: `code` without a calibration, or one of another model.
    """
    summary: Summary = get_operator(f"{name}_summary", backend)
    summary.init(num_kv_heads=num_kv_heads, head_dim=head_dim, slice_size=slice_size, calibration=calibration)
    return summary


def summary_slice_bytes(name: str, num_kv_heads: int, head_dim: int, slice_size: int, code_dim: int | None) -> int:
    """Bytes that summarise one slice in one layer. code_dim: bytes of a token's code, needed for `code` alone."""
    if name != "code":
        return make_summary(name, num_kv_heads, head_dim, slice_size, None).slice_bytes
    if code_dim is None:
        raise ValueError("sparse.summary is code, but the code_dim of a calibration was not given")
    return slice_size * code_dim
