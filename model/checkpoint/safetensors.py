"""Model folders with safetensors files, one or several: the place of every tensor, from the headers alone."""

from __future__ import annotations

import json
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any

from qsa.errors import CheckpointError, UnsupportedModelError
from qsa.model.checkpoint.tensors import FLOAT_KINDS, StoredTensor
from qsa.model.spec import ModelSpec

_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I8": 1, "U8": 1, "I32": 4, "I64": 8}
_MAX_HEADER = 100_000_000  # the format's own limit, in bytes
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: the file is missing, not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold an object, found {type(value).__name__}")
    return value


def read_header(path: Path, kinds: Collection[str] = tuple(FLOAT_KINDS)) -> dict[str, StoredTensor]:
    """Tensors of one file by their name there.

    kinds: types that are read: floats of 16 or 32 bits, and in quantised models others too.

    Raises:
        CheckpointError: the file is missing, damaged or truncated.
        UnsupportedModelError: a tensor of another type.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise CheckpointError(f"{path}: {size} bytes, no safetensors header: it is truncated")
            (length,) = struct.unpack("<Q", prefix)
            if length > min(_MAX_HEADER, size - 8):
                raise CheckpointError(
                    f"{path}: a header of {length} bytes in a file of {size}: it is truncated or no safetensors"
                )
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header must hold an object, found {type(header).__name__}")
    tensors: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        if name != "__metadata__":
            tensors[name] = _stored(path, name, entry, 8 + length, size, kinds)
    return tensors


def _stored(path: Path, name: str, entry: dict[str, Any], start: int, size: int, kinds: Collection[str]) -> StoredTensor:
    try:
        kind, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
        begin, end = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path}: tensor {name} has a damaged header entry") from None
    if kind not in kinds:
        raise UnsupportedModelError(
            f"{path}: tensor {name} has type {kind}, which is not supported; supported: {', '.join(kinds)}"
        )
    stored = StoredTensor(name, path, kind, shape, start + begin, end - begin)
    if begin < 0 or stored.nbytes != stored.num_elements * _BYTES[kind]:
        raise CheckpointError(f"{path}: tensor {name} of shape {list(shape)} and type {kind} has {stored.nbytes} bytes")
    if start + end > size:
        raise CheckpointError(
            f"{path}: tensor {name} ends at byte {start + end}, but the file has {size} bytes: it is truncated"
        )
    return stored


def read_folder(folder: Path, kinds: Collection[str] = tuple(FLOAT_KINDS)) -> dict[str, StoredTensor]:
    """Tensors of all safetensors files of a model folder, by their name there; kinds: as in `read_header`.

    Raises:
        CheckpointError: no file, a file or a tensor that the index lists is missing, or a tensor is there twice.
    """
    index_path = folder / INDEX
    if not index_path.is_file():
        if not (folder / SINGLE).is_file():
            raise CheckpointError(f"{folder}: neither {SINGLE} nor {INDEX} is there")
        return read_header(folder / SINGLE, kinds)
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path}: has no weight_map")
    tensors: dict[str, StoredTensor] = {}
    for file_name in sorted(set(weight_map.values())):
        path = folder / file_name
        if path.parent != folder:
            raise CheckpointError(f"{index_path}: file {file_name!r} is not in the model's folder")
        if not path.is_file():
            names = [name for name, where in weight_map.items() if where == file_name]
            raise CheckpointError(f"{path}: missing, it should hold {names[0]} and {len(names) - 1} more tensors")
        for name, tensor in read_header(path, kinds).items():
            if name in tensors:
                raise CheckpointError(f"{path}: tensor {name} is also in {tensors[name].file}")
            tensors[name] = tensor
    for name, file_name in weight_map.items():
        if name not in tensors or tensors[name].file.name != file_name:
            raise CheckpointError(f"{folder / file_name}: tensor {name} is missing, though the index lists it")
    return tensors


def canonical_tensors(spec: ModelSpec, stored: dict[str, StoredTensor]) -> tuple[dict[str, StoredTensor], list[StoredTensor]]:
    """Tensors by canonical name, and those that nobody knows.

    Left out as harmless: rotary frequencies, which are computed, and the copy of the embedding that some files keep as
    the head of a tied model.
    """
    found: dict[str, StoredTensor] = {}
    extra: list[StoredTensor] = []
    for name, tensor in stored.items():
        if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and spec.tie_word_embeddings):
            continue
        if name == "lm_head.weight" or name.startswith("model."):
            found[name.removeprefix("model.")] = tensor
        else:
            extra.append(tensor)
    return found, extra
