"""Linear layers in the form that checkpoint, setting and device allow: in floats, 8 bits or 4, stacked where they can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from qsa.errors import ConfigError
from qsa.kernels.quant_linear import quantize_groups
from qsa.kernels.registry import get_operator
from qsa.model.checkpoint.packed import PackedTensor
from qsa.model.checkpoint.quantized import QuantizedTensor

Weight = torch.Tensor | QuantizedTensor
ReadWeight = Callable[[str], Weight]
QUANTIZED = ("int8", "int4", "fp8")  # forms that weights are quantised to while they are read
GROUPS = (128, 64, 32)  # columns that share a scale in weights of 4 bits made here, the largest that divides a row


class Linear(Protocol):
    """What every linear operator offers; see kernels/linear.py. Those of a card offer more: kernels/skinny_linear_triton.py."""

    @property
    def nbytes(self) -> int: ...

    def forward(self, x: torch.Tensor) -> torch.Tensor: ...

    def forward_prefill(self, x: torch.Tensor) -> torch.Tensor: ...

    def free(self) -> None: ...


@dataclass(frozen=True)
class WeightPolicy:
    """In which form weights are held.

    Attributes:
        dtype:        type of activations, and of weights that are not packed.
        is_packed:    keep 4- and 8-bit weights packed where a kernel exists.
        keeps_copies: hold faster copies beside packed weights, for prefill and for batches.
        backend:      whose operators compute.
        target:       what weights in a float type are quantised to: one of QUANTIZED; None: they stay.
    """

    dtype: torch.dtype
    device: torch.device
    is_packed: bool
    keeps_copies: bool
    backend: str = "torch"
    target: str | None = None

    @classmethod
    def choose(
        cls, quantization: str, dtype: torch.dtype, device: torch.device, *, keeps_copies: bool = False, backend: str = "torch"
    ) -> WeightPolicy:
        """The policy of a setting: auto keeps a file's packed weights packed, none dequantises them, others quantise the rest.

        Raises:
            ConfigError: the device or the type of activations does not go with the setting.
        """
        if quantization not in ("auto", "none", *QUANTIZED):
            raise ValueError(f"quantization must be auto, none, {', '.join(QUANTIZED)}, got {quantization!r}")
        goes_packed = dtype in ((torch.bfloat16, torch.float16) if backend == "triton" else (torch.bfloat16,))
        goes_packed &= backend == "triton" or device.type == "cpu"
        target = quantization if quantization in QUANTIZED else None
        if target == "fp8" and backend == "torch":
            raise ConfigError("model.quantization is fp8, which only cards can do; use int8 or int4 on the CPU")
        if target and not goes_packed:
            name = str(dtype).removeprefix("torch.")
            raise ConfigError(f"model.quantization is {target}, which does not go with model.dtype {name}; use bfloat16")
        return cls(dtype, device, quantization != "none" and goes_packed, keeps_copies, backend, target)

    def operator(self, name: str, **weights: Any) -> Any:
        """An operator of the backend, set up with its weights."""
        operator = get_operator(name, self.backend)
        operator.init(**weights)
        return operator

    def to_float(self, weight: Weight) -> torch.Tensor:
        """The weight in the activations' type."""
        if isinstance(weight, PackedTensor):
            weight = weight.to(self.device)
        plain = weight.dequantize(self.dtype) if isinstance(weight, QuantizedTensor) else weight
        return plain.to(device=self.device, dtype=self.dtype)

    def kernel_of(self, weight: Weight) -> str:
        """Which linear operator holds the weight, one of a layer's matrices: int4, int8, fp8 or float."""
        if self.is_packed and isinstance(weight, QuantizedTensor):
            kind = {"Q4_0": "int4", "Q4_1": "int4", "Q8_0": "int8"}.get(weight.kind, weight.kind)
            can_run = {"int8": True, "int4": _group(weight) % 32 == 0, "fp8": self.backend == "triton"}
            if can_run.get(kind):
                return kind
        if self.target is None or (self.target == "int4" and weight.shape[1] % GROUPS[-1]):
            return "float"
        return self.target


def _group(weight: QuantizedTensor) -> int:
    """Columns that share a scale; every GGUF kind with a kernel has 32."""
    return weight.shape[1] // weight.num_groups if isinstance(weight, PackedTensor) else 32


class JoinedLinear:
    """Linear layers of one input whose weights need different operators; their outputs lie side by side."""

    def __init__(self, parts: Sequence[Linear], backend: str = "torch") -> None:
        self._parts: tuple[Any, ...] = tuple(parts)
        self._silu_multiply = get_operator("silu_multiply", backend)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.forward(x) for part in self._parts], dim=1)

    def forward_parts(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.forward_parts(x).sum(0) for part in self._parts], dim=1).unsqueeze(0)

    def forward_gated(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._silu_multiply.forward(self.forward(x))
        return out

    def forward_prefill(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.forward_prefill(x) for part in self._parts], dim=1)

    def forward_gated_prefill(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._silu_multiply.forward(self.forward_prefill(x))
        return out

    def free(self) -> None:
        for part in self._parts:
            part.free()


class ReorderedLinear:
    """A linear layer whose columns are stored in another order: it takes its activations in that order."""

    def __init__(self, linear: Linear, columns: torch.Tensor) -> None:
        """columns: int64 [in_features], which activation each stored column goes with."""
        self._linear: Any = linear
        self._columns = columns

    @property
    def nbytes(self) -> int:
        return int(self._linear.nbytes) + self._columns.nbytes

    def _run(self, form: str, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = getattr(self._linear, form)(x.index_select(1, self._columns))
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._run("forward", x)

    def forward_parts(self, x: torch.Tensor) -> torch.Tensor:
        return self._run("forward_parts", x)

    def forward_gated(self, x: torch.Tensor) -> torch.Tensor:
        return self._run("forward_gated", x)

    def forward_prefill(self, x: torch.Tensor) -> torch.Tensor:
        return self._run("forward_prefill", x)

    def forward_gated_prefill(self, x: torch.Tensor) -> torch.Tensor:
        return self._run("forward_gated_prefill", x)

    def free(self) -> None:
        self._linear.free()


def make_linear(weights: Sequence[Weight], biases: Sequence[torch.Tensor | None], policy: WeightPolicy) -> Linear:
    """One linear layer from weights [out_features, in_features] stacked by rows: a single product where kinds agree."""
    weights = [weight.to(policy.device) if isinstance(weight, PackedTensor) else weight for weight in weights]
    kernel = policy.kernel_of(weights[0])
    columns = _columns(weights[0], kernel)
    for weight in weights[1:]:
        if policy.kernel_of(weight) != kernel or not _stack(weights[0], weight, columns, _columns(weight, kernel)):
            alone = [make_linear([weight], [bias], policy) for weight, bias in zip(weights, biases, strict=True)]
            return JoinedLinear(alone, policy.backend)
    bias = None
    if any(b is not None for b in biases):
        zeros = [torch.zeros(weight.shape[0]) if b is None else b for weight, b in zip(weights, biases, strict=True)]
        bias = torch.cat([policy.to_float(b) for b in zeros])
    linear = _operator(kernel, weights, bias, policy)
    return linear if columns is None else ReorderedLinear(linear, columns)


def _columns(weight: Weight, kernel: str) -> torch.Tensor | None:
    return weight.columns if isinstance(weight, PackedTensor) and kernel != "float" else None


def _stack(first: Weight, other: Weight, columns: torch.Tensor | None, others: torch.Tensor | None) -> bool:
    """Whether the rows of two weights of one kernel can be stacked: the same groups, in the same order of columns."""
    if isinstance(first, QuantizedTensor) != isinstance(other, QuantizedTensor):
        return False
    if isinstance(first, QuantizedTensor) and isinstance(other, QuantizedTensor) and _group(first) != _group(other):
        return False
    return (columns is None and others is None) or (columns is not None and others is not None and torch.equal(columns, others))


def _operator(kernel: str, weights: Sequence[Weight], bias: torch.Tensor | None, policy: WeightPolicy) -> Linear:
    how: dict[str, Any] = dict(bias=bias, keep_prefill_copy=policy.keeps_copies, dtype=policy.dtype)
    if kernel == "int4":
        pieces = [_groups_of(weight, policy) for weight in weights]
        values, scale, minimum = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        return policy.operator("int4_linear", values=values, scale=scale, minimum=minimum, **how)
    if kernel in ("int8", "fp8"):
        given = [_rows_of(weight) for weight in weights] if policy.backend == "triton" else [None]
        if all(given):
            values, scale = (torch.cat(parts) for parts in zip(*(pair for pair in given if pair is not None), strict=True))
            return policy.operator(f"{kernel}_linear", values=values, scale=scale, **how)
        whole = torch.cat([_plain_matrix(weight, policy) for weight in weights])
        return policy.operator(f"{kernel}_linear", weight=whole, **how)
    return policy.operator("float_linear", weight=torch.cat([policy.to_float(weight) for weight in weights]), bias=bias)


def _groups_of(weight: Weight, policy: WeightPolicy) -> tuple[torch.Tensor, ...]:
    """Values, scale and minimum of a weight in 4 bits, on the device."""
    if isinstance(weight, QuantizedTensor):
        values, scale, minimum = (part.to(policy.device) for part in weight.parts())
    else:
        group = next(size for size in GROUPS if weight.shape[1] % size == 0)
        values, scale, minimum = quantize_groups(weight.to(policy.device), group)
    if policy.backend == "torch":  # whose kernel has groups of 32
        repeat = values.shape[1] // 32 // scale.shape[1]
        scale, minimum = (part.repeat_interleave(repeat, dim=1) for part in (scale, minimum))
    return values, scale, minimum


def _rows_of(weight: Weight) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Values and scale of a weight that is stored in 8 bits with one scale a row; None of others."""
    if not isinstance(weight, PackedTensor) or weight.num_groups != 1:
        return None
    values, scale, minimum = weight.parts()
    return None if minimum.any() else (values, scale.squeeze(1))


def _plain_matrix(weight: Weight, policy: WeightPolicy) -> torch.Tensor:
    """The weight on the device, its columns as they are stored, to be quantised: float32 where it is dequantised."""
    if not isinstance(weight, QuantizedTensor):
        return weight.to(policy.device).float() if policy.backend == "torch" else weight.to(policy.device)
    plain = weight.dequantize(torch.float32)
    if isinstance(weight, PackedTensor) and weight.columns is not None:
        plain = plain[:, weight.columns]
    return plain.to(policy.device)


def make_head(table: Weight, policy: WeightPolicy) -> Linear:
    """The projection [vocab_size, hidden_size] to float32 logits: in 8 bits where weights are packed or quantised."""
    if (policy.is_packed and isinstance(table, QuantizedTensor)) or policy.target is not None:
        return policy.operator("int8_head", weight=_plain_matrix(table, policy), keep_batch_copy=policy.keeps_copies)
    return policy.operator("float_linear", weight=policy.to_float(table), out_dtype=torch.float32)


def plain_weight(weight: Weight) -> torch.Tensor:
    """A weight that is no packed one, such as a bias."""
    assert isinstance(weight, torch.Tensor), "checkpoints refuse packed vectors"
    return weight
