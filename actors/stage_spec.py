"""StageSpec: what one stage is made of, as plain values that travel to its process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from qsa.kernels.registry import SparseConfig


@dataclass(frozen=True)
class StageSpec:
    """What a stage is made of; plain values, so that it travels to the stage's process.

    Attributes:
        model_path:    as in the configuration; every stage opens it and reads its own layers only.
        num_chunks:    of its KV pool; on a card decided when the stage has looked at it, and 0 until then.
        prefill_chunk: most tokens of a prefill step.
        lanes:         micro-batches that decodes are divided into.
        num_threads:   CPU threads of its operators.
    """

    stage: int
    num_stages: int
    first_layer: int
    last_layer: int
    model_path: str
    num_chunks: int
    max_sequences: int
    max_model_len: int
    sparse: Mapping[int, SparseConfig]
    calibration_path: Path | None = None
    dtype: str = "auto"
    kv_dtype: str = "auto"
    quantization: str = "auto"
    load_format: str = "auto"
    device: str = "cpu"
    prefill_chunk: int = 512
    lanes: int = 2
    num_threads: int = 1

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1
