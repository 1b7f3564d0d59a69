"""Weights that AWQ, GPTQ and compressed-tensors store in several tensors: found by their names, unpacked where they lie.

    awq                 qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out]; of eight numbers in a word the
                        even outputs come first.
    gptq                qweight [in * bits / 32, out], qzeros [groups, out * bits / 32], scales [groups, out], g_idx [in].
    compressed-tensors  weight_packed [out, in * bits / 32], weight_scale [out, groups], weight_zero_point, weight_shape,
                        weight_g_idx; or weight in int8 or float8 with weight_scale.
    fp8                 weight in float8 with weight_scale, one or one a row.

With an order of activations (g_idx) the columns of a group lie scattered; they are put side by side, and whoever multiplies
takes the activations in that order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from qsa.errors import CheckpointError, UnsupportedModelError
from qsa.model.checkpoint.quantized import QuantizedTensor
from qsa.model.checkpoint.tensors import StoredTensor, WeightFiles
from qsa.model.quantization import QuantScheme

RAW_KINDS = {
    **{"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn},
    **{"I8": torch.int8, "U8": torch.uint8, "I32": torch.int32, "I64": torch.int64},
}
MAIN = ("qweight", "weight_packed", "weight")  # the part that holds the numbers
PARTS = {  # file's suffix -> name here
    **{"qzeros": "zeros", "scales": "scales", "g_idx": "order"},
    **{"weight_scale": "scales", "weight_zero_point": "zeros", "weight_g_idx": "order", "weight_shape": "shape"},
}
PART_KINDS = {"scales": ("F32", "F16", "BF16"), "zeros": ("I32", "I8"), "order": ("I32", "I64")}
LEFT_OUT = ("input_scale", "output_scale", "input_zero_point", "k_scale", "v_scale")  # of activations and of K and V
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where each of eight outputs lies in a word


@dataclass(frozen=True)
class PackedTensor(QuantizedTensor):
    """A weight as such a file stores it.

    Attributes:
        kind:   int4, int8 or fp8.
        shape:  [rows, columns] of the weight.
        data:   the main part, as stored.
        method: of the scheme; which tells how `data` is packed.
        scales, zeros, order: the other parts, as stored; None where the file has none.
    """

    method: str = ""
    scales: torch.Tensor = field(default_factory=lambda: torch.ones(1, 1))
    zeros: torch.Tensor | None = None
    order: torch.Tensor | None = None
    stored_zero: int = 0

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.data, self.scales, self.zeros, self.order) if part is not None)

    @property
    def has_parts(self) -> bool:
        return True

    @property
    def num_groups(self) -> int:
        """Scales of a row."""
        if self.method in ("awq", "gptq"):
            return self.scales.shape[0]
        return 1 if self.scales.numel() in (1, self.shape[0]) else self.scales.shape[1]

    def to(self, device: torch.device) -> PackedTensor:
        """The same on a device, where it is unpacked faster."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        order = None if self.order is None else self.order.to(device)
        return replace(self, data=self.data.to(device), scales=self.scales.to(device), zeros=zeros, order=order)

    def select_rows(self, rows: torch.Tensor) -> QuantizedTensor:
        raise UnsupportedModelError(
            "rows of a packed weight cannot be read one by one; the table must be stored in a float type"
        )

    @property
    def columns(self) -> torch.Tensor | None:
        """Which column of the weight each column of `parts` is, int64; None: the same."""
        if self.order is None:
            return None
        order = self.order.long().argsort(stable=True)
        return None if torch.equal(order, torch.arange(len(order), device=order.device)) else order

    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Numbers, scale and minimum: weight = scale * values + minimum, columns as `columns` says.

        Returns:
            values:  [rows, columns], uint8 for int4, int8 or float8_e4m3fn else.
            scale:   float32 [rows, groups]
            minimum: float32 like scale
        """
        rows, columns = self.shape
        bits = {"int4": 4}.get(self.kind, 8)
        zeros = self.zeros
        if self.method in ("awq", "gptq"):
            unpack = unpack_awq if self.method == "awq" else partial(unpack_words, bits=bits)
            values = unpack_awq(self.data).T if self.method == "awq" else unpack(self.data.T.contiguous())
            zeros = None if zeros is None else unpack(zeros).T[:rows]
            if zeros is not None and self.stored_zero:
                zeros = zeros.int() + self.stored_zero & (1 << bits) - 1
            scale = self.scales.float().T
        else:
            is_packed = self.data.dtype == torch.int32
            values = unpack_words(self.data, bits) if is_packed else self.data
            if zeros is not None and zeros.dtype == torch.int32:  # packed along the rows
                zeros = unpack_words(zeros.T.contiguous(), bits)[:, :rows].T
            elif zeros is not None and is_packed:
                zeros = zeros.int() + (1 << bits - 1)
            scale = self.scales.float()
            if scale.numel() in (1, rows):
                scale = scale.reshape(-1, 1)
                zeros = None if zeros is None else zeros.reshape(-1, 1)
        scale = scale.expand(rows, -1).contiguous()
        order = self.columns
        values = (values[:, :columns] if order is None else values[:, order]).contiguous()
        if values.dtype != torch.uint8:
            minimum = torch.zeros_like(scale) if zeros is None else -scale * zeros.float()
            return values, scale, minimum
        minimum = -scale * (1 << bits - 1 if zeros is None else zeros.float())
        if bits == 8:  # signed numbers, so that symmetric weights have no minimum
            return (values.short() - 128).to(torch.int8), scale, minimum + 128 * scale
        return values, scale, minimum

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight [rows, columns], computed in float32, then rounded to `dtype`."""
        values, scale, minimum = self.parts()
        order = self.columns
        out = torch.empty(self.shape, dtype=dtype, device=values.device)
        step = max(1, (1 << 24) // self.shape[1])  # a few rows at a time: the float32 copy is large
        for first in range(0, self.shape[0], step):
            some = slice(first, first + step)
            grouped = values[some].float().unflatten(1, (scale.shape[1], -1))
            piece = torch.addcmul(minimum[some].unsqueeze(2), grouped, scale[some].unsqueeze(2)).flatten(1)
            if order is None:
                out[some] = piece
            else:
                out[some, order] = piece.to(dtype)
        return out


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [rows, n], numbers one after the other from the lowest bit on, as uint8 [rows, n * 32 / bits]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return (words.unsqueeze(-1) >> shifts).bitwise_and_((1 << bits) - 1).to(torch.uint8).flatten(1)


def unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """int32 [rows, n] in the order of AWQ as uint8 [rows, 8 * n]."""
    return unpack_words(words, 4).unflatten(1, (-1, 8))[..., list(AWQ_ORDER)].flatten(1)


@dataclass(frozen=True)
class PackedStored(StoredTensor):
    """A weight in several tensors of a file; kind, shape and nbytes are those of the whole, the place that of its numbers."""

    scheme: QuantScheme | None = None
    main: StoredTensor | None = None
    parts: tuple[tuple[str, StoredTensor], ...] = ()

    def load(self, files: WeightFiles) -> PackedTensor:
        """Read every part."""
        assert self.main is not None and self.scheme is not None
        raw = {name: _read_raw(part, files) for name, part in (("data", self.main), *self.parts) if name != "shape"}
        order = raw.get("order")
        if order is not None and order.amax() < 0:  # an order that was not filled in
            raw.pop("order")
        rows, columns = self.shape
        scheme = self.scheme
        tensor = PackedTensor(self.kind, (rows, columns), method=scheme.method, stored_zero=scheme.stored_zero, **raw)
        if tensor.order is not None:
            self._check_order(tensor.order.long(), tensor.num_groups)
        return tensor

    def _check_order(self, order: torch.Tensor, groups: int) -> None:
        """Every group of columns that share a scale must be there, and be as large as the others."""
        size = self.shape[1] // groups
        if order.amin() < 0 or order.amax() >= groups or (order.bincount(minlength=groups) != size).any():
            part = dict(self.parts)["order"]
            raise CheckpointError(
                f"{part.file}: tensor {part.stored_name} must name each of {groups} groups for {size} columns, it does not"
            )


def _read_raw(tensor: StoredTensor, files: WeightFiles) -> torch.Tensor:
    return files.read(tensor).view(RAW_KINDS[tensor.kind]).reshape(tensor.shape)


def join_parts(
    scheme: QuantScheme, stored: Mapping[str, StoredTensor], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, StoredTensor]:
    """The tensors of a file with every quantised weight as one, called `NAME.weight`.

    Args:
        stored: by their names in the file.
        shapes: what the model's weights must be, by canonical name.

    Raises:
        CheckpointError: a part is missing or its shape does not go with the others'.
        UnsupportedModelError: the weight's form is not supported.
    """
    joined: dict[str, StoredTensor] = {}
    packed: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        prefix, _, suffix = name.rpartition(".")
        if suffix in LEFT_OUT:
            continue
        is_main = suffix in MAIN[:2] or (suffix == "weight" and tensor.kind in ("I8", "F8_E4M3"))
        if is_main or suffix in PARTS:
            packed.setdefault(prefix, {})["data" if is_main else PARTS[suffix]] = tensor
        else:
            joined[name] = tensor
    for prefix, parts in packed.items():
        name = f"{prefix}.weight"
        if name in joined:
            some = next(iter(parts.values()))
            raise CheckpointError(f"{some.file}: {name} is there twice, as a tensor and in parts such as {some.stored_name}")
        joined[name] = _whole(scheme, name, parts, shapes.get(name.removeprefix("model.")))
    return joined


def _whole(scheme: QuantScheme, name: str, parts: dict[str, StoredTensor], wanted: tuple[int, ...] | None) -> PackedStored:
    main, scales = parts.get("data"), parts.get("scales")
    needs_zeros = scheme.method in ("awq", "gptq") and "zeros" not in parts
    if main is None or scales is None or needs_zeros:
        missing = "numbers" if main is None else "scales" if scales is None else "zeros"
        some = next(iter(parts.values()))
        raise CheckpointError(f"{some.file}: tensor {some.stored_name} is there, but not the {missing} of {name}")
    kind, rows, columns = _form(scheme, main, wanted)
    groups = _num_groups(scheme, scales, rows)
    for part_name, kinds in PART_KINDS.items():
        part = parts.get(part_name)
        if part is not None and part.kind not in kinds:
            raise CheckpointError(f"{part.file}: tensor {part.stored_name} has type {part.kind}, expected {' or '.join(kinds)}")
    fits = groups > 0 and columns % groups == 0 and ("order" not in parts or parts["order"].shape == (columns,))
    if not fits or not _zeros_fit(scheme, parts, kind, rows, groups):
        shapes = ", ".join(f"{part.stored_name} {list(part.shape)}" for part in parts.values())
        raise CheckpointError(f"{main.file}: the shapes of a weight's parts do not go together: {shapes}")
    others = tuple((part_name, part) for part_name, part in parts.items() if part_name != "data")
    nbytes = main.nbytes + sum(part.nbytes for _, part in others)
    place = main.stored_name, main.file, kind, (rows, columns), main.offset, nbytes
    return PackedStored(*place, scheme=scheme, main=main, parts=others)


def _form(scheme: QuantScheme, main: StoredTensor, wanted: tuple[int, ...] | None) -> tuple[str, int, int]:
    """Kind, rows and columns of a weight, from the shape of its numbers and, where that leaves it open, the model's."""
    first, second = main.shape if len(main.shape) == 2 else (0, 0)
    by_type = {"F8_E4M3": "fp8", "I8": "int8"}.get(main.kind)
    if (by_type is None) != (main.kind == "I32") or (by_type and scheme.method in ("awq", "gptq")):
        raise UnsupportedModelError(
            f"{main.file}: tensor {main.stored_name} has type {main.kind}, which is not supported in a {scheme.method} model"
        )
    if by_type:
        return by_type, first, second
    if scheme.method == "awq":
        return "int4", 8 * second, first
    if scheme.method == "gptq":
        return f"int{scheme.bits}", second, first * 32 // scheme.bits
    columns = wanted[1] if wanted is not None and len(wanted) == 2 else 8 * second
    bits = 8 if second == -(-columns // 4) else 4  # a row is filled up to whole words
    return f"int{bits}", first, columns if second == -(-columns * bits // 32) else 32 * second // bits


def _zeros_fit(scheme: QuantScheme, parts: Mapping[str, StoredTensor], kind: str, rows: int, groups: int) -> bool:
    """Whether a weight's zeros, if it has any, are as many as its scales."""
    zeros = parts.get("zeros")
    if zeros is None:
        return True
    words = -(-rows * (4 if kind == "int4" else 8) // 32)  # that one zero a row fills
    if scheme.method in ("awq", "gptq"):
        return zeros.kind == "I32" and zeros.shape == (groups, words)
    if zeros.kind == "I32":
        return zeros.shape == (words, groups)
    return zeros.num_elements == parts["scales"].num_elements and len(zeros.shape) == len(parts["scales"].shape)


def _num_groups(scheme: QuantScheme, scales: StoredTensor, rows: int) -> int:
    """Scales of a row, 0 when their shape is not that of a weight with so many rows."""
    if scheme.method in ("awq", "gptq"):
        return scales.shape[0] if len(scales.shape) == 2 and scales.shape[1] == rows else 0
    if len(scales.shape) == 2 and scales.shape[0] == rows:
        return scales.shape[1]
    return 1 if scales.num_elements in (1, rows) else 0
