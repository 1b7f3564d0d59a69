"""Which tensors a model must have, where a file keeps each, and how its bytes become a tensor.

Every model file is described the same way, as `StoredTensor`s by canonical name, and checked as a whole against the
model's spec before any weight is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from qsa.errors import CheckpointError
from qsa.model.checkpoint.quantized import QuantizedTensor
from qsa.model.spec import ModelSpec

FLOAT_KINDS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MAX_READ = 1 << 30  # the operating system reads at most 2 GiB at a time


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file.

    Attributes:
        stored_name:   its name there, for messages.
        kind:          F32, F16, BF16 or a quantised kind.
        offset:        first byte in the file.
        permuted_heads: number of heads whose rows are stored as interleaved pairs (q and k of Llama GGUF files); 0: none.
    """

    stored_name: str
    file: Path
    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    permuted_heads: int = 0

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    def load(self, files: WeightFiles) -> torch.Tensor | QuantizedTensor:
        """Read it; as `load_tensor`."""
        data = files.read(self)
        order = half_split_order(self.shape[0], self.permuted_heads) if self.permuted_heads else None
        if self.kind in FLOAT_KINDS:
            plain = data.view(FLOAT_KINDS[self.kind]).reshape(self.shape)
            return plain if order is None else plain.index_select(0, order)
        rows, columns = self.shape
        quantized = QuantizedTensor(self.kind, (rows, columns), data.reshape(rows, -1))
        return quantized if order is None else quantized.select_rows(order)


class WeightFiles:
    """Open files of a checkpoint, read by range: nothing but the asked bytes enters memory.

    Attributes:
        bytes_read: bytes of weights read so far, by file.
    """

    def __init__(self) -> None:
        self._handles: dict[Path, int] = {}
        self.bytes_read: dict[Path, int] = {}

    def read(self, tensor: StoredTensor) -> torch.Tensor:
        """The stored bytes of a tensor, uint8 [nbytes], in memory of its own."""
        out = torch.empty(tensor.nbytes, dtype=torch.uint8)
        view = out.numpy().data
        try:
            if tensor.file not in self._handles:
                self._handles[tensor.file] = os.open(tensor.file, os.O_RDONLY)
            done = 0
            while done < tensor.nbytes:
                count = os.preadv(self._handles[tensor.file], [view[done : done + _MAX_READ]], tensor.offset + done)
                if count == 0:
                    raise CheckpointError(f"{tensor.file}: tensor {tensor.stored_name} is truncated")
                done += count
        except OSError as error:
            raise CheckpointError(f"{tensor.file}: cannot read tensor {tensor.stored_name}: {error.strerror}") from None
        self.bytes_read[tensor.file] = self.bytes_read.get(tensor.file, 0) + tensor.nbytes
        return out

    def close(self) -> None:
        """Close every file. Calling it again does nothing."""
        while self._handles:
            os.close(self._handles.popitem()[1])


def load_tensor(tensor: StoredTensor, files: WeightFiles) -> torch.Tensor | QuantizedTensor:
    """Read one tensor, with the rows of permuted heads back in half-split order."""
    return tensor.load(files)


def half_split_order(rows: int, num_heads: int) -> torch.Tensor:
    """Where each row of a half-split head lies among interleaved ones: 0, 2, 4, .., 1, 3, 5, .. within every head."""
    return torch.arange(rows).reshape(num_heads, -1, 2).transpose(1, 2).reshape(-1)


def layer_tensors(spec: ModelSpec, layer: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of one layer's tensors."""
    q_width, kv_width = spec.num_q_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    hidden, inner = spec.hidden_size, spec.intermediate_size
    prefix = f"layers.{layer}."
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}input_layernorm.weight": (hidden,),
        f"{prefix}self_attn.q_proj.weight": (q_width, hidden),
        f"{prefix}self_attn.k_proj.weight": (kv_width, hidden),
        f"{prefix}self_attn.v_proj.weight": (kv_width, hidden),
        f"{prefix}self_attn.o_proj.weight": (hidden, q_width),
        f"{prefix}post_attention_layernorm.weight": (hidden,),
        f"{prefix}mlp.gate_proj.weight": (inner, hidden),
        f"{prefix}mlp.up_proj.weight": (inner, hidden),
        f"{prefix}mlp.down_proj.weight": (hidden, inner),
    }
    biased = [f"self_attn.{x}_proj" for x in "qkv"] * spec.qkv_bias + ["self_attn.o_proj"] * spec.o_bias
    biased += [f"mlp.{x}_proj" for x in ("gate", "up", "down")] * spec.mlp_bias
    shapes |= {f"{prefix}{name}.bias": shapes[f"{prefix}{name}.weight"][:1] for name in biased}
    if spec.qk_norm:
        shapes |= {f"{prefix}self_attn.{x}_norm.weight": (spec.head_dim,) for x in "qk"}
    return shapes


def stage_tensors(
    spec: ModelSpec, first_layer: int, last_layer: int, *, embedding: bool, head: bool
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what a stage needs; the head of a tied model is `embed_tokens.weight`."""
    shapes: dict[str, tuple[int, ...]] = {}
    table = (spec.vocab_size, spec.hidden_size)
    if embedding or (head and spec.tie_word_embeddings):
        shapes["embed_tokens.weight"] = table
    for layer in range(first_layer, last_layer):
        shapes |= layer_tensors(spec, layer)
    if head:
        shapes["norm.weight"] = (spec.hidden_size,)
        if not spec.tie_word_embeddings:
            shapes["lm_head.weight"] = table
    return shapes


def check_tensors(spec: ModelSpec, found: Mapping[str, StoredTensor], extra: Iterable[StoredTensor], where: Path) -> None:
    """Compare what files hold with what the model needs.

    Args:
        found: tensors whose name the model knows.    extra: those nobody knows.

    Raises:
        CheckpointError: naming the file and every tensor that is missing, unknown or has a wrong shape (first few).
    """
    if spec.num_layers > len(found):  # also keeps a damaged layer count from being enumerated
        raise CheckpointError(f"{where}: the configuration says {spec.num_layers} layers, the files hold {len(found)} tensors")
    wanted = stage_tensors(spec, 0, spec.num_layers, embedding=True, head=True)
    problems = [f"{where}: tensor {name} is missing" for name in wanted if name not in found]
    unknown = [*extra, *(tensor for name, tensor in found.items() if name not in wanted)]
    problems += [
        f"{tensor.file}: tensor {tensor.stored_name} is not part of a {spec.architecture} model with {spec.num_layers} layers"
        for tensor in unknown
    ]
    for name, shape in wanted.items():
        tensor = found.get(name)
        if tensor is not None and tensor.shape != shape:
            problems.append(
                f"{tensor.file}: tensor {tensor.stored_name} has shape {list(tensor.shape)},"
                f" the configuration says {list(shape)}"
            )
        if tensor is not None and len(shape) == 1 and tensor.kind not in FLOAT_KINDS:
            problems.append(
                f"{tensor.file}: tensor {tensor.stored_name} is a vector of type {tensor.kind}, expected a float type"
            )
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError("; ".join(problems[:5]) + more)
