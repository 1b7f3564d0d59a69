"""How a Hugging Face model's weights are quantised, as its config.json says: read, and refused by name where it cannot run.

Only weights count. Activations that a file wants quantised too are left as they are, which loses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qsa.errors import UnsupportedModelError

METHODS = ("awq", "gptq", "compressed-tensors", "fp8")
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")  # of compressed-tensors


@dataclass(frozen=True)
class QuantScheme:
    """What the names and numbers of a file's quantised tensors mean.

    Attributes:
        method:      one of METHODS.
        bits:        of a weight, where the file does not show it (awq, gptq).
        stored_zero: what must be added to a stored zero: 1 in the first format of GPTQ.
    """

    method: str
    bits: int = 0
    stored_zero: int = 0

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> QuantScheme | None:
        """Read a config.json; None when nothing is quantised.

        Raises:
            UnsupportedModelError: a method, or a variant of one, that is not supported; named.
        """
        settings = config.get("quantization_config") or config.get("compression_config")
        if not settings:
            return None
        method = settings.get("quant_method", "unknown") if isinstance(settings, Mapping) else settings
        if not isinstance(settings, Mapping) or method not in METHODS:
            raise UnsupportedModelError(
                f"quantization method {method!r} is not supported; supported: {', '.join(METHODS)}, and GGUF files"
            )
        if method == "awq":
            _want(settings, method, "bits", (4,), settings.get("w_bit"))
            _want(settings, method, "version", ("gemm", "GEMM"), "gemm")
            return cls(method, bits=4)
        if method == "gptq":
            bits = _want(settings, method, "bits", (4, 8))
            if settings.get("is_marlin_format"):
                raise UnsupportedModelError("quantization method 'gptq' with is_marlin_format is not supported")
            kind = _want(settings, method, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
            return cls(method, bits=bits, stored_zero=int(kind == "gptq"))
        if method == "fp8":
            if settings.get("weight_block_size") is not None:
                raise UnsupportedModelError(
                    f"quantization method 'fp8' with weight_block_size {settings['weight_block_size']} is not supported,"
                    " only a scale a tensor or a row"
                )
            return cls(method)
        _want(settings, method, "format", FORMATS)
        for group in (settings.get("config_groups") or {}).values():
            _check_group(group.get("weights") or {}, method)
        if (settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
            raise UnsupportedModelError("quantization method 'compressed-tensors' with sparse weights is not supported")
        return cls(method)


def _check_group(weights: Mapping[str, Any], method: str) -> None:
    kind = _want(weights, method, "type", ("int", "float"), "int")
    _want(weights, method, "num_bits", (8,) if kind == "float" else (4, 8))
    _want(weights, method, "strategy", ("tensor", "channel", "group"), "tensor")


def _want(settings: Mapping[str, Any], method: str, key: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
    value = settings.get(key)
    value = default if value is None else value
    if value not in allowed:
        raise UnsupportedModelError(
            f"quantization method {method!r} with {key} {value!r} is not supported, only {' or '.join(map(repr, allowed))}"
        )
    return value
