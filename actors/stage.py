"""StageActor: one run of layers with its KV pool, as a process that computes chunks of prompts and bursts of decode steps."""

from __future__ import annotations

import gc
import os
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from qsa.actors.process import this_process
from qsa.actors.stage_clock import StageClock, pack_spans
from qsa.actors.stage_spec import StageSpec
from qsa.actors.telemetry import StagePing, StageStart, StageStats, WarmUpProgress, stage_stats
from qsa.errors import StageLostError
from qsa.scheduler.burst import Burst
from qsa.scheduler.growth import StageCapacity
from qsa.scheduler.plan import BurstEnd, BurstPlan, StepPlan, StepResult

if TYPE_CHECKING:
    from qsa.actors.stage_burst import Results
    from qsa.actors.stage_steps import ModelBuilder, StageSteps
    from qsa.actors.transport import HiddenMessage
    from qsa.memory.budget import CardMemory
    from qsa.model.layer_times import LayerTimes

RESULTS_S = 1.0  # longest wait for a burst's next results


class StageActor:
    """Layers [first_layer, last_layer) and their K and V. Chunks, bursts and releases run one at a time, in the order of
    their calls.

    A plain class, so that a test can build it in-process. As an actor, three concurrency groups run beside the steps:
    `control` reads counters and sets flags, `results` waits for a burst's results, `link` takes what other stages deliver.
    """

    def __init__(self, spec: StageSpec, build: ModelBuilder | None = None) -> None:
        self._spec, self._build = spec, build
        self._steps: StageSteps | None = None
        self._clock = StageClock()
        self._epoch = 0  # plans of older ones are late, and dropped
        self._reset_epoch = -1
        self._working_since: float | None = None
        self._progress = WarmUpProgress()
        self._num_steps, self._num_tokens = 0, 0
        self._lock = threading.Lock()  # of what control calls and steps share: the burst under way and its results
        self._burst: Burst | None = None
        self._results: Results | None = None
        self._to_cut: tuple[int, int] | None = None  # epoch and step of a burst to end, which may not have begun

    def __repr__(self) -> str:
        s = self._spec
        return f"Stage{s.stage}(layers {s.first_layer} to {s.last_layer - 1}, {s.device})"

    # The scheduler has handles of this class, so its process imports this file: without torch, thanks to the imports below.

    def look_at_card(self) -> CardMemory:
        """What the stage's card has free, before anything is planned for it.

        Raises:
            ConfigError: there is none.
        """
        from qsa.actors.stage_steps import look_at_card  # noqa: PLC0415

        return look_at_card(self._spec)

    def measure_layers(self, sparse_id: int) -> LayerTimes | None:
        """What layers, head and embedding cost here, before it is known which ones are this stage's.

        None on all stages but the last, which import meanwhile what loading needs, and where a test brings its own model; a
        builder whose layers are the product's says so by an attribute `has_real_layers`.
        """
        from qsa.actors.layer_measure import measure_layers  # noqa: PLC0415
        from qsa.actors.stage_steps import build_model  # noqa: PLC0415

        is_real = self._build in (None, build_model) or getattr(self._build, "has_real_layers", False)
        if not self._spec.is_last or not is_real:
            return None
        return measure_layers(self._spec, sparse_id)

    def load(self, num_chunks: int | None = None, layers: tuple[int, int] | None = None) -> StageCapacity:
        """Read the weights and allocate the KV pool; not in `__init__`, where Ray would lose the error's type.

        num_chunks, layers: of the pool, and the first layer and the one after the last, where they were not known when the
        stage was started.

        Raises:
            QSAError: the model or the memory is not there.
        """
        from qsa.actors.stage_steps import StageSteps, build_model  # noqa: PLC0415

        if num_chunks is not None:
            self._spec = replace(self._spec, num_chunks=num_chunks)
        if layers is not None:
            self._spec = replace(self._spec, first_layer=layers[0], last_layer=layers[1])
        self._steps = StageSteps(self._spec, self._build or build_model, self._clock)
        return self._steps.capacity()

    def warm_up(self) -> StageStart:
        """Do everything that happens once, before the first step; `progress` tells how far it is.

        Raises:
            QSAError: it cannot be done, for want of memory.
        """
        start = self._loaded().warm_up(self._note_progress)
        if self._spec.device == "cuda":
            gc.collect()
            gc.freeze()  # what is there now stays: looking through it again and again would hold steps up
        return start

    def _note_progress(self, done: int, total: int, what: str) -> None:
        self._progress = WarmUpProgress(done, total, what)

    # links

    def host(self) -> str:
        """The address of this stage's node."""
        import ray  # noqa: PLC0415 - in-process stages have none

        return str(ray.util.get_node_ip_address()) if ray.is_initialized() else "127.0.0.1"  # type: ignore[no-untyped-call]

    def open_link(self, link: int, name: str, secret: bytes) -> str:
        """Prepare to exchange hidden states with the other stages, for everything before in vain.

        Args:
            link:   a running number; what comes from another link is dropped.
            name:   the kind of transport.
            secret: that all stages of the engine share.

        Returns:
            The address for the other stages.
        """
        return self._loaded().link(link, name, secret, self.host())

    def connect(self, addresses: list[str], next_stage: Any, first_stage: Any, timeout_s: float) -> tuple[str, ...]:
        """Join the links that every stage has opened.

        Returns:
            What carries hidden states, where the transport has a choice.

        Raises:
            QSAError: another stage cannot be reached.
        """
        transport = self._loaded().linked
        transport.connect(addresses, next_stage, first_stage, timeout_s)
        return transport.wires

    def deliver(self, link: int, kind: str, header: bytes, packed: Any) -> bool:
        """Take what another stage's transport sends by a call; concurrency group `link`. False: it belongs to another link."""
        steps = self._steps
        transport = None if steps is None else steps.transport
        return transport is not None and transport.deliver(link, kind, header, packed)

    def reset(self, epoch: int) -> None:
        """Close every slot and let go of the link; plans of older epochs are dropped from now on."""
        self._epoch = epoch
        steps = self._loaded()
        steps.settle()  # a card may wait for a stage that is gone, until `abandon` ends that
        steps.unlink()
        self._reset_epoch = epoch
        steps.release(range(self._spec.max_sequences))

    # steps

    def forward(self, data: bytes, message: HiddenMessage | None) -> HiddenMessage | StepResult:
        """Run this stage's part of a chunk plan.

        Args:
            data:    a StepPlan's bytes.
            message: what the stage before returned for the same plan; None on the first stage.

        Returns:
            The message for the next stage; on the last stage, the step's result.
        """
        steps, plan = self._loaded(), StepPlan.from_bytes(data)
        self._take_epoch(plan.epoch)
        self._note_working(True)
        try:
            result = steps.run(plan, message)
            self._num_tokens += plan.num_tokens
            return result
        finally:
            self._note_working(False)

    def drive(self, data: bytes) -> BurstEnd:
        """Run a burst, as the first stage; its results are for `take_results`.

        data: a BurstPlan's bytes.

        Raises:
            TransportClosed: another stage is gone.
        """
        from qsa.actors.stage_burst import drive  # noqa: PLC0415

        steps, plan = self._loaded(), BurstPlan.from_bytes(data)
        self._take_epoch(plan.epoch)
        results = self._results_of(plan.epoch, plan.step)
        with self._lock:
            burst = self._burst = Burst(plan)
            if self._to_cut == (plan.epoch, plan.step):
                burst.cut()

        def report(result: StepResult) -> None:
            self._num_tokens += len(result.results)
            results.put(result)

        try:
            return drive(steps, burst, report, self._note_working)
        finally:
            self._burst = None
            self._note_working(False)
            results.finish()

    def follow(self, epoch: int, step: int) -> None:
        """Run a burst, as any other stage, until the first one ends it.

        Raises:
            TransportClosed: another stage is gone.
        """
        from qsa.actors.stage_burst import follow  # noqa: PLC0415

        self._take_epoch(epoch)
        try:
            follow(self._loaded(), self._note_working, self._count_tokens)
        finally:
            self._note_working(False)

    def release(self, epoch: int, slots: tuple[int, ...]) -> None:
        """Give slots back. Those that are not open, after a step that failed on an earlier stage, are left alone."""
        if epoch >= self._epoch:
            self._loaded().release(slots)

    def _take_epoch(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise RuntimeError(f"a plan of epoch {epoch} came late: this is epoch {self._epoch}")
        self._epoch = epoch

    def _note_working(self, is_working: bool) -> None:
        self._num_steps += not is_working and self._working_since is not None  # it is also said once more at a burst's end
        self._working_since = time.perf_counter() if is_working else None

    def _count_tokens(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens

    # concurrency group `results`

    def take_results(self, epoch: int, step: int) -> tuple[list[StepResult], bool]:
        """Results of a burst since the last call, and whether they were the last ones; waits RESULTS_S for something."""
        return self._results_of(epoch, step).take(RESULTS_S)

    def _results_of(self, epoch: int, step: int) -> Results:
        """The burst's results, also before it begins; those of an older burst are forgotten."""
        from qsa.actors.stage_burst import Results  # noqa: PLC0415

        with self._lock:
            if self._results is None or (self._results.epoch, self._results.step) < (epoch, step):
                self._results = Results(epoch, step)
            assert (self._results.epoch, self._results.step) == (epoch, step), "results of a burst that is long over"
            return self._results

    # concurrency group `control`

    def cut(self, epoch: int, step: int) -> None:
        """End a burst after the steps that are under way."""
        with self._lock:
            self._to_cut = epoch, step
            burst = self._burst
            if burst is not None and (burst.plan.epoch, burst.plan.step) == (epoch, step):
                burst.cut()

    def abandon(self, epoch: int) -> None:
        """What this stage waits for from others will not come: whoever waits gives up. `reset(epoch)` follows.

        One that comes behind its own `reset` speaks of a link that is gone.
        """
        if epoch <= self._reset_epoch:
            return
        self._epoch = max(self._epoch, epoch)
        steps = self._steps
        transport = None if steps is None else steps.transport
        if transport is not None:
            transport.abandon()

    def ping(self) -> StagePing:
        """Whether the stage computes, and how far it has come."""
        since = self._working_since
        running_s = 0.0 if since is None else time.perf_counter() - since
        return StagePing(running_s, self._num_steps, this_process(), self._steps is not None)

    def progress(self) -> WarmUpProgress:
        """How far the warm-up is."""
        return self._progress

    def stats(self) -> StageStats:
        spec, steps = self._spec, self._loaded()
        return stage_stats(
            self._clock,
            steps.transport,
            stage=spec.stage,
            layers=(spec.first_layer, spec.last_layer),
            device=spec.device,
            pid=os.getpid(),
            pool=steps.model.cache.stats(),
            weight_bytes=steps.model.weight_bytes,
            steps=self._num_steps,
            tokens=self._num_tokens,
            running_s=self.ping().running_s,
            sent_bytes=steps.sent_bytes,
        )

    def reset_stats(self) -> None:
        """Begin counting at zero, after a warm-up."""
        self._clock.reset()
        self._num_steps, self._num_tokens = 0, 0
        if self._steps is not None:
            self._steps.forget_sent()

    def start_trace(self) -> None:
        """Keep the spans of time that the clock measures, the newest ones."""
        self._clock.start_trace()

    def take_trace(self) -> bytes:
        """The spans since `start_trace`, for `unpack_spans`; none are kept after that."""
        return pack_spans(self._clock.take_trace())

    def close(self) -> None:
        """Give weights and KV back. Calling it again does nothing."""
        if self._steps is not None:
            self._steps.close()
            self._steps = None

    def _loaded(self) -> StageSteps:
        if self._steps is None:
            raise StageLostError(f"{self!r} has not been loaded, or is closed")
        return self._steps
