"""A stage model that needs no weights: tokens follow a rule, chunks are real, and special tokens make trouble on purpose.

`build_scripted` is a ModelBuilder for `Engine.start(..., build=build_scripted)`; `LocalStage` runs a StageActor in this
process behind an actor handle's interface. The next token is `next_token(last token, its position)`, so a test knows
every output in advance. What a prompt may hold:

    NAN       the logits of this row are NaN on the last stage
    RAISE_0   the first stage raises when it computes this token; RAISE_LAST: the last one
    SLOW      the first stage takes SLOW_S for a step with this token; CRAWL: CRAWL_S
    DRAG      followed by itself for ever, DRAG_S a step: a request that does not end soon
    EXIT      the process of the last stage ends at this token
    FUSE      followed by itself and then, at the next position that is a multiple of FUSE_LENGTH, by EXIT
    HANG      the first stage does not end the step with this token
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from qsa.actors.stage import StageActor
from qsa.actors.stage_spec import StageSpec
from qsa.errors import BudgetError, CheckpointError
from qsa.memory.kv_cache import KVCache
from qsa.memory.layout import KVLayout, SummaryLayout
from qsa.model.batch import Segment

VOCAB_SIZE = 49152  # the default model's, whose headers the tests start with
NAN, RAISE_0, RAISE_LAST, SLOW, CRAWL, DRAG, EXIT, HANG, FUSE = 901, 902, 903, 904, 905, 906, 907, 908, 909
FUSE_LENGTH = 32
SLOW_S, CRAWL_S, DRAG_S = 0.1, 2.0, 0.005
HIDDEN_SIZE = 4
KV = KVLayout(num_kv_heads=2, head_dim=256, element_bytes=2)  # 512 tokens a page
SUMMARY = SummaryLayout(slice_size=64, slice_bytes=4096)


def next_token(token: int, position: int) -> int:
    """The token after `token` at `position`: ordinary, and different for every place."""
    if token == FUSE:
        return FUSE if (position + 1) % FUSE_LENGTH else EXIT
    return DRAG if token == DRAG else 1000 + (token * 7 + position) % 40000


def expected_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """What the scripted model generates for a prompt."""
    tokens = [*prompt]
    for _ in range(count):
        tokens.append(next_token(tokens[-1], len(tokens) - 1))
    return tokens[len(prompt) :]


class ScriptedAttention:
    """The real KV cache without the numbers in it."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._seen: dict[int, int] = {}

    def summary_layout(self, sparse_id: int) -> SummaryLayout:
        return SUMMARY

    def open(self, slot: int, sparse_id: int) -> None:
        self._cache.open(slot, SUMMARY)

    def release(self, slot: int) -> None:
        self._cache.release(slot)

    def extend(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            self._cache.extend(segment.slot, segment.end)
            self._seen[segment.slot] = segment.end

    def take_stats(self) -> list[SimpleNamespace]:
        seen, self._seen = self._seen, {}
        return [
            SimpleNamespace(slot=slot, attended=end / 2, context=float(end), num_selected=4, newly_hit=1, margin=0.5)
            for slot, end in seen.items()
        ]


class ScriptedModel:
    """Layers [first_layer, last_layer) of the rule above. Hidden states carry token and position."""

    dtype = torch.float32
    hidden_size = HIDDEN_SIZE
    weight_bytes = 0

    def __init__(self, spec: StageSpec) -> None:
        self.is_first, self.is_last = spec.stage == 0, spec.is_last
        self.cache = KVCache(
            KV,
            torch.float16,
            num_layers=spec.last_layer - spec.first_layer,
            num_chunks=spec.num_chunks,
            max_sequences=spec.max_sequences,
            max_seq_len=spec.max_model_len,
            device=torch.device("cpu"),
        )
        self.attention = ScriptedAttention(self.cache)
        self.prepared: list[list[Segment]] = []
        self.num_prepared, self.num_dropped = 0, 0

    def prepare_decode(self, segments: Sequence[Segment]) -> list[Segment]:
        assert not any(one.slot == other.slot for ready in self.prepared for one in ready for other in segments)
        self.prepared.append(list(segments))
        self.num_prepared += 1
        return self.prepared[-1]

    def run_prepared(self, ready: list[Segment], given: torch.Tensor) -> torch.Tensor:
        self.prepared.remove(ready)
        token_ids, hidden = (given, None) if self.is_first else (None, given)
        return self.forward(ready, token_ids, hidden, range(len(ready)) if self.is_last else [])

    def drop_prepared(self, ready: list[Segment]) -> None:
        self.prepared.remove(ready)
        self.num_dropped += 1

    def forward(
        self,
        segments: Sequence[Segment],
        token_ids: torch.Tensor | None,
        hidden: torch.Tensor | None,
        sample_rows: Sequence[int],
    ) -> torch.Tensor:
        assert not any(one.slot == other.slot for ready in self.prepared for one in ready for other in segments)
        self.attention.extend(segments)
        if self.is_first:
            assert token_ids is not None and hidden is None
            positions = torch.cat([torch.arange(s.start, s.end) for s in segments])
            hidden = torch.zeros(len(token_ids), HIDDEN_SIZE)
            hidden[:, 0], hidden[:, 1] = token_ids, positions
            if (token_ids == RAISE_0).any():
                raise RuntimeError("scripted failure of the first stage")
            for token, seconds in ((SLOW, SLOW_S), (CRAWL, CRAWL_S), (DRAG, DRAG_S)):
                if (token_ids == token).any():
                    time.sleep(seconds)
            if (token_ids == HANG).any():
                time.sleep(3600)
        assert hidden is not None and len(hidden) == sum(s.extend_len for s in segments)
        if not self.is_last:
            return hidden
        if (hidden[:, 0] == EXIT).any():
            os._exit(1)
        if (hidden[:, 0] == RAISE_LAST).any():
            raise RuntimeError("scripted failure of the last stage")
        logits = torch.zeros(len(sample_rows), VOCAB_SIZE)
        for row, (token, position) in enumerate(hidden[list(sample_rows), :2].long().tolist()):
            logits[row, next_token(token, position)] = 10.0
            if token == NAN:
                logits[row, 5] = float("nan")
        return logits

    def close(self) -> None:
        self.cache.close()


def build_scripted(spec: StageSpec) -> ScriptedModel:
    return ScriptedModel(spec)


class WarmingModel(ScriptedModel):
    """One that warms up in so many steps of so many seconds; `trouble` is what its last stage meets on the way."""

    backend, num_graphs = "scripted", 3
    steps, step_s = 4, 0.15
    trouble: Exception | None = None

    def __init__(self, spec: StageSpec) -> None:
        super().__init__(spec)
        self.attention.operator_names = ("scripted_decode", "scripted_prefill")

    def warm_up(self, report: Callable[[int, int, str], None]) -> None:
        for done in range(self.steps):
            report(done, self.steps, f"kernel {done}")
            time.sleep(self.step_s)
        if self.is_last and self.trouble is not None:
            raise self.trouble
        report(self.steps, self.steps, "")


def build_warming(spec: StageSpec) -> WarmingModel:
    return WarmingModel(spec)


def build_cold(spec: StageSpec) -> WarmingModel:
    """The last stage cannot warm up."""
    model = WarmingModel(spec)
    model.trouble = BudgetError("stage 1 ran out of memory; set cache.device_bytes")
    return model


def build_slow(spec: StageSpec) -> WarmingModel:
    """Warming up stands still."""
    model = WarmingModel(spec)
    model.step_s = 600.0
    return model


def build_failing(spec: StageSpec) -> ScriptedModel:
    """The last stage finds its file damaged."""
    if spec.is_last:
        raise CheckpointError("model.gguf: tensor blk.7.attn_q.weight is truncated")
    return ScriptedModel(spec)


class _LocalMethod:
    """`handle.method`: `remote` starts the call and returns an awaitable result."""

    def __init__(self, start: Callable[..., Any]) -> None:
        self.remote = start

    def options(self, **_: Any) -> _LocalMethod:
        return self


class _LocalRef:
    """What a call returns, for event loops and for threads."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self._future).__await__()

    def future(self) -> Future[Any]:
        return self._future


class LocalStage:
    """A StageActor in this process behind an actor handle's interface: steps run one at a time, in the order of the calls,
    and the concurrency groups have threads of their own.

    `calls`: names of the steps as they began.
    """

    STEPS: ClassVar = ("forward", "drive", "follow", "release", "reset", "open_link", "connect", "host")
    GROUPS: ClassVar = {
        "control": ("ping", "stats", "reset_stats", "cut", "abandon", "start_trace", "take_trace"),
        "results": ("take_results",),
        "link": ("deliver",),
    }

    def __init__(self, spec: StageSpec) -> None:
        self.actor = StageActor(spec, build_scripted)
        self.capacity = self.actor.load()
        self.calls: list[str] = []
        self._steps = ThreadPoolExecutor(1)
        self._groups = {group: ThreadPoolExecutor(1) for group in self.GROUPS}
        self._last: asyncio.Future[Any] | None = None
        for name in self.STEPS:
            setattr(self, name, _LocalMethod(partial(self._step, name)))
        for group, names in self.GROUPS.items():
            for name in names:
                setattr(self, name, _LocalMethod(partial(self._control, self._groups[group], name)))

    def _step(self, name: str, *arguments: Any) -> asyncio.Future[Any]:
        before = self._last

        async def run() -> Any:
            if before is not None:
                await asyncio.wait([before])
            given = [await one if isinstance(one, asyncio.Future) else one for one in arguments]
            self.calls.append(name)
            return await asyncio.get_running_loop().run_in_executor(self._steps, getattr(self.actor, name), *given)

        self._last = asyncio.ensure_future(run())
        self._last.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may ask for it
        return self._last

    def _control(self, group: ThreadPoolExecutor, name: str, *arguments: Any) -> Any:
        return _LocalRef(group.submit(getattr(self.actor, name), *arguments))

    def close(self) -> None:
        self.actor.abandon(1 << 30)
        for pool in (self._steps, *self._groups.values()):
            pool.shutdown()
        self.actor.close()
