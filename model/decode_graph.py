"""Decode steps at fixed addresses: a step reads static buffers, and on a card all its launches are one CUDA graph.

There is a graph for every configuration and batch size of a few ("buckets"), and where some layers rarely scan, one for the
steps in which none of them does; a smaller batch leaves rows of the next bucket unused. The host fills a buffer in pinned
memory, of which each bucket has several, and one asynchronous copy takes it over: nobody waits for anybody unless the host is
that many steps ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import torch

from qsa.kernels.selection_figures_ref import NUM_FIGURES

STEPS_IN_FLIGHT = 4  # that the host may be ahead of the device
STEPS_PREPARED = 4  # that wait for their tokens, one a lane, and spare ones
TOKEN, SLOT, SEQ_LEN, PLACE, FIRST_DUE = range(5)  # lines of DecodeBuffers.ints


@dataclass(frozen=True)
class DecodeRows:
    """Decode rows of one configuration, as the host plans them.

    Attributes:
        due:    int32 [num_layers, len(slots)], 1 where a layer scans in this step.
        places: of the rows among those of the step; None when they are all of them.
        scans_rare: whether a layer that scans less often than others is due for any row.
    """

    sparse_id: int
    slots: Sequence[int]
    seq_lens: Sequence[int]
    due: np.ndarray
    places: Sequence[int] | None = None
    scans_rare: bool = True


class DecodeBuffers:
    """What a step of `batch` rows reads, at addresses that stay. A row that is not used has slot 0 and seq_len 0.

    Attributes:
        ints:   int32, a line each: tokens, slots, seq_lens, places, and what is due in each layer. Lines begin at a
                multiple of 16 bytes.
        hidden: [batch, hidden_size] on every stage but the first; a step may change it.
    """

    def __init__(
        self,
        batch: int,
        num_layers: int,
        hidden_size: int | None,
        dtype: torch.dtype,
        device: torch.device,
        is_pinned: bool = False,
    ) -> None:
        shape = (FIRST_DUE + num_layers, -(-batch // 4) * 4)
        self.batch = batch
        self.ints = torch.zeros(shape, dtype=torch.int32, device=device, pin_memory=is_pinned)
        self.hidden = None if hidden_size is None else torch.zeros(batch, hidden_size, dtype=dtype, device=device)

    @property
    def token_ids(self) -> torch.Tensor:
        return self.ints[TOKEN, : self.batch]

    @property
    def slots(self) -> torch.Tensor:
        return self.ints[SLOT, : self.batch]

    @property
    def seq_lens(self) -> torch.Tensor:
        return self.ints[SEQ_LEN, : self.batch]

    @property
    def places(self) -> torch.Tensor:
        return self.ints[PLACE, : self.batch]

    @property
    def due(self) -> torch.Tensor:
        return self.ints[FIRST_DUE:, : self.batch]


class HostFigures:
    """Figures of a step on their way to the host. `values`: float32 [num_layers, batch, 5] in pinned memory."""

    def __init__(self, batch: int, num_layers: int, is_cuda: bool) -> None:
        self.values = torch.zeros(num_layers, batch, NUM_FIGURES, pin_memory=is_cuda)
        self._event = torch.cuda.Event() if is_cuda else None

    def send(self, figures: torch.Tensor) -> None:
        """Copy a step's figures once the device has them."""
        self.values.copy_(figures, non_blocking=True)
        if self._event is not None:
            self._event.record()

    @property
    def is_ready(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> torch.Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self.values


class _Staging:
    """One step's numbers on the host, until the device has copied them."""

    def __init__(self, batch: int, num_layers: int, is_cuda: bool) -> None:
        host = torch.device("cpu")
        self.ints = DecodeBuffers(batch, num_layers, None, torch.int32, host, is_pinned=is_cuda).ints
        self._array = self.ints.numpy()
        self.event = torch.cuda.Event() if is_cuda else None

    def fill(self, rows: DecodeRows) -> None:
        """Wait until the device has the numbers of an earlier step, then write those of this one but tokens."""
        if self.event is not None:
            self.event.synchronize()
        count, array = len(rows.slots), self._array
        array[:] = 0
        array[SLOT, :count] = rows.slots
        array[SEQ_LEN, :count] = rows.seq_lens
        array[FIRST_DUE:, :count] = rows.due
        if rows.places is not None:
            array[PLACE, :count] = rows.places

    def fill_tokens(self, rows: DecodeRows, token_ids: torch.Tensor) -> None:
        given = token_ids.numpy()
        self._array[TOKEN, : len(rows.slots)] = given if rows.places is None else given[list(rows.places)]


class _Bucket:
    """The buffers of one batch size, used in turn."""

    def __init__(self, batch: int, num_layers: int, hidden_size: int | None, dtype: torch.dtype, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.buffers = DecodeBuffers(batch, num_layers, hidden_size, dtype, device)
        self._staging = cycle([_Staging(batch, num_layers, is_cuda) for _ in range(STEPS_IN_FLIGHT + STEPS_PREPARED)])
        self._figures = cycle([HostFigures(batch, num_layers, is_cuda) for _ in range(STEPS_IN_FLIGHT)])

    def next(self) -> _Staging:
        return next(self._staging)

    def next_figures(self) -> HostFigures:
        """Taken by steps that have figures alone: others may come between two of them and must not use up a turn."""
        return next(self._figures)


@dataclass(frozen=True)
class _Captured:
    """A graph, and where it leaves its results."""

    graph: torch.cuda.CUDAGraph
    out: torch.Tensor
    figures: torch.Tensor | None


@dataclass(frozen=True)
class ReadyStep:
    """A step whose numbers are on the host, all but its tokens. It runs once, or never."""

    rows: DecodeRows
    bucket: _Bucket
    staging: _Staging
    captured: _Captured | None


Compute = Callable[[int, DecodeBuffers, bool], tuple[torch.Tensor, torch.Tensor | None]]


class DecodeSteps:
    """Runs decode steps. The state: static buffers, and the graphs captured so far; what has none runs launch by launch."""

    def __init__(
        self,
        compute: Compute,
        *,
        num_layers: int,
        max_sequences: int,
        hidden_size: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate the buffers.

        Args:
            compute:     the launches of a step under a configuration, with or without scans in layers that rarely scan:
                         from buffers to hidden states or logits, a row a row of the buffers, and the figures of its
                         selection, float32 [num_layers, batch, 5].
            hidden_size: of the hidden states that come in; None on the first stage, which gets tokens.
        """
        self._compute, self._device = compute, device
        self._buckets = {size: _Bucket(size, num_layers, hidden_size, dtype, device) for size in bucket_sizes(max_sequences)}
        self._graphs: dict[tuple[int, int, bool], _Captured] = {}
        is_cuda = device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if is_cuda else None
        self._side = torch.cuda.Stream(device) if is_cuda else None

    @property
    def sizes(self) -> list[int]:
        """The buckets, from large to small: the order in which graphs that share memory are best captured."""
        return sorted(self._buckets, reverse=True)

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def prepare(self, rows: DecodeRows) -> ReadyStep:
        """What of a step does not need its tokens or hidden states; other steps may run before it does."""
        count = len(rows.slots)
        size = min(size for size in self._buckets if size >= count)
        bucket = self._buckets[size]
        staging = bucket.next()
        staging.fill(rows)
        return ReadyStep(rows, bucket, staging, self._graphs.get((rows.sparse_id, size, rows.scans_rare)))

    def run(self, ready: ReadyStep, given: torch.Tensor) -> tuple[torch.Tensor, HostFigures | None, torch.Tensor]:
        """One step.

        Args:
            given: tokens int [n] on either device, or hidden states [n, hidden_size], of all rows of the step.

        Returns:
            The rows' results in memory of their own, their figures on the way to the host, and `rows.places` on the device.
        """
        rows, bucket, staging, captured = ready.rows, ready.bucket, ready.staging, ready.captured
        count, buffers = len(rows.slots), bucket.buffers
        is_tokens = buffers.hidden is None
        if is_tokens and given.device.type == "cpu":
            staging.fill_tokens(rows, given)
        buffers.ints.copy_(staging.ints, non_blocking=True)
        if not is_tokens or given.device.type != "cpu":
            target = buffers.token_ids if buffers.hidden is None else buffers.hidden
            given = given.to(self._device, non_blocking=True)
            target[:count] = given if rows.places is None else given.index_select(0, buffers.places[:count])
        if captured is None:
            out, figures = self._compute(rows.sparse_id, buffers, rows.scans_rare)
        else:
            captured.graph.replay()
            out, figures = captured.out, captured.figures
        host = None
        if figures is not None:
            host = bucket.next_figures()
            host.send(figures)
        out = out[:count].clone()
        if staging.event is not None:
            staging.event.record()
        return out, host, buffers.places[:count]

    @torch.inference_mode()
    def capture(self, sparse_id: int, size: int, scans_rare: bool = True) -> None:
        """Compile what a step launches, and on a card make a graph of it. No row is used: nothing is written."""
        buffers = self._buckets[size].buffers
        buffers.ints.zero_()
        if self._side is None:
            self._compute(sparse_id, buffers, scans_rare)
            return
        side = self._side
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            self._compute(sparse_id, buffers, scans_rare)
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out, figures = self._compute(sparse_id, buffers, scans_rare)
        graph.replay()  # the first one takes the graph to the device
        self._graphs[sparse_id, size, scans_rare] = _Captured(graph, out, figures)

    def close(self) -> None:
        """Give buffers and graphs back."""
        self._graphs.clear()
        self._buckets.clear()


def bucket_sizes(max_sequences: int) -> list[int]:
    """Batch sizes that have graphs: 1, 2, 4, 8 and so on, and the largest batch."""
    sizes = [1]
    while sizes[-1] < max_sequences:
        sizes.append(min(2 * sizes[-1], max_sequences))
    return sizes
