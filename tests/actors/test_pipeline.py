"""Pipeline: in which order each stage gets its calls, alone and in rounds with bursts, and who hears what becomes of them."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from qsa.actors.pipeline import Pipeline
from qsa.scheduler.plan import BurstEnd, BurstItem, BurstPlan, SequenceStep, StepPlan, StepResult
from qsa.scheduler.request import SamplingParams


class FakeMethod:
    def __init__(self, remote):
        self.remote = remote

    def options(self, **_):
        return self


class FakeStage:
    """Notes its calls; each returns a future that the test resolves by name."""

    def __init__(self):
        self.calls: list[str] = []
        self.futures: dict[str, asyncio.Future] = {}
        for name in ("forward", "drive", "follow", "release", "take_results", "cut"):
            setattr(self, name, FakeMethod(partial(self._call, name)))

    def _call(self, name, *arguments):
        if name == "forward":
            label = f"chunk {StepPlan.from_bytes(arguments[0]).step}"
        elif name == "drive":
            label = f"burst {BurstPlan.from_bytes(arguments[0]).step}"
        elif name == "follow":
            label = f"burst {arguments[1]}"
        else:
            label = name
        self.futures[label] = future = asyncio.get_running_loop().create_future()
        if name != "take_results":
            self.calls.append(label)
        return future


class Listener:
    def __init__(self):
        self.heard: list[tuple] = []

    def on_results(self, results):
        self.heard.append(("results", [result.step for result in results]))

    def on_burst_end(self, end):
        self.heard.append(("end", end.step))

    def on_failure(self, plan, error):
        self.heard.append(("failure", plan.step, str(error)))


def chunk(step):
    return StepPlan(0, step, 0, (SequenceStep("r", 0, 0, (1, 2), is_prefill=True),))


def burst(step):
    return BurstPlan(0, step, ((BurstItem("s", 1, 5, (7,), SamplingParams(), (), 9),),), 4, ())


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def end_burst(stages, step, results=()):
    stages[0].futures["take_results"].set_result((list(results), True))
    for stage in stages:
        stage.futures[f"burst {step}"].set_result(BurstEnd(0, step, (4,), 1.0) if stage is stages[0] else None)
    await settle()


def play(scenario, num_stages=2):
    async def main():
        stages, listener = [FakeStage() for _ in range(num_stages)], Listener()
        await scenario(stages, Pipeline(stages, listener), listener)

    asyncio.run(main())


def test_chunks_alone_follow_each_other_through_all_stages():
    async def scenario(stages, pipeline, listener):
        for step in range(3):
            pipeline.send_chunk(chunk(step))
        assert [stage.calls for stage in stages] == [["chunk 0", "chunk 1", "chunk 2"]] * 2
        stages[1].futures["chunk 1"].set_exception(RuntimeError("no"))
        stages[1].futures["chunk 0"].set_result(StepResult(0, 0, 0))
        await settle()
        assert ("results", [0]) in listener.heard and ("failure", 1, "no") in listener.heard
        assert not pipeline.is_quiet
        stages[1].futures["chunk 2"].set_result(StepResult(0, 2, 0))
        await settle()
        assert pipeline.is_quiet

    play(scenario)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_rounds_run_chunks_on_all_stages_between_two_bursts(num_stages):
    async def scenario(stages, pipeline, listener):
        for turn in range(4):
            pipeline.send_burst(burst(10 * turn))
            assert not pipeline.has_chunk
            pipeline.send_chunk(chunk(10 * turn + 4))
            assert pipeline.has_chunk
            await settle()
            await end_burst(stages, 10 * turn)
        for number, stage in enumerate(stages):
            expected = []
            for turn in range(4):
                expected.append(f"burst {10 * turn}")
                if turn >= number:
                    expected.append(f"chunk {10 * (turn - number) + 4}")
            assert stage.calls == expected
        pipeline.flush()
        assert all(stage.calls[-1] == "chunk 34" for stage in stages)
        assert [heard for heard in listener.heard if heard[0] == "end"] == [("end", 10 * turn) for turn in range(4)]

    play(scenario, num_stages)


def test_a_burst_is_cut_once_and_its_results_come_before_its_end():
    async def scenario(stages, pipeline, listener):
        pipeline.cut()
        pipeline.send_burst(burst(0))
        pipeline.cut()
        pipeline.cut()
        assert stages[0].calls == ["burst 0", "cut"] and stages[1].calls == ["burst 0"]
        await settle()
        stages[0].futures["take_results"].set_result(([StepResult(0, 0, 0), StepResult(0, 0, 1)], False))
        await settle()
        assert listener.heard == [("results", [0, 0])]
        await end_burst(stages, 0, [StepResult(0, 1, 0)])
        assert listener.heard[1:] == [("results", [1]), ("end", 0)]
        assert pipeline.burst is None and pipeline.is_quiet

    play(scenario)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_call_that_raises_fails_the_burst_although_the_others_still_run(failing):
    async def scenario(stages, pipeline, listener):
        pipeline.send_burst(burst(0))
        await settle()
        stages[failing].futures["burst 0"].set_exception(RuntimeError("gone"))
        await settle()
        assert listener.heard == [("failure", 0, "gone")]
        assert pipeline.burst is None and pipeline.is_quiet

    play(scenario)


def test_what_was_under_way_is_forgotten():
    async def scenario(stages, pipeline, listener):
        pipeline.send_chunk(chunk(0))
        pipeline.send_burst(burst(1))
        pipeline.send_chunk(chunk(5))
        await settle()
        pipeline.forget()
        await settle()
        assert stages[0].futures["take_results"].cancelled() and stages[1].futures["chunk 0"].cancelled()
        assert listener.heard == [] and pipeline.burst is None and pipeline.is_quiet
        pipeline.send_chunk(chunk(6))
        assert stages[1].calls[-1] == "chunk 6"

    play(scenario)


def test_releases_reach_every_stage_in_order():
    async def scenario(stages, pipeline, listener):
        pipeline.send_burst(burst(0))
        pipeline.send_chunk(chunk(4))
        pipeline.release(0, (3,))
        await settle()
        await end_burst(stages, 0)
        pipeline.send_burst(burst(5))
        assert stages[0].calls == ["burst 0", "chunk 4", "release", "burst 5"]
        assert stages[1].calls == ["burst 0", "release", "burst 5", "chunk 4"]

    play(scenario)
