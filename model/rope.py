"""Rotary position embedding: every scaling kind the supported families use, as one table of cosines and sines.

K is cached after RoPE, so a sequence cannot change its frequencies as it grows. Where a kind depends on the length
(`dynamic`, `longrope`), the choice is made once, by the length of the table (the engine's max_model_len): up to the
original length the unscaled (short) frequencies, beyond it those for that length. A sequence whose length equals the
table's thus sees what the formula prescribes for it.

Sources: linear (kaiokendev), dynamic NTK (bloc97, emozilla), YaRN (arXiv 2309.00071), LongRoPE (arXiv 2402.13753),
llama3 (Llama 3.1's reference code); key names as in Hugging Face configurations, old and new.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from qsa.errors import CheckpointError, UnsupportedModelError

KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
ALIASES = {"su": "longrope", "none": "default", "mrope": "mrope"}
_ROWS = 16384  # rows of the table computed at a time, so that float64 temporaries stay small


@dataclass(frozen=True)
class RopeSpec:
    """Which rotation a model uses; fields that a kind does not use keep their defaults.

    Attributes:
        original_max_len: length in tokens the model was pretrained at, before scaling.
        attention_factor: factor on cosines and sines; None: what the kind's paper prescribes.
        short_factor, long_factor: longrope's divisors of the frequencies, [head_dim / 2].
        freq_factors: divisors of the frequencies given as numbers, as GGUF files do for llama3, [head_dim / 2].
    """

    head_dim: int
    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_len: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    freq_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnsupportedModelError(f"rope kind {self.kind!r} is not supported; supported: {', '.join(KINDS)}")
        if self.head_dim <= 0 or self.head_dim % 2:
            raise UnsupportedModelError(f"head_dim must be even and positive for rotary embeddings, found {self.head_dim}")
        if not self.theta > 1 or not self.factor > 0:
            raise CheckpointError(f"rope theta must be above 1 and factor positive, found {self.theta} and {self.factor}")
        if self.kind in ("dynamic", "yarn", "llama3", "longrope") and self.original_max_len <= 0:
            raise CheckpointError(f"rope kind {self.kind} needs original_max_position_embeddings")
        for name in ("short_factor", "long_factor", "freq_factors"):
            values = getattr(self, name)
            wanted = self.kind == "longrope" and name != "freq_factors"
            if (wanted or values) and len(values) != self.head_dim // 2:
                raise CheckpointError(f"rope {name} must have head_dim / 2 = {self.head_dim // 2} numbers, found {len(values)}")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], head_dim: int) -> RopeSpec:
        """Read `rope_parameters` (new), or `rope_scaling` and `rope_theta` (old), of a config.json.

        Raises:
            UnsupportedModelError: a kind, a partial rotation or a rotation per layer type that is not supported.
            CheckpointError: a key that the kind needs is missing.
        """
        given = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        if any(isinstance(value, Mapping) for value in given.values()):
            raise UnsupportedModelError(f"rope_parameters per layer type ({', '.join(sorted(given))}) are not supported")
        kind = given.get("rope_type") or given.get("type") or "default"
        kind = ALIASES.get(kind, kind)
        if kind not in KINDS:
            raise UnsupportedModelError(f"rope kind {kind!r} is not supported; supported: {', '.join(KINDS)}")
        partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if partial not in (None, 1, 1.0):
            raise UnsupportedModelError(f"partial_rotary_factor {partial} is not supported, only 1.0")

        max_len = int(config["max_position_embeddings"])
        original = int(
            config.get("original_max_position_embeddings") or given.get("original_max_position_embeddings") or max_len
        )
        theta = float(given.get("rope_theta") or config.get("rope_theta") or 10000.0)

        def need(key: str) -> Any:
            if given.get(key) is None:
                raise CheckpointError(f"rope kind {kind} needs the key {key!r} in rope_parameters or rope_scaling")
            return given[key]

        def optional(key: str) -> float | None:
            return None if given.get(key) is None else float(given[key])

        base = cls(head_dim=head_dim, theta=theta)
        if kind == "default":
            return base
        if kind in ("linear", "dynamic"):
            return cls(head_dim, theta, kind, factor=float(need("factor")), original_max_len=max_len)
        if kind == "llama3":
            return cls(
                head_dim,
                theta,
                kind,
                factor=float(need("factor")),
                original_max_len=original,
                low_freq_factor=float(need("low_freq_factor")),
                high_freq_factor=float(need("high_freq_factor")),
            )
        factor = optional("factor") or max_len / original
        if kind == "yarn":
            return cls(
                head_dim,
                theta,
                kind,
                factor=factor,
                original_max_len=original,
                attention_factor=optional("attention_factor"),
                beta_fast=optional("beta_fast") or 32.0,
                beta_slow=optional("beta_slow") or 1.0,
                mscale=optional("mscale"),
                mscale_all_dim=optional("mscale_all_dim"),
                truncate=bool(given.get("truncate", True)),
            )
        return cls(
            head_dim,
            theta,
            kind,
            factor=factor,
            original_max_len=original,
            attention_factor=optional("attention_factor"),
            short_factor=tuple(float(x) for x in need("short_factor")),
            long_factor=tuple(float(x) for x in need("long_factor")),
        )

    def max_len(self, max_position_embeddings: int) -> int:
        """Longest sequence that the scaling is meant for, in tokens."""
        if self.kind in ("linear", "dynamic"):
            return int(max_position_embeddings * self.factor)
        if self.kind == "yarn":
            return max(max_position_embeddings, int(self.original_max_len * self.factor))
        return max_position_embeddings


def rope_frequencies(spec: RopeSpec, max_len: int) -> tuple[torch.Tensor, float]:
    """Angles a position, float64 [head_dim / 2], and the factor on cosines and sines, for sequences up to `max_len`."""
    half = torch.arange(0, spec.head_dim, 2, dtype=torch.float64) / spec.head_dim
    inv_freq = spec.theta**-half
    attention_factor = 1.0 if spec.attention_factor is None else spec.attention_factor
    if spec.kind == "linear":
        inv_freq = inv_freq / spec.factor
    elif spec.kind == "dynamic" and max_len > spec.original_max_len:
        stretch = spec.factor * max_len / spec.original_max_len - (spec.factor - 1)
        theta = spec.theta * stretch ** (spec.head_dim / (spec.head_dim - 2))
        inv_freq = theta**-half
    elif spec.kind == "yarn":
        inv_freq = _yarn(spec, inv_freq)
        if spec.attention_factor is None:
            attention_factor = _yarn_attention_factor(spec)
    elif spec.kind == "llama3":
        inv_freq = _llama3(spec, inv_freq)
    elif spec.kind == "longrope":
        chosen = spec.long_factor if max_len > spec.original_max_len else spec.short_factor
        inv_freq = inv_freq / torch.tensor(chosen, dtype=torch.float64)
        if spec.attention_factor is None and spec.factor > 1:
            attention_factor = math.sqrt(1 + math.log(spec.factor) / math.log(spec.original_max_len))
    if spec.freq_factors:
        inv_freq = inv_freq / torch.tensor(spec.freq_factors, dtype=torch.float64)
    return inv_freq, attention_factor


def rope_table(spec: RopeSpec, max_len: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of positions [0, max_len), half-split: entry d and d + head_dim / 2 share an angle.

    Computed in float64 and rounded once; the attention factor is folded in.

    Returns:
        (cos, sin), each [max_len, head_dim].
    """
    inv_freq, attention_factor = rope_frequencies(spec, max_len)
    cos = torch.empty(max_len, spec.head_dim, dtype=dtype)
    sin = torch.empty(max_len, spec.head_dim, dtype=dtype)
    for start in range(0, max_len, _ROWS):
        end = min(start + _ROWS, max_len)
        angles = torch.arange(start, end, dtype=torch.float64)[:, None] * inv_freq  # [rows, head_dim / 2]
        cos[start:end] = (angles.cos() * attention_factor).repeat(1, 2)
        sin[start:end] = (angles.sin() * attention_factor).repeat(1, 2)
    return cos, sin


def _yarn(spec: RopeSpec, inv_freq: torch.Tensor) -> torch.Tensor:
    """Fast dimensions keep their frequency, slow ones are interpolated, a ramp lies between."""

    def dim_of(rotations: float) -> float:
        return spec.head_dim * math.log(spec.original_max_len / (rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dim_of(spec.beta_fast), dim_of(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.head_dim - 1)
    if low == high:
        high += 0.001  # the ramp's width must not be zero
    ramp = ((torch.arange(spec.head_dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return inv_freq / spec.factor * ramp + inv_freq * (1 - ramp)


def _yarn_attention_factor(spec: RopeSpec) -> float:
    def grown(mscale: float) -> float:
        return 1.0 if spec.factor <= 1 else 0.1 * mscale * math.log(spec.factor) + 1.0

    if spec.mscale and spec.mscale_all_dim:
        return grown(spec.mscale) / grown(spec.mscale_all_dim)
    return grown(1.0)


def _llama3(spec: RopeSpec, inv_freq: torch.Tensor) -> torch.Tensor:
    """Short wavelengths keep their frequency, long ones are divided by the factor, those between are blended."""
    turns = spec.original_max_len * inv_freq / (2 * math.pi)  # rotations within the original length
    blend = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * inv_freq / spec.factor + blend * inv_freq
