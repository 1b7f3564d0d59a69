"""A small actor with a transport, for tests of the transports that go by Ray."""

from __future__ import annotations

from typing import Any

import torch
from transport_peers import HIDDEN_SIZE, make_spec

from qsa.actors.transport import HiddenMessage, make_transport


class Peer:
    """One stage: its transport, and what a stage does with it."""

    def __init__(self) -> None:
        self.transport: Any = None

    def open(self, name: str, stage: int, dtype: str) -> str:
        self.transport = make_transport(make_spec(name, stage, dtype=dtype))
        return self.transport.address()

    def connect(self, addresses: list[str], next_stage: Any, first_stage: Any) -> None:
        self.transport.connect(addresses, next_stage, first_stage, 20.0)

    def forward(self, rows: int) -> HiddenMessage:
        hidden = torch.arange(rows * HIDDEN_SIZE, dtype=torch.float32).view(rows, HIDDEN_SIZE)
        return HiddenMessage(7, rows, 0, self.transport.pack(hidden.to(self._dtype())))

    def check(self, message: HiddenMessage) -> bool:
        rows = message.step
        expected = torch.arange(rows * HIDDEN_SIZE, dtype=torch.float32).view(rows, HIDDEN_SIZE).to(self._dtype())
        received = self.transport.unpack(message.hidden)
        same = received.dtype == expected.dtype and torch.equal(received, expected)
        received.zero_()  # it is the reader's
        return same

    def _dtype(self) -> torch.dtype:
        return torch.float32 if self.transport._spec.dtype == "float32" else torch.bfloat16

    def drive(self, steps: int) -> list[bytes]:
        answers = []
        for step in range(steps):
            self.transport.send(step % 2, bytes([step]), torch.full((1 + step % 5, HIDDEN_SIZE), float(step)).to(self._dtype()))
            if step:
                answers.append(self.transport.take_answer())
        answers.append(self.transport.take_answer())
        self.transport.send(0, b"end", None)
        return answers

    def follow(self) -> int:
        steps = 0
        while True:
            header, hidden = self.transport.receive()
            if hidden is None:
                return steps
            assert bool((hidden == header[0]).all()) and len(hidden) == 1 + header[0] % 5
            self.transport.answer(header)
            steps += 1

    def wait_for_answer(self) -> str:
        try:
            self.transport.take_answer()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "answered"

    def deliver(self, epoch: int, kind: str, header: bytes, packed: Any) -> bool:
        return self.transport is not None and self.transport.deliver(epoch, kind, header, packed)

    def close(self) -> None:
        self.transport.close()
