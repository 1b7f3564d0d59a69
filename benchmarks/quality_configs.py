"""The sparse configurations whose quality is measured: two geometries, every summary and proposal, and negative controls."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.quality_stage import NO_SINK
from qsa.config import PRESETS, SparseSettings
from qsa.kernels.registry import SparseConfig

# default: what a request gets. small: an 8K text has so many of its slices that the first stage is at work as at 256K.
GEOMETRIES = {
    "default": SparseConfig(),
    "small": SparseConfig(window_size=256, block_size_fine=32, sink_size=32, top_k_fine=16, candidate_factor=4),
}
DEFAULT = "code"
CALIBRATED = "code, scans as calibrated"
UNRANKED = "no rerank"
ARTICLE = "mean, blocks, no rerank"  # the article's selection
WINDOW = "window and sink"
SINKLESS = f"code{NO_SINK}"
CONTROLS = (ARTICLE, WINDOW, SINKLESS)  # each must fail
NO_PRESET = "quality"  # the preset that is the default
PREFILLS = (  # queries a tile, of them those that choose its list, its slices as a multiple of a decode list's
    *((64, 16, 2), (64, 4, 2), (64, 1, 2), (64, 16, 1)),
    *((128, 32, 2), (128, 8, 2), (128, 4, 2), (128, 2, 2), (128, 1, 2)),
    *((128, 8, 4), (128, 2, 4), (128, 1, 4), (128, 8, 1), (128, 2, 1), (128, 1, 1)),
)
TWO = ("rcu", "alice29")  # the texts of the small geometry's bar
BUDGETS = (4, 8, 16, 32, 48)  # slices of 64 tokens for the curve of accuracy over attended tokens


def variants(geometry: str, scan_every: tuple[int, ...] | None) -> dict[str, SparseConfig]:
    """Everything that is compared in one geometry, by name, controls last."""
    base = GEOMETRIES[geometry]
    found = {DEFAULT: base, CALIBRATED: replace(base, reselect_every=scan_every or 4)}
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


def presets(geometry: str, scan_every: tuple[int, ...]) -> dict[str, SparseConfig]:
    """The presets in one geometry, and no rerank at all, by name; the default preset has its name in `variants`."""
    sizes = ("window_size", "block_size_fine", "sink_size", "top_k_fine")
    own = {name: getattr(GEOMETRIES[geometry], name) for name in sizes}
    resolved = {name: SparseSettings(preset=name, **own).resolve(True, scan_every) for name in PRESETS}
    found = {CALIBRATED if name == NO_PRESET else name: config for name, config in resolved.items()}
    return found | {UNRANKED: replace(found["fast"], candidate_factor=1, rerank="none")}


def pareto(scan_every: tuple[int, ...]) -> dict[str, SparseConfig]:
    """Choices of all costs in the small geometry, where the first stage is at work as at 256K.

    A name says how many lists' worth of slices are proposed: to the layers that scan often / to those that do so most rarely;
    1 is not reranked. Behind it how often the three kinds of layers scan, where it is not as calibrated.
    """
    base, found = GEOMETRIES["small"], {}
    kinds = sorted(set(scan_every))

    def add(often: int, rare: int, scans: tuple[int, ...] | None = None, times: int = 1) -> None:
        intervals = tuple((scans or kinds)[kinds.index(interval)] for interval in scan_every)
        factors = tuple(rare if interval == kinds[-1] else often for interval in scan_every)
        name = f"{often}/{rare}" if often != rare else f"{often}"
        name += f" of a list {times} times as long" if times > 1 else ""
        name += f", scan {'/'.join(map(str, scans))}" if scans else ""
        found[name] = replace(base, reselect_every=intervals, candidate_factor=factors, top_k_fine=times * base.top_k_fine)

    for often, rare in ((1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (4, 2), (6, 2), (3, 3), (4, 4)):
        add(often, rare)
    for scans in ((1, 1, 1), (1, 1, 16), (1, 2, 16), (1, 4, 32), (1, 4, 8), (2, 4, 16)):
        add(4, 2, scans)
    add(4, 4, (1, 1, 1))
    add(3, 1, (1, 1, 16))
    for often in (1, 2, 3):
        add(often, 1, (2, 4, 16))
    add(1, 1, times=2)
    return found


def prefills(geometry: str, scan_every: tuple[int, ...]) -> dict[str, SparseConfig]:
    """Ways to choose a prefill tile's list: the tile, the queries of it that are asked, the list as a multiple."""
    base = replace(GEOMETRIES["small" if geometry.endswith("small") else "default"], reselect_every=scan_every)
    found = {}
    for tile, samples, factor in PREFILLS:
        name = f"tile {tile}, {samples} samples, {factor} lists"
        found[name] = replace(base, prefill_tile=tile, prefill_samples=samples, prefill_factor=factor)
    return found
