"""Engine: starts the actors, generates, aborts, reports, closes. What the CLI, Serve and benchmarks use."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import numpy as np
import ray
from ray.exceptions import GetTimeoutError

from qsa.actors.aborter import Aborter
from qsa.actors.client_desk import POLL_S
from qsa.actors.layer_measure import ask_for_times
from qsa.actors.links import Link
from qsa.actors.output_poller import OutputPoller
from qsa.actors.placement import EngineActors, place, plan_engine, start_actors
from qsa.actors.ray_errors import engine_error, is_lost
from qsa.actors.scheduler_keeper import KeeperEvents, RemoteScheduler, SchedulerKeeper
from qsa.actors.stage_clock import Span, unpack_spans
from qsa.actors.stage_steps import ModelBuilder, build_model
from qsa.actors.telemetry import EngineStats, Health, StageStart, WarmUpProgress
from qsa.actors.warm_up import NUM_TOKENS, ReportProgress, send_first_requests, warm_stages
from qsa.config import EngineConfig
from qsa.device import prefill_chunk
from qsa.errors import EngineDeadError, EngineRecoveringError, QSAError, RequestError
from qsa.model.checkpoint.load import Checkpoint
from qsa.model.checkpoint.open import open_model
from qsa.plan import MemoryPlan
from qsa.scheduler.growth import StageCapacity
from qsa.scheduler.request import FinishReason, RequestOutput, SamplingParams

ANSWER_S = 10.0  # a scheduler that does not answer for so long is taken for dead
HEALTH_S = 2.0

FIRST_TOKENS = 64
LEAST_LENGTH = 64  # of the prompts of a warm-up's first steps on cards
AFTER_STAGES = 2  # steps of a warm-up after the stages' own: a first step through all of them, and first requests

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]
StageLoad = tuple[int, tuple[int, int]]  # chunks of the pool; first layer and the one after the last


class Engine:
    """A model, ready to generate. Owns its actors: they end with `close`, and with the process that started them.

    `generate`, `abort`, `stats` and `health` may be used from any event loop, and from several.

    Attributes:
        starts:    what each stage computes with; empty before the warm-up.
        link:      how the stages are linked; None before the warm-up.
        split:     how layers are divided, and why so.
        warm_up_s: how long the whole warm-up took.
    """

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        memory: MemoryPlan,
        actors: EngineActors,
        name: str,
        capacities: Sequence[StageCapacity] = (),
        loads: Sequence[StageLoad] = (),
    ) -> None:
        """Use `start`."""
        self.config = config
        self.name = name
        self.starts: tuple[StageStart, ...] = ()
        self.link: Link | None = None
        self.warm_up_s = 0.0
        self.spec = checkpoint.spec
        self.tokenizer = checkpoint.tokenizer()
        self.eos_token_ids = checkpoint.eos_token_ids
        self.max_model_len = memory.max_model_len
        self.longest_sequence = memory.longest_sequence  # tokens that the pools hold of a request that is alone
        self.model_name = config.model.name or checkpoint.spec.name
        self.split = memory.split
        self._actors = actors
        self._scheduler = actors.scheduler
        self._capacities, self._loads = tuple(capacities), tuple(loads)
        self._client_id = uuid.uuid4().hex
        limit_s = config.pipeline.start_timeout_s
        self._remote = RemoteScheduler(self._scheduler, limit_s)
        self._remote.arguments = self._capacities, self._loads
        self._poller = OutputPoller(self._poll, name, self._look_for_the_scheduler)
        events = KeeperEvents(self._poller.interrupt, self._poller.resume, self._poller.fail)
        self._keeper = SchedulerKeeper(self._remote, events, name, start_timeout_s=limit_s)
        self._aborter = Aborter(lambda *arguments: self._scheduler.abort.remote(*arguments), ANSWER_S, name)
        self._is_closed = False

    @classmethod
    def start(
        cls,
        config: EngineConfig,
        *,
        name: str = "local",
        on_progress: Progress | None = None,
        build: ModelBuilder = build_model,
        warm_up: bool = True,
    ) -> Engine:
        """Start all actors, load the model and warm everything up. Ray must be initialised; blocks.

        Args:
            name:        `<app>/<replica>`, a part of the actors' names; made unique when it has no slash.
            on_progress: told, in a few words, what is going on.
            build:       makes a stage's model; tests bring their own.
            warm_up:     False: the engine takes requests only after its `warm_up`.

        Raises:
            QSAError: the engine cannot start; nothing of it is left.
        """
        report = on_progress or (lambda _: None)
        if not ray.is_initialized():
            raise EngineDeadError("Ray is not initialised; call ray.init() or start_local_ray() first")
        name = name if "/" in name else f"{name}/{uuid.uuid4().hex[:8]}"
        began = time.monotonic()
        report("reading the model's headers")
        config = place(config)
        checkpoint = open_model(config.model.path, config.model.load_format)
        actors: EngineActors | None = None
        try:
            plan = plan_engine(config, checkpoint)
            report(f"starting {plan.summary}")
            actors = start_actors(plan, config, name, build, report)
            deadline = began + config.pipeline.start_timeout_s
            cards, available = None, plan.memory.available_bytes if plan.memory is not None else None
            if plan.memory is None:  # before measuring, which leaves libraries on a card that the plan counts itself
                looks = [stage.look_at_card.remote() for stage in actors.stages]
                cards = _wait_for(looks, deadline, "looking at its cards", config)
            times = ask_for_times(actors.stages, config, checkpoint.spec)
            if cards is not None or times is not None:
                plan = plan_engine(config, checkpoint, cards, times=times, available=available)
                report(f"loading {plan.summary}")
            assert plan.memory is not None
            logger.info("%s", plan.memory.split.line)
            loads = [(spec.num_chunks, (spec.first_layer, spec.last_layer)) for spec in plan.stages]
            calls = [stage.load.remote(*load) for stage, load in zip(actors.stages, loads, strict=True)]
            capacities = _wait_for(calls, deadline, "loading", config)
            engine = cls(config, checkpoint, plan.memory, actors, name, capacities, loads)
        except BaseException:
            if actors is not None:
                actors.kill()
            raise
        finally:
            checkpoint.close()
        if warm_up:
            engine.warm_up(lambda progress: report(str(progress)))
            report("ready")
        return engine

    def warm_up(self, on_progress: ReportProgress | None = None, first_requests: Callable[[], None] | None = None) -> None:
        """Do everything that happens once, from compiling kernels to the first requests, and count from zero; blocks.

        Args:
            on_progress:    told how far it is.
            first_requests: sends requests the way clients will; default: straight to `generate`.

        Raises:
            QSAError: it cannot be done; the engine is closed.
        """
        report, limit_s = on_progress or (lambda _: None), self.config.pipeline.start_timeout_s
        began = time.monotonic()
        try:
            self.starts, total = warm_stages(self._actors.stages, report, AFTER_STAGES, limit_s)
            report(WarmUpProgress(total - 2, total, "a first step through all stages"))
            call = self._scheduler.begin.remote(self._capacities, self._loads, self._first_lengths())
            (self.link,) = _wait_for([call], time.monotonic() + limit_s, "warming up", self.config)
            report(WarmUpProgress(total - 1, total, "first requests"))
            if first_requests is not None:
                first_requests()
            else:
                with ThreadPoolExecutor(1) as thread:  # which has no event loop of its own
                    thread.submit(asyncio.run, send_first_requests(self, self.first_tokens)).result()
            _wait_for([self._scheduler.reset_stats.remote()], time.monotonic() + limit_s, "warming up", self.config)
            self._keeper.start()
            report(WarmUpProgress(total, total))
        except BaseException:
            self.close()
            raise
        self.warm_up_s = time.monotonic() - began
        for line in self.start_lines():
            logger.info("%s", line)

    def start_lines(self) -> list[str]:
        """What computes here, for a log: a line a stage, how layers are divided, how the stages are linked, and how long the
        warm-up took."""
        several = [self.split.line, str(self.link)] if len(self.starts) > 1 else []
        return [*map(str, self.starts), *several, f"warm-up of the whole engine: {self.warm_up_s:.1f} s"]

    @property
    def first_tokens(self) -> int:
        """Length of the first requests' prompts: on cards a whole prefill chunk, which is done in a moment there."""
        return self._longest_prompt(prefill_chunk(self.config) if self.config.pipeline.device == "cuda" else FIRST_TOKENS)

    def _first_lengths(self) -> list[int]:
        """Lengths of the prompts of the first steps. On cards libraries choose, and load, other kernels for other lengths."""
        chunk = prefill_chunk(self.config)
        if self.config.pipeline.device == "cpu":
            return [self._longest_prompt(chunk)]
        halves = [chunk >> shift for shift in range(chunk.bit_length()) if chunk >> shift >= LEAST_LENGTH]
        return [self._longest_prompt(length) for half in halves for length in (half, 3 * half // 4)]

    def _longest_prompt(self, num_tokens: int) -> int:
        """So many tokens, if the pools hold them and some more."""
        return max(1, min(num_tokens, self.longest_sequence - 2 * NUM_TOKENS))

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        sparse_id: int | None = None,
        priority: int = 0,
        request_id: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Generate one sequence; yields what happened as it happens, the last output has a finish_reason.

        Leaving the iterator early, by closing or cancelling, aborts the request.

        Raises (at the first step):
            RequestError, OverloadedError: the request was not taken.
            EngineRecoveringError: the scheduler was lost and is being brought back, or a stage was and no node has room for
                                   it; also later, when that happens under the request. After the loss of a stage that is
                                   just started again the request goes on.
            EngineDeadError:       the engine is gone for good; also later.
        """
        if self._is_closed:
            raise EngineDeadError("the engine is closed")
        request_id = request_id or uuid.uuid4().hex
        prompt = _as_array(prompt_token_ids)
        sparse_id = self.config.default_sparse_id if sparse_id is None else sparse_id
        queue = self._poller.open(request_id)
        is_over = False
        unanswered: tuple[Any, ...] = ()
        try:
            call = self._scheduler.submit.remote(self._client_id, request_id, prompt, sampling, sparse_id, priority)
            unanswered = (call,)
            try:
                async with asyncio.timeout(ANSWER_S):  # here and below not wait_for, which may swallow a cancellation
                    await call
            except Exception as error:
                is_over = not is_lost(error)  # it was refused; an abort could meet the next request of this id
                raise self._as_error(error) from None
            unanswered = ()
            while not is_over:
                item = await queue.get()
                if isinstance(item, EngineDeadError):
                    raise item
                is_over = item.finish_reason is not None
                if item.finish_reason is FinishReason.LOST:
                    raise EngineRecoveringError(item.error)
                yield item
        finally:
            self._poller.close(request_id)
            if not is_over and not self._is_closed:
                self._aborter.put(request_id, unanswered)

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator gets a last output. Unknown and ended ids are ignored."""
        if not self._is_closed:
            await self._ask(self._scheduler.abort.remote(request_id))

    async def stats(self) -> EngineStats:
        """Counters and pools of all parts.

        Raises:
            EngineDeadError: a part is gone.
        """
        if self._is_closed:
            raise EngineDeadError("the engine is closed")
        stats: EngineStats = await self._ask(self._scheduler.stats.remote())
        return stats

    async def start_trace(self) -> None:
        """Let every stage keep the spans of its time, until `take_trace`."""
        await self._ask(self._scheduler.start_trace.remote())

    async def take_trace(self) -> list[list[Span]]:
        """The spans of every stage since `start_trace`."""
        stages: list[bytes] = await self._ask(self._scheduler.take_trace.remote())
        return await asyncio.to_thread(lambda: [unpack_spans(spans) for spans in stages])

    async def health(self) -> Health:
        """Whether the engine can answer; never waits for the stages, nor long for the scheduler."""
        reason = "the engine is closed" if self._is_closed else self._poller.dead_reason
        if reason is not None:
            return Health(False, reason, float("inf"), is_dead=True)
        reason = self._keeper.reason or self._poller.lost_reason
        if reason is None:
            try:
                async with asyncio.timeout(HEALTH_S):
                    health: Health = await self._scheduler.health.remote()
                return health
            except Exception as error:
                reason = str(self._as_error(error))
        return Health(False, reason, float("inf"), is_dead=not self._keeper.is_keeping)

    def close(self) -> None:
        """End all actors. Open requests end with EngineDeadError. Calling it again does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._keeper.close()
        self._poller.fail("the engine is closed")
        self._aborter.close()
        self._actors.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _poll(self) -> list[RequestOutput]:
        call = self._scheduler.poll.remote(self._client_id)
        try:
            outputs: list[RequestOutput] = ray.get(call, timeout=POLL_S + 3)
        except GetTimeoutError:  # perhaps the whole machine stood still; then the answer is here in a moment
            outputs = ray.get(call, timeout=2)
        return outputs

    async def _ask(self, call: Any) -> Any:
        try:
            async with asyncio.timeout(ANSWER_S):
                return await call
        except Exception as error:
            raise self._as_error(error) from None

    def _look_for_the_scheduler(self) -> bool:
        """A call to the scheduler was not answered; whether somebody brings it back."""
        if self._keeper.is_keeping:
            self._keeper.look()
        return self._keeper.is_keeping

    def _as_error(self, error: Exception) -> QSAError:
        """What a caller is told of a failed call to the scheduler."""
        cause = engine_error(error, "the scheduler")
        if is_lost(error) and self._look_for_the_scheduler():
            return EngineRecoveringError(str(cause))
        return cause


def _as_array(prompt_token_ids: Sequence[int]) -> np.ndarray:
    """Token ids as int64, in which even 256K of them travel quickly."""
    try:
        prompt = np.array(prompt_token_ids)
    except (ValueError, TypeError, OverflowError):
        prompt = np.empty((0, 0))
    if prompt.ndim != 1 or (prompt.dtype.kind not in "iu" and prompt.size):
        raise RequestError("prompt must be a list of token ids", param="prompt")
    return prompt.astype(np.int64)


def _wait_for(calls: list[Any], deadline: float, doing: str, config: EngineConfig) -> Any:
    """Results of all calls; the first failure ends the wait.

    Raises:
        QSAError: the call's own error, or which one was not ready in time.
    """
    pending = list(calls)
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            limit = config.pipeline.start_timeout_s
            raise EngineDeadError(f"the engine was still {doing} after {limit:g} s; raise pipeline.start_timeout_s")
        try:
            ray.get(done)
        except Exception as error:
            cause = engine_error(error, "a stage")
            raise cause from None
    return ray.get(list(calls))
