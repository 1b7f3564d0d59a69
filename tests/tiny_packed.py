"""Tiny models in the layouts of AWQ, GPTQ, compressed-tensors and fp8, packed number by number, and what they dequantise to."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Parts = dict[str, torch.Tensor]
NUMBERS = np.random.default_rng


def words_of(numbers: np.ndarray, bits: int) -> torch.Tensor:
    """Numbers [rows, columns] side by side in int32 [rows, columns * bits / 32], the first in the lowest bits."""
    per_word = 32 // bits
    filled = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % per_word)))
    out = np.zeros((len(numbers), filled.shape[1] // per_word), dtype=np.uint32)
    for place in range(per_word):
        out |= filled[:, place::per_word].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(out.view(np.int32).copy())


def make_numbers(weight: torch.Tensor, group: int, bits: int, symmetric: bool, seed: int) -> tuple[np.ndarray, ...]:
    """Random numbers and zeros, and scales of the weight's size: (q [out, in], z [out, groups], s [out, groups])."""
    rng = NUMBERS(seed)
    rows, columns = weight.shape
    q = rng.integers(0, 1 << bits, (rows, columns))
    z = np.full((rows, columns // group), 1 << bits - 1) if symmetric else rng.integers(1, 1 << bits, (rows, columns // group))
    s = rng.uniform(0.5, 1.5, z.shape) * float(weight.std()) * 3.5 / (1 << bits)
    return q, z, s.astype(np.float16)


def dequantised(q: np.ndarray, z: np.ndarray, s: np.ndarray, group_of: np.ndarray) -> torch.Tensor:
    """(q - z) * s with the group of each column."""
    return torch.from_numpy(((q - z[:, group_of]) * s[:, group_of].astype(np.float32)).astype(np.float32))


def awq(weight: torch.Tensor, seed: int, group: int = 32) -> tuple[Parts, torch.Tensor]:
    q, z, s = make_numbers(weight, group, 4, False, seed)
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # output that place i of a word holds

    def pack(numbers: np.ndarray) -> torch.Tensor:
        blocks = numbers.reshape(len(numbers), -1, 8)[:, :, order]
        return words_of(blocks.reshape(numbers.shape), 4)

    parts = {"qweight": pack(q.T), "qzeros": pack(z.T), "scales": torch.from_numpy(s.T.copy())}
    return parts, dequantised(q, z, s, np.arange(q.shape[1]) // group)


def gptq(
    weight: torch.Tensor, seed: int, group: int = 32, bits: int = 4, by_activation: bool = False, is_first: bool = True
) -> tuple[Parts, torch.Tensor]:
    """by_activation: groups of columns that lie scattered. is_first: zeros are stored less one."""
    q, z, s = make_numbers(weight, group, bits, False, seed)
    group_of = np.arange(q.shape[1]) // group
    if by_activation:
        group_of = NUMBERS(17 * q.shape[1]).permutation(group_of)  # the same for layers of one input
    parts = {
        "qweight": words_of(q, bits).T.contiguous(),
        "qzeros": words_of((z - is_first).T, bits),
        "scales": torch.from_numpy(s.T.copy()),
        "g_idx": torch.from_numpy(group_of.astype(np.int32)),
    }
    return parts, dequantised(q, z, s, group_of)


def compressed(
    weight: torch.Tensor, seed: int, group: int = 32, bits: int = 4, symmetric: bool = True, by_activation: bool = False
) -> tuple[Parts, torch.Tensor]:
    q, z, s = make_numbers(weight, group, bits, symmetric, seed)
    group_of = np.arange(q.shape[1]) // group
    parts = {
        "weight_packed": words_of(q, bits),
        "weight_scale": torch.from_numpy(s).bfloat16(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if by_activation:
        group_of = NUMBERS(17 * q.shape[1]).permutation(group_of)
        parts["weight_g_idx"] = torch.from_numpy(group_of.astype(np.int32))
    if not symmetric:
        parts["weight_zero_point"] = words_of(z.T, bits).T.contiguous()
    return parts, dequantised(q, z, parts["weight_scale"].float().numpy(), group_of)


def bytes_by_row(weight: torch.Tensor, seed: int, kind: str, one_scale: bool = False) -> tuple[Parts, torch.Tensor]:
    """int8 or float8 with a scale a row, or one for all."""
    largest = weight.abs().max() if one_scale else weight.abs().amax(1, keepdim=True)
    scale = (largest / (127 if kind == "int8" else 448)).bfloat16()
    values = (weight / scale.float()).clamp(-448, 448)
    values = values.round().to(torch.int8) if kind == "int8" else values.to(torch.float8_e4m3fn)
    parts = {"weight": values, "weight_scale": scale.reshape(1) if one_scale else scale}
    return parts, values.float() * scale.float()


def settings(method: str, **options: Any) -> dict[str, Any]:
    """quantization_config of a method."""
    if method == "compressed-tensors":
        weights = {"num_bits": options.pop("num_bits", 4), "type": options.pop("type", "int"), "strategy": "group"}
        return {"quant_method": method, "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, **options}
    return {"quant_method": method, **options}


FORMATS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor, int], tuple[Parts, torch.Tensor]]]] = {
    "awq": (settings("awq", bits=4, group_size=32, zero_point=True, version="gemm"), awq),
    "gptq": (settings("gptq", bits=4, group_size=32, desc_act=False), gptq),
    "gptq-v2": (
        settings("gptq", bits=4, group_size=32, desc_act=False, checkpoint_format="gptq_v2"),
        lambda weight, seed: gptq(weight, seed, is_first=False),
    ),
    "gptq-8-bits": (
        settings("gptq", bits=8, group_size=32, desc_act=False),
        lambda weight, seed: gptq(weight, seed, bits=8),
    ),
    "gptq-by-activation": (
        settings("gptq", bits=4, group_size=32, desc_act=True),
        lambda weight, seed: gptq(weight, seed, by_activation=True),
    ),
    "compressed-int4": (settings("compressed-tensors", format="pack-quantized"), compressed),
    "compressed-int4-zeros": (
        settings("compressed-tensors", format="pack-quantized"),
        lambda weight, seed: compressed(weight, seed, symmetric=False, by_activation=True),
    ),
    "compressed-int8": (
        settings("compressed-tensors", format="pack-quantized", num_bits=8),
        lambda weight, seed: compressed(weight, seed, bits=8, group=weight.shape[1]),
    ),
    "compressed-bytes": (
        settings("compressed-tensors", format="int-quantized", num_bits=8),
        lambda weight, seed: bytes_by_row(weight, seed, "int8"),
    ),
    "compressed-fp8": (
        settings("compressed-tensors", format="float-quantized", num_bits=8, type="float"),
        lambda weight, seed: bytes_by_row(weight, seed, "fp8"),
    ),
    "fp8": (
        settings("fp8", activation_scheme="static"),
        lambda weight, seed: bytes_by_row(weight, seed, "fp8", one_scale=True),
    ),
}


def make_packed(folder: Path, target: Path, name: str) -> dict[str, torch.Tensor]:
    """Copy a tiny model's folder (not sharded) with the layers' matrices in a format of FORMATS.

    Returns:
        What its tensors dequantise to, by canonical name.
    """
    shutil.copytree(folder, target)
    quantization, pack = FORMATS[name]
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    tensors: Parts = {}
    expected: dict[str, torch.Tensor] = {}
    for seed, (key, weight) in enumerate(load_file(folder / "model.safetensors").items()):
        canonical = key.removeprefix("model.")
        expected[canonical] = weight
        if weight.dim() < 2 or not canonical.startswith("layers."):
            tensors[key] = weight
            continue
        parts, expected[canonical] = pack(weight, seed)
        tensors |= {f"{key.removesuffix('.weight')}.{part}": value for part, value in parts.items()}
    if name == "fp8":
        tensors["model.layers.0.mlp.up_proj.input_scale"] = torch.tensor(1.0)
    save_file(tensors, target / "model.safetensors")
    return expected
