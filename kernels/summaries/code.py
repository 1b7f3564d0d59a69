"""`code`: a slice is scored by its best token, each an int8 vector: all heads' keys on calibrated directions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from qsa.errors import CheckpointError
from qsa.kernels.registry import register
from qsa.kernels.summaries.base import Summary, join, mask_tokens, quantise_rows

FORMAT = "qsa.code.v1"


@dataclass(frozen=True)
class CodeCalibration:
    """Projections of some layers: code = round(clip((k_joint - mean) @ project)), score = (q_h @ query[g's rows]) . code.

    g is the KV head of query head h; k_joint are the keys of all KV heads end to end, after RoPE.

    Attributes:
        project:    float32 [num_layers, num_kv_heads * head_dim, code_dim]
        query:      float32, same shape; the score approximates q.k, without sm_scale, up to a constant per query.
        mean:       float32 [num_layers, num_kv_heads * head_dim]
        scan_every: decode steps between two scans for each layer of the whole model, or None.
    """

    project: torch.Tensor
    query: torch.Tensor
    mean: torch.Tensor
    scan_every: tuple[int, ...] | None = None

    @property
    def code_dim(self) -> int:
        """Bytes of a token's code in a layer."""
        return self.project.shape[2]


def save_calibration(path: str | Path, calibration: CodeCalibration, model: str) -> None:
    """Write a safetensors file that load_calibration reads; projections as float16."""
    tensors = {name: getattr(calibration, name).half().contiguous() for name in ("project", "query", "mean")}
    scan_every = json.dumps(list(calibration.scan_every) if calibration.scan_every else None)
    save_file(tensors, str(path), metadata={"format": FORMAT, "model": model, "scan_every": scan_every})


def load_calibration(path: str | Path, first_layer: int, num_layers: int) -> CodeCalibration:
    """Read the projections of layers [first_layer, first_layer + num_layers).

    Raises:
        CheckpointError: the file is missing, of another format, or has too few layers.
    """
    try:
        with safe_open(str(path), "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise CheckpointError(f"calibration file {path} has format {metadata.get('format')!r}, wanted {FORMAT!r}")
            last_layer = first_layer + num_layers
            parts = {name: file.get_slice(name) for name in ("project", "query", "mean")}
            found = parts["project"].get_shape()[0]
            if found < last_layer:
                raise CheckpointError(f"calibration file {path} has {found} layers, but layer {last_layer - 1} is wanted")
            project, query, mean = (part[first_layer:last_layer].float().contiguous() for part in parts.values())
            scan_every = json.loads(metadata.get("scan_every", "null"))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read calibration file {path}: {error}") from None
    return CodeCalibration(project, query, mean, tuple(scan_every) if scan_every else None)


class CodeSummary(Summary):
    """Per token `code_dim` int8 numbers: [slice_size, code_dim] a slice."""

    dtype = torch.int8

    def init(  # type: ignore[override]
        self, *, num_kv_heads: int, head_dim: int, slice_size: int, calibration: CodeCalibration | None = None, **sizes: Any
    ) -> None:
        if calibration is None:
            raise ValueError("sparse.summary is code, but no calibration was given: run `qsa calibrate` or use sketch")
        self._set_sizes(num_kv_heads, head_dim, slice_size, slice_size * calibration.code_dim)
        width = num_kv_heads * head_dim
        if calibration.project.shape[1] != width:
            raise ValueError(
                f"the calibration is for {calibration.project.shape[1]} key numbers a layer, but the model has"
                f" {num_kv_heads} KV heads of {head_dim}: run `qsa calibrate` for this model"
            )
        self.code_dim = calibration.code_dim
        self._project = calibration.project
        self._bias = -torch.bmm(calibration.mean.unsqueeze(1), calibration.project)  # [num_layers, 1, code_dim]
        self._query = calibration.query.view(-1, num_kv_heads, head_dim, self.code_dim)

    def summarise(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        joint = keys.permute(1, 2, 0, 3).reshape(keys.shape[1] * self.slice_size, -1).float()
        codes = torch.addmm(self._bias[layer], joint, self._project[layer])
        return codes.round_().clamp_(-127.0, 127.0).to(torch.int8).view(keys.shape[1], -1)

    def scan(
        self, layer: int, store: torch.Tensor, q: torch.Tensor, chunks: Sequence[int], first: int, last: int, sm_scale: float
    ) -> torch.Tensor:
        num_kv_heads, num_rows, _ = q.shape
        directions = torch.bmm(q.float(), self._query[layer]).view(-1, self.code_dim)  # [num_kv_heads * num_rows, code_dim]
        numbers, scale = quantise_rows(directions)
        best = []
        for base, part in self.read_blocks(store, chunks, last, len(numbers)):
            scores = torch._int_mm(numbers, part.view(-1, self.code_dim).t())
            best.append(mask_tokens(scores, first - base, last - base, self.slice_size).amax(-1))
        return (join(best) * scale.mul_(sm_scale)).view(num_kv_heads, num_rows, -1)

    def free(self) -> None:
        self._project = self._bias = self._query = torch.empty(0)


register("code_summary", "torch", CodeSummary)
