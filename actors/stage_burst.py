"""A burst on one stage: the first stage drives it, the others follow, and nothing of Ray is in a token's path.

    stage 0      computes lane 0 | lane 1 | lane 0 ...     sends plan and hidden states, takes the last stage's answer
    other stages compute what arrives, in its order        pass it on; the last one samples and answers

While a stage has nothing to launch it prepares a lane's next step, as it will be if no token ends a sequence: of a step on a
card then nothing is left to do but to copy what comes in and to launch graphs.

A frame's header is all that a following stage has to know of a burst: it needs no state of its own, and when a step fails
the failure travels the same way as the step.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgpack
import torch

from qsa.actors.ray_errors import describe
from qsa.actors.stage_steps import StageSteps, StepChoices
from qsa.actors.transport import Transport, TransportClosed
from qsa.scheduler.burst import Burst
from qsa.scheduler.plan import BurstEnd, SelectionStats, SequenceResult, StepPlan, StepResult

END = b""  # the header of a burst's last frame

Report = Callable[[StepResult], None]
Progress = Callable[[bool], None]


@dataclass(frozen=True)
class Frame:
    """A step's header between two stages.

    Attributes:
        plan:      the StepPlan's bytes.
        selection: what selection did in the stages so far.
        error:     why the step has failed on a stage before; then no hidden states come with it.
        following: slot and position of each row of the lane's next step, if no token ends one; empty when there will be none.
    """

    plan: bytes
    selection: tuple[SelectionStats, ...] = ()
    error: str | None = None
    following: tuple[tuple[int, int], ...] = ()

    def to_bytes(self) -> bytes:
        selection = [(s.request_id, s.attended, s.context, s.num_selected, s.newly_hit, s.margin) for s in self.selection]
        packed: bytes = msgpack.packb((self.plan, selection, self.error, self.following))
        return packed

    @classmethod
    def from_bytes(cls, data: bytes) -> Frame:
        plan, selection, error, following = msgpack.unpackb(data, use_list=False)
        return cls(plan, tuple(SelectionStats(*values) for values in selection), error, following)


class Results:
    """Results of the burst under way, until the scheduler takes them. Used by the step thread and by a waiting one."""

    def __init__(self, epoch: int, step: int) -> None:
        self.epoch, self.step = epoch, step
        self._waiting: list[StepResult] = []
        self._is_over = False
        self._changed = threading.Condition()

    def put(self, result: StepResult) -> None:
        with self._changed:
            self._waiting.append(result)
            self._changed.notify_all()

    def finish(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def take(self, timeout_s: float) -> tuple[list[StepResult], bool]:
        """What has come since the last call, and whether that was all; waits until there is one of the two."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_over, timeout_s)
            taken, self._waiting = self._waiting, []
            return taken, self._is_over


def drive(steps: StageSteps, burst: Burst, report: Report, working: Progress) -> BurstEnd:
    """Run a burst on the first stage.

    Args:
        report:  told the result of every lane's every step.
        working: told True when this stage begins to compute, False when it waits for others.

    Raises:
        TransportClosed: another stage is gone; the burst has not ended properly.
    """
    began = time.perf_counter()
    if steps.is_last:
        _drive_alone(steps, burst, report, working)
        return burst.end((time.perf_counter() - began) * 1e3)
    transport = steps.linked
    under_way: deque[StepPlan] = deque()

    def launch(lane: int, before: StepResult | None = None) -> None:
        """Begin the lane's next step; `before` is reported only then, so that whoever hears it does not delay the step."""
        results = [] if before is None else [before]
        plan = burst.next_step(lane)
        if plan is not None:
            working(True)
            try:
                with steps.timer.compute(lane, plan.step):
                    hidden = steps.compute(plan, None)
            except Exception as error:
                results.append(failed(plan, error))
                burst.apply(results[-1])
            else:
                frame = Frame(plan.to_bytes(), steps.selection(plan), following=burst.expected_step(lane))
                with steps.clock.span("send", lane, plan.step):
                    transport.send(lane, frame.to_bytes(), hidden)
                under_way.append(plan)
            working(False)
        for result in results:
            report(result)

    steps.timer.begin()
    try:
        for lane in range(len(burst.plan.lanes)):
            launch(lane)
        while under_way:
            plan = under_way.popleft()
            steps.prepare(plan.lane, burst.expected_step(plan.lane))
            steps.note_selection()
            with steps.timer.wait(plan.lane, plan.step):
                result = StepResult.from_bytes(transport.take_answer())
            assert (result.epoch, result.step, result.lane) == (plan.epoch, plan.step, plan.lane), (
                "answers came in another order"
            )
            burst.apply(result)
            launch(plan.lane, result)
            steps.timer.settle()
    finally:
        try:
            transport.send(0, END, None)
        finally:
            steps.drop_ahead()
    return burst.end((time.perf_counter() - began) * 1e3)


def _drive_alone(steps: StageSteps, burst: Burst, report: Report, working: Progress) -> None:
    """A burst on the only stage: a step's result is there when it has been computed."""
    lanes = deque(range(len(burst.plan.lanes)))
    steps.timer.begin()
    try:
        while lanes:
            plan = burst.next_step(lanes[0])
            if plan is None:
                lanes.popleft()
                continue
            working(True)
            try:
                with steps.timer.compute(plan.lane, plan.step):
                    choices = steps.begin_sample(plan, steps.compute(plan, None))
                    steps.prepare(lanes[1 % len(lanes)], burst.expected_step(lanes[1 % len(lanes)]))
                    results = choices.wait()
                steps.note_selection()
                result = StepResult(plan.epoch, plan.step, plan.lane, results, steps.selection(plan))
            except Exception as error:
                result = failed(plan, error)
            burst.apply(result)
            report(result)
            working(False)
            steps.timer.settle()
            lanes.rotate(-1)
    finally:
        steps.drop_ahead()


def follow(steps: StageSteps, working: Progress, count: Callable[[int], None]) -> None:
    """Run a burst on any other stage, until the frame that ends it.

    The last stage on a card launches a step whose frame has come while the card still chooses the tokens of the step before,
    so that the card never waits for the host between two steps.

    Args:
        working: as `drive` takes it.
        count:   told the tokens of each step that has come this far.

    Raises:
        TransportClosed: another stage is gone.
    """
    transport = steps.linked
    launched: deque[_LastStep] = deque()

    def answer() -> None:
        step = launched.popleft()
        _answer(transport, steps, step)
        working(False)
        if launched:
            working(True)
        if step.frame.error is None:
            steps.prepare(step.plan.lane, step.frame.following)
        steps.note_selection()

    steps.timer.begin()
    try:
        while True:
            while launched and not _comes_first(transport, launched):
                answer()
            with steps.timer.wait(-1, -1):
                header, hidden = transport.receive()
            if header == END:
                if not steps.is_last:
                    transport.send(0, END, None)
                return
            if launched and launched[0].is_done:
                answer()  # first: a frame comes long before its hidden states, but stage 0 has nothing to do without tokens
            working(True)
            frame = Frame.from_bytes(header)
            plan = StepPlan.from_bytes(frame.plan)
            count(plan.num_tokens if frame.error is None else 0)
            if steps.is_last:
                launched.append(_launch_last(steps, plan, frame, hidden))
            else:
                frame = _pass_on(steps, transport, plan, frame, hidden)
                working(False)
                if frame.error is None:
                    steps.prepare(plan.lane, frame.following)
                steps.note_selection()
            steps.timer.settle()
    finally:
        steps.drop_ahead()


def _pass_on(steps: StageSteps, transport: Transport, plan: StepPlan, frame: Frame, hidden: torch.Tensor | None) -> Frame:
    """Compute a frame's step and hand it to the next stage. Returns the frame that is sent on."""
    out: torch.Tensor | None = None
    if frame.error is None:
        try:
            with steps.timer.compute(plan.lane, plan.step):
                out = steps.compute(plan, hidden)
            frame = replace(frame, selection=(*frame.selection, *steps.selection(plan)))
        except Exception as error:
            out, frame = None, replace(frame, error=failed(plan, error).error)
    with steps.clock.span("send", plan.lane, plan.step):
        transport.send(plan.lane, frame.to_bytes(), out)
    return frame


@dataclass
class _LastStep:
    """A step of the last stage whose tokens are being chosen. `choices`: None when it has failed, as `frame.error` says."""

    plan: StepPlan
    frame: Frame
    choices: StepChoices | None = None

    @property
    def is_done(self) -> bool:
        return self.choices is None or self.choices.are_made


def _launch_last(steps: StageSteps, plan: StepPlan, frame: Frame, hidden: torch.Tensor | None) -> _LastStep:
    if frame.error is not None:
        return _LastStep(plan, frame)
    try:
        with steps.timer.compute(plan.lane, plan.step):
            choices = steps.begin_sample(plan, steps.compute(plan, hidden))
        return _LastStep(plan, replace(frame, selection=(*frame.selection, *steps.selection(plan))), choices)
    except Exception as error:
        return _LastStep(plan, replace(frame, error=failed(plan, error).error))


def _comes_first(transport: Transport, launched: deque[_LastStep]) -> bool:
    """Whether another frame has come before the oldest step's tokens are there.

    The host looks again and again: it would wait for the card in just the same way, and sleeps are longer than a step's end
    may be late.
    """
    while not launched[0].is_done:
        if transport.has_frame():
            return True
    return False


def _answer(transport: Transport, steps: StageSteps, step: _LastStep) -> None:
    plan, frame, results = step.plan, step.frame, tuple[SequenceResult, ...]()
    if step.choices is not None:
        try:
            results = step.choices.wait()
        except Exception as error:
            frame = replace(frame, error=failed(plan, error).error)
    result = StepResult(plan.epoch, plan.step, plan.lane, results, frame.selection, error=frame.error)
    with steps.clock.span("send", plan.lane, plan.step):
        transport.answer(result.to_bytes())


def failed(plan: StepPlan, error: Exception) -> StepResult:
    """The result of a step that a stage could not compute."""
    if isinstance(error, TransportClosed):
        raise error
    return StepResult(plan.epoch, plan.step, plan.lane, error=f"the model failed in this step: {describe(error)}")
