"""How hidden states travel from stage to stage: one interface, and its form on Ray's object store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from qsa.scheduler.plan import SelectionStats

_NUMPY_VIEWS = {torch.bfloat16: torch.int16}  # types that numpy does not have, and a view of the same bytes


@dataclass(frozen=True)
class HiddenMessage:
    """What a stage hands to the next one for a step.

    Attributes:
        hidden:     the transport's form of [num_tokens, hidden_size]; None when the step computes nothing.
        compute_ms: time in each stage so far.
        selection:  what selection did in the stages so far.
    """

    epoch: int
    step: int
    lane: int
    hidden: Any = None
    compute_ms: tuple[float, ...] = ()
    selection: tuple[SelectionStats, ...] = ()


class Transport(Protocol):
    """Packs a stage's output for the way to the next stage, and unpacks it there."""

    def pack(self, hidden: torch.Tensor) -> Any: ...
    def unpack(self, packed: Any) -> torch.Tensor: ...


class ObjectStoreTransport:
    """Numpy views in Ray's object store: any number of hosts, no set-up, one copy on receipt.

    A tensor put in the store as such is copied ten times slower than a numpy view of its bytes. What comes out of the
    store is shared memory that others may read too, so `unpack` copies it before a layer can write to it. To and from a
    card the bytes pass through pinned memory, at the bus's full rate; PyTorch keeps that memory for the next time.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device

    def pack(self, hidden: torch.Tensor) -> np.ndarray:
        """[num_tokens, hidden_size] as an array of the same bytes, all there when this returns."""
        hidden = hidden.to(self._dtype)
        if hidden.device.type == "cuda":
            pinned = torch.empty(hidden.shape, dtype=self._dtype, pin_memory=True)
            pinned.copy_(hidden, non_blocking=True)
            torch.cuda.current_stream(hidden.device).synchronize()
            hidden = pinned
        return hidden.view(_NUMPY_VIEWS.get(self._dtype, self._dtype)).numpy()

    def unpack(self, packed: np.ndarray) -> torch.Tensor:
        """[num_tokens, hidden_size] in memory of its own; on a card in the order of the stream's work."""
        if self._device.type != "cuda":
            return torch.from_numpy(packed.copy()).view(self._dtype)
        pinned = torch.empty(packed.shape, dtype=_NUMPY_VIEWS.get(self._dtype, self._dtype), pin_memory=True)
        np.copyto(pinned.numpy(), packed)
        return pinned.view(self._dtype).to(self._device, non_blocking=True)
