"""Operators by name and backend, and sparse-attention configurations by integer id.

An operator is set up once (`init` allocates its workspace), called many times (`forward`) and taken down once
(`free`). A configuration is registered under a small integer, so that a request and a step plan carry a number
instead of an object.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

SUMMARIES = ("code", "sketch", "minmax", "mean")


@dataclass(frozen=True)
class SparseConfig:
    """What a query attends to: sink + the best slices of the whole context + the window. Sizes in tokens.

    Attributes:
        dense:             attend to everything; every other field is ignored.
        window_size:       the last tokens, always attended.
        sink_size:         the first tokens, always attended; at most `block_size_fine`.
        block_size_coarse: tokens of a block, the unit of the first selection with `propose="blocks"`.
        block_size_fine:   tokens of a slice, the unit of the second selection and of attention.
        top_k_coarse:      blocks kept by the first selection; skipped when the context has no more blocks.
        top_k_fine:        slices kept per query and list, beside sink and window.
        summary:           what a slice is scored by: code | sketch | minmax | mean.
        propose:           "slices": the scan proposes `candidate_factor * top_k_fine` slices straight away;
                           "blocks": the scan keeps `top_k_coarse` blocks, then slices inside them.
        candidate_factor:  size of the proposed pool as a multiple of `top_k_fine`; one number, or one a layer of the whole
                           model. Where it is 1 the pool is the list.
        rerank:            "exact": exact keys choose the final list from the pool at every step;
                           "none": the summary's own order does.
        reselect_every:    decode steps between two scans; one number, or one a layer of the whole model. The first
                           decode step of a request always scans.
        list_per:          "kv_head": one list a KV head; "layer": one list for all heads of a layer.
        prefill_tile:      queries that share one list during prefill.
        prefill_factor:    a tile's list is this many times `top_k_fine` slices.
        prefill_samples:   queries of a tile that choose its list, evenly spread, its last one among them.
    """

    dense: bool = False
    window_size: int = 512
    sink_size: int = 32
    block_size_coarse: int = 1024
    block_size_fine: int = 64
    top_k_coarse: int = 32
    top_k_fine: int = 16
    summary: str = "code"
    propose: Literal["slices", "blocks"] = "slices"
    candidate_factor: int | tuple[int, ...] = 4
    rerank: Literal["exact", "none"] = "exact"
    reselect_every: int | tuple[int, ...] = 1
    list_per: Literal["kv_head", "layer"] = "kv_head"
    prefill_tile: int = 64
    prefill_factor: int = 2
    prefill_samples: int = 16

    def __post_init__(self) -> None:
        if self.dense:
            return
        positive = ("window_size", "sink_size", "block_size_coarse", "block_size_fine", "top_k_coarse", "top_k_fine")
        for name in (*positive, "prefill_tile", "prefill_factor", "prefill_samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"sparse.{name} must be at least 1, got {getattr(self, name)}")
        if self.block_size_coarse % self.block_size_fine:
            raise ValueError(
                f"sparse.block_size_coarse ({self.block_size_coarse}) must be a multiple of"
                f" sparse.block_size_fine ({self.block_size_fine})"
            )
        if self.block_size_fine & (self.block_size_fine - 1):
            raise ValueError(f"sparse.block_size_fine must be a power of two, got {self.block_size_fine}")
        if self.sink_size > self.block_size_fine:
            raise ValueError(
                f"sparse.sink_size ({self.sink_size}) must not exceed sparse.block_size_fine ({self.block_size_fine})"
            )
        if self.summary not in SUMMARIES:
            raise ValueError(f"sparse.summary must be one of {', '.join(SUMMARIES)}, got {self.summary!r}")
        for name in ("reselect_every", "candidate_factor"):
            if getattr(self, name) == ():
                raise ValueError(f"sparse.{name} must be one number, or one a layer, got an empty list")
        scans = self.reselect_every if isinstance(self.reselect_every, tuple) else (self.reselect_every,)
        if min(scans) < 1:
            raise ValueError(f"sparse.reselect_every must be at least 1, got {self.reselect_every}")
        factors = self.candidate_factor if isinstance(self.candidate_factor, tuple) else (self.candidate_factor,)
        if min(factors) < 1:
            raise ValueError(f"sparse.candidate_factor must be at least 1, got {self.candidate_factor}")

    @property
    def token_budget(self) -> int:
        """Tokens attended per query and KV head when the context is longer than that."""
        return self.sink_size + self.top_k_fine * self.block_size_fine + self.window_size

    @property
    def sample_every(self) -> int:
        """In prefill every so many queries of a tile one takes part in choosing its list."""
        return max(1, self.prefill_tile // self.prefill_samples)

    def scan_interval(self, layer: int) -> int:
        """Decode steps between two scans of a layer (numbered in the whole model)."""
        return _of_layer("reselect_every", self.reselect_every, layer)

    def pool_size(self, layer: int) -> int:
        """Slices that a scan of a layer (numbered in the whole model) proposes."""
        factor = _of_layer("candidate_factor", self.candidate_factor, layer)
        return self.top_k_fine * (factor if self.rerank == "exact" else 1)

    @property
    def max_pool_size(self) -> int:
        """Slices that a scan proposes in the layer that proposes the most."""
        factor = self.candidate_factor if isinstance(self.candidate_factor, int) else max(self.candidate_factor)
        return self.top_k_fine * (factor if self.rerank == "exact" else 1)


def _of_layer(name: str, values: int | tuple[int, ...], layer: int) -> int:
    """A setting that is one number, or one a layer of the whole model."""
    if isinstance(values, int):
        return values
    if layer >= len(values):
        raise ValueError(f"sparse.{name} has {len(values)} entries, but the model has a layer {layer}")
    return values[layer]


DENSE_ID = 0
DEFAULT_SPARSE_ID = 1


class Operator:
    """A named computation. Subclasses allocate in `init`, compute in `forward`, and give everything back in `free`."""

    def init(self, **sizes: Any) -> None:
        """Allocate the workspace for the given sizes. Called once before `forward`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def free(self) -> None:
        """Give the workspace back. Calling it again does nothing."""


BACKENDS = ("torch", "triton")
_OPERATORS: dict[tuple[str, str], type[Operator]] = {}


def register(name: str, backend: str, operator: type[Operator]) -> None:
    """Make `operator` known as `name` on `backend` ("torch" or "triton").

    Raises:
        ValueError: another class already has that name on that backend.
    """
    known = _OPERATORS.get((name, backend))
    if known is not None and known is not operator:
        raise ValueError(f"operator {name!r} is already registered on backend {backend!r} as {known.__name__}")
    _OPERATORS[name, backend] = operator


@cache
def _import_backend(backend: str) -> None:
    """Import every operator file of a backend, so that it registers what it holds.

    A Triton file is called `NAME_triton.py`, a reference `NAME_ref.py`; every other file is for "torch".
    """
    if backend == "triton" and importlib.util.find_spec("triton") is None:
        raise ValueError("backend 'triton' needs the package triton, which is not installed")
    folder = Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).with_suffix("").parts
        if not name[-1].endswith("_ref") and name[-1].endswith("_triton") == (backend == "triton"):
            importlib.import_module(".".join(("qsa.kernels", *name)))


def get_operator(name: str, backend: str) -> Any:
    """A new, not yet initialised instance of an operator; what it takes and returns is in its class.

    Raises:
        ValueError: nothing is registered under that name on that backend; the message lists what is.
    """
    if backend in BACKENDS:
        _import_backend(backend)
    try:
        return _OPERATORS[name, backend]()
    except KeyError:
        known = ", ".join(sorted(f"{n}/{b}" for n, b in _OPERATORS))
        raise ValueError(f"no operator {name!r} on backend {backend!r}; registered: {known}") from None
