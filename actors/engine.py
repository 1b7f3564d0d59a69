"""Engine: starts the actors, generates, aborts, reports, closes. What the CLI, Serve and benchmarks use."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import ray
from ray.exceptions import GetTimeoutError

from qsa.actors.aborter import Aborter
from qsa.actors.output_poller import OutputPoller
from qsa.actors.placement import EngineActors, plan_engine, start_actors
from qsa.actors.ray_errors import engine_error
from qsa.actors.scheduler_actor import POLL_S
from qsa.actors.stage_steps import ModelBuilder, build_model
from qsa.actors.telemetry import EngineStats, Health
from qsa.config import EngineConfig
from qsa.errors import EngineDeadError, RequestError
from qsa.model.checkpoint.load import Checkpoint, open_checkpoint
from qsa.plan import MemoryPlan
from qsa.scheduler.request import RequestOutput, SamplingParams

ANSWER_S = 10.0  # a scheduler that does not answer for so long is taken for dead
HEALTH_S = 2.0

Progress = Callable[[str], None]


class Engine:
    """A model, ready to generate. Owns its actors: they end with `close`, and with the process that started them.

    `generate`, `abort`, `stats` and `health` may be used from any event loop, and from several.
    """

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, memory: MemoryPlan, actors: EngineActors, name: str
    ) -> None:
        """Use `start`."""
        self.config = config
        self.name = name
        self.spec = checkpoint.spec
        self.tokenizer = checkpoint.tokenizer()
        self.eos_token_ids = checkpoint.eos_token_ids
        self.max_model_len = memory.max_model_len
        self.longest_sequence = memory.longest_sequence  # tokens that the pools hold of a request that is alone
        self.model_name = config.model.name or checkpoint.spec.name
        self._actors = actors
        self._scheduler = actors.scheduler
        self._client_id = uuid.uuid4().hex
        self._poller = OutputPoller(self._poll, name)
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
    ) -> Engine:
        """Start all actors and wait until they can answer. Ray must be initialised; blocks.

        Args:
            name:        `<app>/<replica>`, a part of the actors' names; made unique when it has no slash.
            on_progress: told, in a few words, what is going on.
            build:       makes a stage's model; tests bring their own.

        Raises:
            QSAError: the engine cannot start; nothing of it is left.
        """
        report = on_progress or (lambda _: None)
        if not ray.is_initialized():
            raise EngineDeadError("Ray is not initialised; call ray.init() or start_local_ray() first")
        name = name if "/" in name else f"{name}/{uuid.uuid4().hex[:8]}"
        began = time.monotonic()
        report("reading the model's headers")
        checkpoint = open_checkpoint(config.model.path)
        actors: EngineActors | None = None
        try:
            plan = plan_engine(config, checkpoint)
            report(f"starting {plan.summary}")
            actors = start_actors(plan, config, name, build)
            deadline = began + config.pipeline.start_timeout_s
            capacities = _wait_for([stage.load.remote() for stage in actors.stages], deadline, "loading", config)
            report("warming up")
            _wait_for([actors.scheduler.begin.remote(capacities)], deadline, "warming up", config)
            engine = cls(config, checkpoint, plan.memory, actors, name)
        except BaseException:
            if actors is not None:
                actors.kill()
            raise
        finally:
            checkpoint.close()
        report("ready")
        return engine

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
            EngineDeadError:               the engine is gone; also later, when it dies under the request.
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
                raise engine_error(error, "the scheduler") from None
            unanswered = ()
            while not is_over:
                item = await queue.get()
                if isinstance(item, EngineDeadError):
                    raise item
                is_over = item.finish_reason is not None
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

    async def health(self) -> Health:
        """Whether the engine can answer; never waits for the stages, nor long for the scheduler."""
        reason = "the engine is closed" if self._is_closed else self._poller.dead_reason
        if reason is None:
            try:
                async with asyncio.timeout(HEALTH_S):
                    health: Health = await self._scheduler.health.remote()
                return health
            except Exception as error:
                reason = str(engine_error(error, "the scheduler"))
        return Health(False, reason, float("inf"))

    def close(self) -> None:
        """End all actors. Open requests end with EngineDeadError. Calling it again does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
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
            outputs: list[RequestOutput] = ray.get(call, timeout=POLL_S + 4)
        except GetTimeoutError:  # perhaps the whole machine stood still; then the answer is here in a moment
            outputs = ray.get(call, timeout=2)
        return outputs

    async def _ask(self, call: Any) -> Any:
        try:
            async with asyncio.timeout(ANSWER_S):
                return await call
        except Exception as error:
            raise engine_error(error, "the scheduler") from None


def _as_array(prompt_token_ids: Sequence[int]) -> np.ndarray:
    """Token ids as int64, in which even 256K of them travel quickly."""
    try:
        prompt = np.array(prompt_token_ids, dtype=np.int64)
    except (ValueError, TypeError, OverflowError):
        prompt = np.empty((0, 0), dtype=np.int64)
    if prompt.ndim != 1:
        raise RequestError("prompt must be a list of token ids", param="prompt")
    return prompt


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
