"""Comparison against an oracle: the tolerance is measured, twice the reference's own error in the dtype under test."""

from __future__ import annotations

import torch


def assert_matches_oracle(name: str, got: torch.Tensor, oracle: torch.Tensor, peer: torch.Tensor, factor: float = 2.0) -> None:
    """Fail when `got` is more than `factor` times as far from the oracle as `peer`.

    oracle: the reference on float64 inputs.   peer: the reference in the dtype under test.
    """
    assert got.shape == oracle.shape, f"{name}: shape {list(got.shape)}, oracle {list(oracle.shape)}"
    assert torch.isfinite(got).all(), f"{name}: result is not finite"
    error = (got.double() - oracle.double()).abs()
    allowed = factor * (peer.double() - oracle.double()).abs().max() + 1e-6 * oracle.double().abs().max()
    worst = error.argmax()
    index = [int(i) for i in torch.unravel_index(worst, error.shape)]
    assert error.max() <= allowed, (
        f"{name}: error {error.max():.3e} at {index} exceeds {allowed:.3e}"
        f" (got {got.flatten()[worst]:.6g}, oracle {oracle.flatten()[worst]:.6g})"
    )
