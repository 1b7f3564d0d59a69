"""Two stages that only exchange hidden states, as Ray actors or as processes of this one: what bench_transport measures."""

from __future__ import annotations

import multiprocessing
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from qsa.actors.transport import TransportSpec, make_transport

ANSWER = bytes(100)  # about as long as a step's result
MAX_ROWS = 8
LANES = 2
HEADER = bytes(200)  # about as long as a step's plan


@dataclass(frozen=True)
class Case:
    """Shapes of one model. chunk: rows of a prefill chunk."""

    rows: int
    hidden_size: int
    dtype: str
    chunk: int

    @property
    def step(self) -> str:
        return f"{self.rows} x {self.hidden_size} {self.dtype}"


class BenchStage:
    """One of two stages; its methods are called from outside, one at a time."""

    def __init__(self, stage: int, device: str) -> None:
        torch.set_num_threads(1)
        self._stage = stage
        self._device = torch.device(device)
        if self._device.type == "cuda":
            self._device = torch.device("cuda", stage % torch.cuda.device_count())
            torch.cuda.set_device(self._device)
        self._transport: Any = None

    def open(self, name: str, wire: str | None, case: Case, epoch: int, secret: bytes) -> str:
        spec = TransportSpec(
            name=name,
            stage=self._stage,
            num_stages=2,
            dtype=case.dtype,
            device=str(self._device),
            hidden_size=case.hidden_size,
            lanes=LANES,
            max_rows=MAX_ROWS,
            prefill_chunk=case.chunk,
            epoch=epoch,
            secret=secret,
        )
        self._transport = make_transport(spec)
        if wire is not None:
            self._transport._backend = wire
        dtype = getattr(torch, case.dtype)
        self._hidden = torch.ones(case.rows, case.hidden_size, dtype=dtype, device=self._device)
        self._chunk = torch.arange(case.chunk, device=self._device).remainder(128).to(dtype)[:, None]
        self._chunk = self._chunk.expand(case.chunk, case.hidden_size).contiguous()
        return str(self._transport.address())

    def connect(self, addresses: Sequence[str], following: Any, first: Any) -> str:
        """Returns what carries the hidden states."""
        self._transport.connect(addresses, following, first, 60.0)
        return next(iter(self._transport.wires), "Ray")

    def drive(self, num_steps: int, lanes: int) -> list[float]:
        """Seconds from one step's answer to the next one's, with a step of each lane under way."""
        transport, runs = self._transport, []
        for lane in range(lanes):
            transport.send(lane, HEADER, self._hidden)
        began = time.perf_counter()
        for step in range(num_steps):
            assert transport.take_answer() == ANSWER
            if step + lanes < num_steps:
                transport.send(step % lanes, HEADER, self._hidden)
            now = time.perf_counter()
            runs.append(now - began)
            began = now
        transport.send(0, b"", None)
        return runs

    def follow(self) -> int:
        """Answer until the frame that ends it; a step's result depends on its hidden states, so a card is waited for."""
        num_steps = 0
        while True:
            header, hidden = self._transport.receive()
            if hidden is None:
                return num_steps
            assert header == HEADER and hidden[-1, -1].item() == 1.0
            self._transport.answer(ANSWER)
            num_steps += 1

    def make_chunk(self) -> Any:
        packed = self._transport.pack(self._chunk)
        self._wait()
        return packed

    def take_chunk(self, packed: Any, check: bool) -> bool:
        received = self._transport.unpack(packed)
        self._wait()
        return not check or torch.equal(received, self._chunk)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def deliver(self, epoch: int, kind: str, header: bytes, packed: Any) -> bool:
        return self._transport is not None and bool(self._transport.deliver(epoch, kind, header, packed))

    def close(self) -> None:
        self._transport.close()
        self._transport = None


class Pair(Protocol):
    """Calls of two BenchStages. What `submit` returns may be an argument of a later call."""

    handles: Sequence[Any]

    def submit(self, stage: int, method: str, *args: Any, **options: Any) -> Any: ...
    def result(self, call: Any) -> Any: ...
    def close(self) -> None: ...


class RayPair:
    """The stages as actors, of a cluster that this process is attached to."""

    def __init__(self, device: str, actor_options: dict[str, Any]) -> None:
        import ray  # noqa: PLC0415 - not needed where stages are processes

        self._ray: Any = ray
        groups = {"control": 2, "link": 1}
        remote = self._ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups=groups, **actor_options)(BenchStage)
        cards = {"num_gpus": 1} if device == "cuda" else {}
        self.handles = [remote.options(num_cpus=0.1, **cards).remote(stage, device) for stage in range(2)]

    def submit(self, stage: int, method: str, *args: Any, **options: Any) -> Any:
        call = getattr(self.handles[stage], method)
        return (call.options(**options) if options else call).remote(*args)

    def result(self, call: Any) -> Any:
        return self._ray.get(call, timeout=300)

    def close(self) -> None:
        for handle in self.handles:
            self._ray.kill(handle)


class _Call:
    def __init__(self, stage: int) -> None:
        self.stage, self.value, self.is_done = stage, None, False


class ProcessPair:
    """The stages as processes of this one, called over pipes."""

    handles = (None, None)

    def __init__(self, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        self._waiting: list[list[_Call]] = [[], []]
        for stage in range(2):
            own, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, stage, device), daemon=True)
            process.start()
            self._pipes.append(own)
            self._processes.append(process)

    def submit(self, stage: int, method: str, *args: Any, **options: Any) -> _Call:
        call = _Call(stage)
        self._pipes[stage].send((method, [self.result(arg) if isinstance(arg, _Call) else arg for arg in args]))
        self._waiting[stage].append(call)
        return call

    def result(self, call: _Call) -> Any:
        while not call.is_done:
            done = self._waiting[call.stage].pop(0)  # answers come in order
            if not self._pipes[call.stage].poll(300):
                raise RuntimeError(f"stage {call.stage} has not answered")
            done.value, done.is_done = self._pipes[call.stage].recv(), True
        if isinstance(call.value, Exception):
            raise call.value
        return call.value

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
            process.join(10)


def _serve(pipe: Any, stage: int, device: str) -> None:
    served = BenchStage(stage, device)
    while True:
        method, args = pipe.recv()
        try:
            pipe.send(getattr(served, method)(*args))
        except Exception as error:
            pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))


def link(pair: Pair, name: str, wire: str | None, case: Case, epoch: int) -> str:
    """Give both stages a transport and connect them; returns what carries the hidden states."""
    secret = secrets.token_bytes(16)
    opened = [pair.submit(stage, "open", name, wire, case, epoch, secret) for stage in range(2)]
    addresses = [pair.result(call) for call in opened]
    first, last = pair.handles
    calls = [pair.submit(0, "connect", addresses, last, None), pair.submit(1, "connect", addresses, None, first)]
    carrier, _ = (pair.result(call) for call in calls)
    return str(carrier)
