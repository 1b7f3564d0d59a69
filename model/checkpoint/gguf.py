"""GGUF files: metadata and the place of every tensor, from the header alone.

The header is parsed here rather than with `gguf.GGUFReader`, which takes seconds for a vocabulary and does not notice
a truncated file; every length is checked against the file before it is used. Quantised data is interpreted elsewhere,
by the `gguf` library.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import gguf

from qsa.errors import CheckpointError, UnsupportedModelError
from qsa.model.checkpoint.quantized import KINDS as QUANTIZED_KINDS
from qsa.model.checkpoint.tensors import FLOAT_KINDS, StoredTensor
from qsa.model.spec import ModelSpec

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")

_TOP = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


class GGUFArray(Sequence[Any]):
    """An array in the metadata, decoded when it is first looked into: vocabularies are large and often not needed."""

    def __init__(self, header: _Header, kind: int, count: int, offset: int) -> None:
        self._header, self._kind, self._count, self._offset = header, kind, count, offset
        self._values: list[Any] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if self._values is None:
            self._values = self._header.array_values(self._kind, self._count, self._offset)
        return self._values[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])


@dataclass
class _Header:
    """Reader of a header with a position that only moves forward, every step checked against the file's length."""

    path: Path
    data: mmap.mmap
    position: int = 0
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = len(self.data)

    def skip(self, count: int) -> int:
        """Move past `count` bytes and return where they begin."""
        start = self.position
        if count > self.size - start:
            raise CheckpointError(f"{self.path}: the header ends at byte {self.size} of {start + count}: the file is truncated")
        self.position = start + count
        return start

    def scalar(self, code: str) -> Any:
        return struct.unpack_from(code, self.data, self.skip(struct.calcsize(code)))[0]

    def string(self) -> str:
        length = self.scalar("<Q")
        start = self.skip(length)
        return self.data[start : start + length].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise CheckpointError(f"{self.path}: unknown metadata type {kind}: the file is damaged")
        item_kind, count = self.scalar("<I"), self.scalar("<Q")
        start = self.position
        if item_kind in _SCALARS:
            self.skip(count * struct.calcsize(_SCALARS[item_kind]))
        elif item_kind == _STRING:
            for _ in range(count):
                self.skip(self.scalar("<Q"))
        else:
            raise CheckpointError(f"{self.path}: metadata arrays of type {item_kind} are not supported")
        return GGUFArray(self, item_kind, count, start)

    def array_values(self, kind: int, count: int, offset: int) -> list[Any]:
        if kind != _STRING:
            code = _SCALARS[kind]
            return list(struct.unpack_from(f"<{count}{code[1]}", self.data, offset))
        values = []
        for _ in range(count):
            (length,) = struct.unpack_from("<Q", self.data, offset)
            offset += 8
            values.append(self.data[offset : offset + length].decode("utf-8", "replace"))
            offset += length
        return values


@dataclass(frozen=True)
class GGUFFile:
    """A parsed header: metadata by key, tensors by their name in the file."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_header(path: Path) -> GGUFFile:
    """Parse the header of one file.

    Raises:
        CheckpointError: not a GGUF file, damaged, or a tensor lies beyond its end.
        UnsupportedModelError: a version, or a tensor type that cannot be read.
    """
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise CheckpointError(f"{path}: cannot read: {error}") from None
    header = _Header(path, data)
    if data[:4] != b"GGUF":
        raise CheckpointError(f"{path}: not a GGUF file, it begins with {data[:4]!r}")
    header.skip(4)
    version = header.scalar("<I")
    if version not in (2, 3):
        raise UnsupportedModelError(f"{path}: GGUF version {version} is not supported, only 2 and 3 (little-endian)")
    num_tensors, num_fields = header.scalar("<Q"), header.scalar("<Q")
    fields: dict[str, Any] = {}
    for _ in range(num_fields):
        key = header.string()
        fields[key] = header.value(header.scalar("<I"))
    entries = []
    for _ in range(num_tensors):
        name = header.string()
        dims = [header.scalar("<Q") for _ in range(header.scalar("<I"))]
        entries.append((name, tuple(reversed(dims)), header.scalar("<I"), header.scalar("<Q")))
    alignment = int(fields.get("general.alignment", 32))
    if alignment <= 0:
        raise CheckpointError(f"{path}: general.alignment is {alignment}")
    start = -(-header.position // alignment) * alignment
    tensors: dict[str, StoredTensor] = {}
    for name, shape, type_id, offset in entries:
        if name in tensors:
            raise CheckpointError(f"{path}: tensor {name} is there twice")
        tensors[name] = _stored(path, name, shape, type_id, start + offset, header.size)
    return GGUFFile(path, fields, tensors)


def _stored(path: Path, name: str, shape: tuple[int, ...], type_id: int, offset: int, file_size: int) -> StoredTensor:
    try:
        kind = gguf.GGMLQuantizationType(type_id)
    except ValueError:
        raise UnsupportedModelError(f"{path}: tensor {name} has the unknown type {type_id}") from None
    if kind.name not in FLOAT_KINDS and kind.name not in QUANTIZED_KINDS:
        supported = ", ".join((*FLOAT_KINDS, *QUANTIZED_KINDS))
        raise UnsupportedModelError(
            f"{path}: tensor {name} has type {kind.name}, which is not supported; supported: {supported}"
        )
    if kind.name in QUANTIZED_KINDS and len(shape) != 2:
        raise CheckpointError(f"{path}: tensor {name} of type {kind.name} has shape {list(shape)}, expected a matrix")
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if not shape or shape[-1] % block_elements:
        raise CheckpointError(f"{path}: tensor {name} has shape {list(shape)}, whose rows are no multiple of {block_elements}")
    stored = StoredTensor(name, path, kind.name, shape, offset, 0)
    nbytes = stored.num_elements // block_elements * block_bytes
    if offset + nbytes > file_size:
        raise CheckpointError(
            f"{path}: tensor {name} ends at byte {offset + nbytes}, but the file has {file_size} bytes: it is truncated"
        )
    return StoredTensor(name, path, kind.name, shape, offset, nbytes)


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Header of a file, or of all files of a split one: metadata of the first, tensors of all."""
    first = read_header(path)
    count = int(first.fields.get("split.count", 0))
    if count <= 1:
        return first.fields, first.tensors
    match = _SPLIT.search(path.name)
    if match is None:
        raise CheckpointError(f"{path}: one of {count} parts, but its name does not end in -00001-of-{count:05d}.gguf")
    tensors: dict[str, StoredTensor] = {}
    fields: dict[str, Any] = {}
    for part in range(1, count + 1):
        part_path = path.with_name(f"{path.name[: match.start()]}-{part:05d}-of-{count:05d}.gguf")
        if not part_path.is_file():
            raise CheckpointError(f"{part_path}: part {part} of {count} is missing")
        header = read_header(part_path)
        fields = fields or header.fields
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{part_path}: tensor {name} is also in {tensors[name].file}")
            tensors[name] = tensor
    return fields, tensors


def canonical_name(stored_name: str) -> str | None:
    """The Hugging Face name without `model.`, or None when the tensor is unknown."""
    parts = stored_name.split(".")
    if len(parts) == 2 and parts[0] in _TOP and parts[1] == "weight":
        return f"{_TOP[parts[0]]}.weight"
    if len(parts) == 4 and parts[0] == "blk" and parts[1].isdigit() and parts[2] in _LAYER and parts[3] in ("weight", "bias"):
        return f"layers.{int(parts[1])}.{_LAYER[parts[2]]}.{parts[3]}"
    return None


def canonical_tensors(spec: ModelSpec, stored: dict[str, StoredTensor]) -> tuple[dict[str, StoredTensor], list[StoredTensor]]:
    """Tensors by canonical name, and those that nobody knows. Llama files store q and k in interleaved pairs."""
    found: dict[str, StoredTensor] = {}
    extra: list[StoredTensor] = []
    for name, tensor in stored.items():
        canonical = canonical_name(name)
        if canonical is None:
            if name not in ROPE_TENSORS:
                extra.append(tensor)
            continue
        heads = 0
        if spec.architecture == "llama" and ".q_proj." in canonical:
            heads = spec.num_q_heads
        elif spec.architecture == "llama" and ".k_proj." in canonical:
            heads = spec.num_kv_heads
        found[canonical] = StoredTensor(
            tensor.stored_name, tensor.file, tensor.kind, tensor.shape, tensor.offset, tensor.nbytes, heads
        )
    return found, extra
