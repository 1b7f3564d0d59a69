"""How hidden states travel from stage to stage: one interface, and which of its three forms an engine takes.

This file needs no torch, so the scheduler's process may import it. `object_store` (transport_store.py) is Ray's object store,
`p2p` (transport_p2p.py) connections of the stages' own, `rdt` (transport_rdt.py) Ray's direct transport. A transport serves one
stage in one epoch:

    transport = make_transport(spec, host)               # opens its listener
    transport.connect(addresses, next_stage, first_stage, timeout_s)   # with every stage's address()
    ...                                                  # chunks and bursts
    transport.close()
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from qsa.errors import QSAError
from qsa.link_needs import buffer_rows
from qsa.scheduler.plan import SelectionStats

if TYPE_CHECKING:
    import torch

LOCALHOST = "127.0.0.1"
_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class TransportClosed(QSAError):
    """The other side is gone, or this transport was abandoned or closed: nothing more comes or goes."""


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


@dataclass(frozen=True)
class TransportSpec:
    """What the transport of one stage is made for; plain values.

    Attributes:
        name:          object_store, rdt or p2p.
        dtype:         of the hidden states, torch's name for it: bfloat16.
        device:        where they are computed: cpu or cuda.
        max_rows:      most rows of a lane's step.
        prefill_chunk: most rows of a chunk.
        secret:        the same in all stages; connections are refused without it.
    """

    name: str
    stage: int
    num_stages: int
    dtype: str
    device: str
    hidden_size: int
    lanes: int
    max_rows: int
    prefill_chunk: int
    epoch: int
    secret: bytes

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def buffer_bytes(self) -> int:
        """Memory of the static buffers, where the stage computes; what NCCL takes for itself comes on top."""
        if self.name != "p2p":
            return 0
        rows = buffer_rows(
            is_first=self.is_first,
            is_last=self.is_last,
            lanes=self.lanes,
            max_rows=self.max_rows,
            prefill_chunk=self.prefill_chunk,
        )
        return rows * self.hidden_size * _ITEM_BYTES[self.dtype]


@dataclass
class TransportStats:
    """What a transport has done since it was made; written by the step's thread, read by any.

    Attributes:
        sent_bytes: of hidden states, headers and answers.
        num_sent:   frames, answers and chunks.
        send_s:     time the step's thread lost in sending and packing, waiting for room included.
        wait_s:     time it waited for frames, answers and chunks.
        in_flight:  frames and chunks that were sent and not taken yet; with the object store, frames not delivered yet.
    """

    sent_bytes: int = 0
    num_sent: int = 0
    send_s: float = 0.0
    wait_s: float = 0.0
    in_flight: int = 0


class Transport(Protocol):
    """Called from the thread of the stage's steps, except `abandon` and `deliver`, which any thread may call.

    Every method that sends or waits raises `TransportClosed` when the other side is gone or the transport was abandoned.
    """

    name: str
    wires: tuple[str, ...]  # what carries hidden states from the stage before and to the next one, where there is a choice

    @property
    def stats(self) -> TransportStats: ...

    def address(self) -> str:
        """Where the stages that send to this one find it: host:port, or nothing where Ray's handle is enough."""
        ...

    def connect(self, addresses: Sequence[str], next_stage: Any, first_stage: Any, timeout_s: float) -> None:
        """Connect to the other stages; all stages do so at the same time.

        Args:
            addresses:   of all stages, in their order.
            next_stage:  its actor handle; None on the last stage.
            first_stage: handle of stage 0, which gets the answers; None on stage 0.

        Raises:
            ConfigError: they do not reach each other within `timeout_s`.
        """
        ...

    def pack(self, hidden: torch.Tensor) -> Any:
        """A chunk's [n, hidden_size] in the form that `HiddenMessage.hidden` carries to the next stage.

        With the object store the result may share the tensor's memory, until Ray has taken the message. With p2p a chunk must
        be unpacked there or a later one be, or the third after it waits here.
        """
        ...

    def unpack(self, packed: Any) -> torch.Tensor:
        """What the stage before packed, in memory that no one else writes until the next `unpack`."""
        ...

    def send(self, lane: int, header: bytes, hidden: torch.Tensor | None) -> None:
        """One frame of a burst to the next stage: [rows, hidden_size], or None with frames that only tell something.

        `hidden` may be overwritten afterwards. Waits while two frames of the lane have not been taken.
        """
        ...

    def has_frame(self) -> bool:
        """Whether `receive` finds something, be it that the transport was closed. Other threads may run meanwhile."""
        ...

    def receive(self) -> tuple[bytes, torch.Tensor | None]:
        """The next frame of the stage before, in the order sent.

        The tensor is valid until the second next `receive` of a tensor for the same lane. On a card it is there in the order
        of the current stream's work.
        """
        ...

    def answer(self, data: bytes) -> None:
        """Last stage: a step's result, to stage 0."""
        ...

    def take_answer(self) -> bytes:
        """Stage 0: the next answer, in the order given."""
        ...

    def deliver(self, epoch: int, kind: str, header: bytes, packed: Any) -> bool:
        """Put in what another stage's transport sent by a Ray call; False when it was not for this epoch, and was dropped."""
        ...

    def abandon(self, reason: str = "abandoned") -> None:
        """Whoever waits here, now or later, gets `TransportClosed` within 100 ms."""
        ...

    def close(self) -> None:
        """Give everything back. Calling it again does nothing."""
        ...


def make_transport(spec: TransportSpec, host: str = LOCALHOST) -> Transport:
    """The transport of one stage; host: this node's address, which its listeners are bound to."""
    # imports inside: torch stays out of the scheduler's process, and what is not used is not loaded
    if spec.name == "object_store":
        from qsa.actors.transport_store import ObjectStoreTransport  # noqa: PLC0415

        return ObjectStoreTransport(spec)
    if spec.name == "p2p":
        from qsa.actors.transport_p2p import P2PTransport  # noqa: PLC0415

        return P2PTransport(spec, host)
    if spec.name == "rdt":
        from qsa.actors.transport_rdt import RdtTransport  # noqa: PLC0415

        return RdtTransport(spec)
    raise ValueError(f"transport must be object_store, rdt or p2p, got {spec.name!r}")


def choose_transport(setting: str, device: str, num_stages: int, same_host: bool) -> tuple[str, str]:
    """The transport's name and in a few words why, for the log.

    Args:
        setting:   pipeline.transport.
        same_host: whether all stages are on one machine.
    """
    if setting != "auto":
        return setting, "as pipeline.transport says"
    if num_stages == 1:
        return "object_store", "one stage sends nothing"
    if device == "cuda":
        return "p2p", "cards hand over by NCCL, without the host in the way"
    if same_host:
        return "p2p", "all stages are on one machine, and a step's way to the next one takes 0.05 ms instead of 1.5"
    return "object_store", "stages are on several machines: Ray's own connections reach all of them"
