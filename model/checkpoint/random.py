"""Weights out of nothing: a checkpoint without files, for measuring speed at the size of a model that is not there.

Every tensor is made on the device from its name alone, so all stages of a model agree and nothing is stored.
"""

from __future__ import annotations

import zlib

import torch

from qsa.errors import CheckpointError
from qsa.kernels.summaries.code import CodeCalibration
from qsa.model.checkpoint.tensors import stage_tensors
from qsa.model.spec import ModelSpec

CODE_REACH = 4.0  # standard deviations of a key's number that a code's int8 reaches


class RandomCheckpoint:
    """A checkpoint of random weights of a size at which activations keep theirs; norms are ones, biases zeros.

    Attributes:
        spec: the model.
    """

    is_quantized = False

    def __init__(self, spec: ModelSpec, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16) -> None:
        self.spec, self._device, self._dtype = spec, torch.device(device), dtype
        self._shapes = stage_tensors(spec, 0, spec.num_layers, embedding=True, head=True)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, in memory of its own.

        Raises:
            CheckpointError: the model has no such tensor.
        """
        if name not in self._shapes:
            raise CheckpointError(f"{self.spec.name}: has no tensor {name}")
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.full(shape, 0.0 if name.endswith(".bias") else 1.0, dtype=self._dtype, device=self._device)
        weight = torch.empty(shape, dtype=self._dtype, device=self._device)
        scale = 1.0 if name == "embed_tokens.weight" else shape[1] ** -0.5
        return weight.normal_(0.0, scale, generator=_generator(name, self._device))

    def stage_weight_bytes(self, first_layer: int, last_layer: int, *, bytes_per_weight: float | None = None) -> int:
        """Bytes of the tensors of layers [first_layer, last_layer), as Checkpoint counts them."""
        shapes = stage_tensors(
            self.spec, first_layer, last_layer, embedding=first_layer == 0, head=last_layer == self.spec.num_layers
        )
        count = sum(torch.Size(shape).numel() for shape in shapes.values())
        return int(count * (self._dtype.itemsize if bytes_per_weight is None else bytes_per_weight))

    def close(self) -> None:
        """Nothing is open."""


def random_calibration(
    spec: ModelSpec, code_dim: int, *, first_layer: int = 0, last_layer: int | None = None
) -> CodeCalibration:
    """Orthonormal directions for the `code` summary of layers [first_layer, last_layer), for keys of mean 0 and variance 1.

    The score is then q.k of what the directions keep of the keys.
    """
    width = spec.num_kv_heads * spec.head_dim
    if not 0 < code_dim <= width:
        raise ValueError(f"code_dim is {code_dim}, but a layer's keys have {width} numbers")
    parts = []
    for layer in range(first_layer, spec.num_layers if last_layer is None else last_layer):
        rng = _generator(f"layers.{layer}.directions", torch.device("cpu"))
        parts.append(torch.linalg.qr(torch.randn(width, code_dim, generator=rng))[0])
    directions = torch.stack(parts)
    scale = 127.0 / CODE_REACH
    return CodeCalibration(directions * scale, directions / scale, torch.zeros(len(directions), width))


def _generator(name: str, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
