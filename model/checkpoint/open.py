"""Open a model as the configuration asks for it: with the weights of its files, or with random ones for benchmarks."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from qsa.errors import CheckpointError
from qsa.kernels.summaries.code import CodeCalibration
from qsa.model.byte_tokenizer import byte_tokenizer, check_holds_bytes
from qsa.model.checkpoint.gguf import read_gguf
from qsa.model.checkpoint.load import Checkpoint, errors_of, open_checkpoint, resolve_model
from qsa.model.checkpoint.quantized import QuantizedTensor
from qsa.model.checkpoint.random import RandomCheckpoint, random_calibration
from qsa.model.checkpoint.safetensors import read_json
from qsa.model.spec import ModelSpec
from qsa.model.tokenizer import Tokenizer

MOST_LAYERS = 10_000
CODE_SHARE = 8  # a dummy's codes have an eighth of its key width, as `qsa calibrate` makes them


def open_model(path: str, load_format: str = "auto", device: str = "cpu") -> Checkpoint:
    """Read a model's headers; no weight is read.

    Args:
        load_format: auto: everything is in the files; dummy: only config.json is needed, weights are made.
        device:      where a dummy's weights are made.

    Raises:
        CheckpointError: as `open_checkpoint`.
    """
    if load_format != "dummy":
        return open_checkpoint(path)
    where = resolve_model(path)
    with errors_of(where):
        return _open_dummy(where, device)


def _open_dummy(where: Path, device: str) -> DummyCheckpoint:
    if where.is_file():  # a GGUF file has its configuration and its tokenizer in its header
        fields, stored = read_gguf(where)
        spec = ModelSpec.from_gguf(fields, {name: tensor.shape for name, tensor in stored.items()}, name=where.stem)
        return DummyCheckpoint(spec, where, Tokenizer.from_gguf(fields, where=str(where)), device)
    spec = ModelSpec.from_hf(read_json(where / "config.json"), name=where.resolve().name)
    has_own = (where / "tokenizer.json").is_file()
    return DummyCheckpoint(spec, where, Tokenizer.from_folder(where) if has_own else None, device)


def dummy_code_dim(spec: ModelSpec) -> int:
    """Bytes of a token's code in a layer of a model that is a dummy, and calibrated as such."""
    width = spec.num_kv_heads * spec.head_dim
    return min(width, max(8, width // CODE_SHARE))


def dummy_calibration(spec: ModelSpec, first_layer: int, last_layer: int) -> CodeCalibration:
    """Random directions for layers [first_layer, last_layer) of a dummy."""
    return random_calibration(spec, dummy_code_dim(spec), first_layer=first_layer, last_layer=last_layer)


class DummyCheckpoint(Checkpoint):
    """A checkpoint whose weights are made when they are read: of the model's size, the same in every process."""

    def __init__(self, spec: ModelSpec, path: Path, tokenizer: Tokenizer | None, device: str) -> None:
        """tokenizer: the model's own; None: bytes."""
        if spec.num_layers > MOST_LAYERS:  # a damaged count is not enumerated
            raise CheckpointError(f"{path}: num_hidden_layers is {spec.num_layers}, random weights have at most {MOST_LAYERS}")
        if tokenizer is None:
            check_holds_bytes(spec.vocab_size)
        super().__init__(spec, path, {}, None)
        self._own_tokenizer = tokenizer
        self._random = RandomCheckpoint(spec, torch.device(device))

    def stage_weight_bytes(self, first_layer: int, last_layer: int, *, bytes_per_weight: float | None = None) -> int:
        return self._random.stage_weight_bytes(first_layer, last_layer, bytes_per_weight=bytes_per_weight)

    def read(self, name: str) -> torch.Tensor | QuantizedTensor:
        return self._random.read(name)

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        return self._own_tokenizer or byte_tokenizer(self.spec.vocab_size)
