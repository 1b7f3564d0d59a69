"""The sparse configurations whose quality is measured: two geometries, every summary and proposal, and negative controls."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.quality_stage import NO_SINK
from qsa.kernels.registry import SparseConfig

# default: what a request gets. small: an 8K text has so many of its slices that the first stage is at work as at 256K.
GEOMETRIES = {
    "default": SparseConfig(),
    "small": SparseConfig(window_size=256, block_size_fine=32, sink_size=32, top_k_fine=16, candidate_factor=4),
}
DEFAULT = "code"
THIRD = "code, a third of the scans"
ARTICLE = "mean, blocks, no rerank"  # the article's selection
WINDOW = "window and sink"
SINKLESS = f"code{NO_SINK}"
CONTROLS = (ARTICLE, WINDOW, SINKLESS)  # each must fail
BUDGETS = (4, 8, 16, 32, 48)  # slices of 64 tokens for the curve of accuracy over attended tokens


def variants(geometry: str, scan_every: tuple[int, ...] | None) -> dict[str, SparseConfig]:
    """Everything that is compared in one geometry, by name, controls last."""
    base = GEOMETRIES[geometry]
    found = {DEFAULT: base, THIRD: replace(base, reselect_every=scan_every or 4)}
    found |= {
        "code, one list a layer": replace(base, list_per="layer"),
        "code, half the blocks": replace(base, propose="blocks", top_k_coarse=4),
        "sketch": replace(base, summary="sketch"),
        "minmax, no rerank": replace(base, summary="minmax", rerank="none"),
        "mean": replace(base, summary="mean"),
    }
    return found | controls(geometry)


def controls(geometry: str) -> dict[str, SparseConfig]:
    """Configurations that the bars must tell from a good one."""
    base = GEOMETRIES[geometry]
    return {
        ARTICLE: replace(base, summary="mean", propose="blocks", top_k_coarse=4, rerank="none"),
        WINDOW: window_only(base),
        SINKLESS: base,
    }


def window_only(base: SparseConfig) -> SparseConfig:
    """As little beside the window as there can be: the sink and one slice of 16 tokens, chosen by its mean key."""
    return replace(base, summary="mean", rerank="none", block_size_fine=16, sink_size=16, top_k_fine=1, candidate_factor=1)


def curve() -> dict[str, SparseConfig]:
    """The default geometry with more and less attended tokens, for three ways to choose them."""
    base = GEOMETRIES["default"]
    found = {}
    for slices in BUDGETS:
        for name, summary, rerank in (("code", "code", "exact"), ("minmax", "minmax", "none"), ("mean", "mean", "none")):
            found[f"{name} {slices}"] = replace(base, summary=summary, rerank=rerank, top_k_fine=slices)  # type: ignore[arg-type]
    return found


def scans_share(config: SparseConfig, num_layers: int) -> float:
    """Scans a decode step and layer, on average."""
    return sum(1 / config.scan_interval(layer) for layer in range(num_layers)) / num_layers
