"""SchedulerActor over scripted stages that die in this process: streams go on with the same text, and nothing stays."""

from __future__ import annotations

import asyncio
import random
import time

import pytest
from mortal_stage import MortalStage
from scheduler_harness import NUM_CHUNKS, SPARSE, Harness
from scripted_stage import CRAWL, CRAWL_S, DRAG, VOCAB_SIZE, expected_tokens

from qsa.actors import recovery as recovery_module
from qsa.actors.recovery import RecoveryLimits
from qsa.actors.scheduler_actor import SchedulerActor
from qsa.actors.scheduler_spec import SchedulerSpec
from qsa.actors.stage_spec import StageSpec
from qsa.errors import EngineDeadError, EngineRecoveringError
from qsa.scheduler.request import FinishReason

TICK_S = 0.05
NUM_TOKENS = 150  # of streams: with those that take a while for each, still some half a second after the fault
LIMITS = RecoveryLimits(total_s=5, reset_s=0.5, silent_s=0.3, starting_s=1.0, ask_s=0.01)


class MortalHarness(Harness):
    """Stages that can be killed; ended ones are started again."""

    def __init__(self, num_stages: int = 2, **settings) -> None:
        super().__init__(num_stages, tick_s=TICK_S, **settings)
        for stage in self.stages:
            stage.close()
        self.stages = [
            MortalStage(StageSpec(n, num_stages, 2 * n, 2 * n + 2, "scripted", NUM_CHUNKS, 8, 4096, SPARSE))
            for n in range(num_stages)
        ]
        self.actor = self.new_actor()

    def new_actor(self) -> SchedulerActor:
        spec = SchedulerSpec(
            max_sequences=8,
            max_waiting=64,
            max_model_len=4096,
            prefill_chunk=64,
            growth_horizon=64,
            eos_token_ids=(2,),
            lanes=2,
            sparse=SPARSE,
            vocab_size=VOCAB_SIZE,
            default_sparse_id=1,
            tick_s=TICK_S,
            stuck_s=4.0,
        )
        actor = SchedulerActor(spec, self.stages)
        actor._recovery._limits = LIMITS
        return actor

    @property
    def loads(self):
        return [(NUM_CHUNKS, None)] * len(self.stages)

    async def __aenter__(self):
        entered = await super().__aenter__()
        self.actor._recovery.loads = self.loads
        return entered

    async def until_recovered(self) -> None:
        await self.until(lambda: self.actor._recovering is None)

    async def until_free(self) -> None:
        deadline = time.monotonic() + 5
        while not await self.all_free():
            assert time.monotonic() < deadline, await self.actor.stats()
            await asyncio.sleep(0.01)

    def check(self, prompts, max_tokens) -> None:
        """Every stream that was not given up says what it says undisturbed."""
        for name, prompt in prompts.items():
            reason, error = self.ends[name]
            expected = expected_tokens(prompt, max_tokens)
            if reason is FinishReason.ERROR:
                assert error and self.tokens[name] == expected[: len(self.tokens[name])]
            else:
                assert reason is FinishReason.LENGTH and self.tokens[name] == expected


@pytest.fixture
def run(monkeypatch):
    def run(scenario, **settings):
        async def main():
            loop = asyncio.get_running_loop()
            monkeypatch.setattr(recovery_module, "_kill_actor", lambda stage: loop.call_soon_threadsafe(stage.die))
            async with MortalHarness(**settings) as harness:
                await scenario(harness)

        asyncio.run(main())

    return run


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", ["die", "freeze", "break_card"])
def test_a_stream_goes_on_with_the_same_text(run, victim, how):
    async def scenario(h):
        prompts = {"a": [7] * 200, "b": [DRAG], "c": [9] * 3}
        for name, prompt in prompts.items():
            await h.submit(name, prompt, max_tokens=NUM_TOKENS)
        await h.until(lambda: len(h.tokens.get("b", ())) > 30)
        getattr(h.stages[victim], how)()
        await h.until(lambda: h.actor._recovering is not None)
        health = await h.actor.health()
        assert not health.ok and not health.is_dead and health.reason.startswith("recovering: ")
        with pytest.raises(EngineRecoveringError):
            await h.actor.stats()
        await h.submit("new", [5], max_tokens=3)  # waits
        prompts_now = prompts | {"new": [5]}
        await h.until(lambda: len(h.ends) == 4, 15)
        h.check({name: prompts[name] for name in prompts}, NUM_TOKENS)
        assert h.tokens["new"] == expected_tokens([5], 3) and len(prompts_now) == 4
        await h.until_free()
        assert [stage.num_starts for stage in h.stages] == [1 + (n == victim) for n in range(2)]
        assert (await h.actor.health()).ok

    run(scenario)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_deaths_at_random_points(run, num_stages):
    draw = random.Random(num_stages)

    async def scenario(h):
        prompts = {}
        for round_ in range(12):
            for n in range(4):
                name = f"r{round_}-{n}"
                prompts[name] = [draw.randrange(10, 800)] * draw.choice([1, 3, 70, 300])
                await h.submit(name, prompts[name], max_tokens=60)
            await h.until_recovered()
            await asyncio.sleep(draw.uniform(0, 0.3))
            draw.choice(h.stages).die()
            if draw.random() < 0.4:  # another one at any moment of the recovery
                await asyncio.sleep(draw.uniform(0, 0.3))
                draw.choice(h.stages).die()
            await asyncio.sleep(0.05)
        await h.until(lambda: len(h.ends) == len(prompts), 60)
        h.check(prompts, 60)
        num_failed = sum(reason is FinishReason.ERROR for reason, _ in h.ends.values())
        assert num_failed < len(prompts) / 4, f"{num_failed} of {len(prompts)} were given up"
        await h.until_recovered()
        await h.until_free()
        assert not h.actor._desk.num_open and h.actor._pipeline.is_quiet

    run(scenario, num_stages=num_stages)


def test_an_idle_stage_that_died_is_brought_back(run):
    async def scenario(h):
        h.stages[1].die()
        await h.until(lambda: h.actor._recovery.count == 1)
        await h.submit("a", [5], max_tokens=4)
        await h.until(lambda: "a" in h.ends)
        assert h.tokens["a"] == expected_tokens([5], 4)

    run(scenario)


def test_an_abort_during_a_recovery(run):
    async def scenario(h):
        await h.submit("a", [DRAG], max_tokens=4000)
        await h.until(lambda: "a" in h.tokens)
        h.stages[0].start_s = 0.3
        h.stages[0].die()
        await h.until(lambda: h.actor._recovering is not None)
        await h.actor.abort("a")
        await h.until(lambda: "a" in h.ends, 0.2)
        assert h.ends["a"][0] is FinishReason.ABORT and h.actor._recovering is not None
        await h.until_recovered()
        await h.until_free()

    run(scenario)


def test_the_engine_is_dead_when_a_stage_does_not_come_back(run):
    async def scenario(h):
        h.actor._recovery._limits = RecoveryLimits(total_s=0.3, starting_s=10, ask_s=0.01)
        await h.submit("a", [DRAG], max_tokens=4000)
        h.stages[1].start_s = 60
        h.stages[1].die()
        await h.until(lambda: h.died is not None)
        assert "stage 1 is being started" in h.died and "a" not in h.ends
        health = await h.actor.health()
        assert health.is_dead and health.reason == h.died
        with pytest.raises(EngineDeadError, match="being started"):
            await h.submit("late", [5])

    run(scenario)


def test_nobody_waits_for_a_node_that_is_not_there(run):
    async def scenario(h):
        recovery = h.actor._recovery
        recovery._why_no_room = lambda _: "no node"
        for name in ("runs", "reads", "waits"):
            await h.submit(name, [DRAG] * (1 + 300 * (name == "reads")), max_tokens=3000)
        await h.until(lambda: len(h.tokens.get("runs", ())) > 5)
        h.stages[1].start_s = 0.8
        h.stages[1].die()
        await h.until(lambda: len(h.ends) == 3)
        assert set(h.ends.values()) == {(FinishReason.LOST, "stage 1 cannot be started again: no node")}
        with pytest.raises(EngineRecoveringError, match="stage 1 is waiting for a node: no node"):
            await h.submit("late", [5])
        assert "waiting for a node" in (await h.actor.health()).reason
        await h.until_recovered()
        await h.submit("next", [5], max_tokens=4)
        await h.until(lambda: "next" in h.ends)
        assert h.tokens["next"] == expected_tokens([5], 4)
        await h.until_free()

    run(scenario)


def test_a_long_step_is_no_trouble(run):
    async def scenario(h):
        await h.submit("slow", [CRAWL], max_tokens=1)
        while "slow" not in h.ends:
            await asyncio.sleep(0.05)
            assert (await h.actor.health()).ok
        assert h.actor._recovery.count == 0 and CRAWL_S > 30 * TICK_S

    run(scenario)


def test_a_scheduler_in_the_place_of_one_that_was_lost(run):
    async def scenario(h):
        await h.submit("lost", [DRAG], max_tokens=4000)
        await h.until(lambda: len(h.tokens.get("lost", ())) > 5)
        old, h.actor = h.actor, h.new_actor()
        old._watchdog.stop()
        old._pipeline.forget()  # its process is gone; what it sent to the stages is under way
        h.stages[1].die()  # and so is a stage
        h._collector.cancel()
        assert not (await h.actor.ping()).has_begun
        with pytest.raises(EngineRecoveringError):
            await h.submit("early", [5])
        await h.actor.resume([stage.capacity for stage in h.stages], h.loads, 1_000_000, 0.1)
        assert (await h.actor.ping()).has_begun
        h._collector = asyncio.create_task(h._collect())
        await h.submit("next", [6] * 100, max_tokens=20)
        await h.until(lambda: "next" in h.ends)
        assert h.tokens["next"] == expected_tokens([6] * 100, 20)
        await h.until_free()
        assert [stage.num_starts for stage in h.stages] == [1, 2]

    run(scenario)
