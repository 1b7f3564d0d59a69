"""Bursts over stages of this process: the same tokens whatever the transport and the number of stages, cuts, and failures."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace

import pytest
from scripted_stage import NAN, RAISE_0, RAISE_LAST, LocalStage, expected_tokens, next_token

from qsa.actors.links import Linker
from qsa.actors.stage_spec import StageSpec
from qsa.kernels.registry import SparseConfig
from qsa.scheduler.plan import BurstItem, BurstPlan, SequenceStep, StepPlan
from qsa.scheduler.request import SamplingParams

SPARSE = {0: SparseConfig(dense=True), 1: SparseConfig()}
GREEDY = SamplingParams(temperature=0.0, max_tokens=1000)
TRANSPORTS = ["object_store", "p2p"]


class Stages:
    """Linked scripted stages, with sequences prefilled on them."""

    def __init__(self, num_stages: int, transport: str) -> None:
        self.stages = [
            LocalStage(StageSpec(n, num_stages, 2 * n, 2 * n + 2, "scripted", 64, 8, 4096, SPARSE)) for n in range(num_stages)
        ]
        self._linker = Linker(self.stages, transport, "cpu")
        self._step = 0
        self._open: dict[int, list[int]] = {}  # slot -> tokens, of which the last one is not computed yet

    async def __aenter__(self):
        await self._linker.link()
        return self

    async def __aexit__(self, *_):
        for stage in self.stages:
            stage.actor.abandon(0)
        for stage in self.stages:
            stage.close()

    async def prefill(self, slot: int, prompt: list[int], epoch: int = 0) -> None:
        item = SequenceStep(f"r{slot}", slot, 0, tuple(prompt), is_prefill=True, sampling=GREEDY)
        data = StepPlan(epoch, self._step, 0, (item,), ((slot, 1),)).to_bytes()
        self._step += 1
        message = None
        for stage in self.stages:
            message = stage.forward.remote(data, message)
        result = await message
        self._open[slot] = [*prompt, result.results[0].token.token_id]

    def plan(self, lanes, max_steps: int, remaining: int = 1000, epoch: int = 0) -> BurstPlan:
        items = [
            tuple(
                BurstItem(f"r{slot}", slot, len(self._open[slot]) - 1, (self._open[slot][-1],), GREEDY, (), remaining)
                for slot in lane
            )
            for lane in lanes
        ]
        plan = BurstPlan(epoch, self._step, tuple(items), max_steps)
        self._step = plan.end_step
        return plan

    def start(self, plan: BurstPlan):
        calls = [self.stages[0].drive.remote(plan.to_bytes())]
        return calls + [stage.follow.remote(plan.epoch, plan.step) for stage in self.stages[1:]]

    async def run(self, plan: BurstPlan):
        """All results of a burst, and its end."""
        calls, results, is_over = self.start(plan), [], False
        while not is_over:
            taken, is_over = await self.stages[0].take_results.remote(plan.epoch, plan.step)
            results += taken
        end = (await asyncio.gather(*calls))[0]
        for result in results:
            for entry in result.results:
                if entry.token is not None:
                    self._open[int(entry.request_id[1:])].append(entry.token.token_id)
        return results, end


def play(scenario, num_stages=2, transport="object_store"):
    async def main():
        async with Stages(num_stages, transport) as stages:
            await asyncio.wait_for(scenario(stages), 30)

    asyncio.run(main())


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_bursts_give_every_sequence_its_tokens(num_stages, transport):
    prompts = {slot: [50 + slot] * (3 + 40 * slot) for slot in range(5)}

    async def scenario(s):
        for slot, prompt in prompts.items():
            await s.prefill(slot, prompt)
        for lanes, steps in [([[0, 2, 4], [1, 3]], 17), ([[0, 1], [2, 3]], 5), ([[4]], 3), ([[4, 0], [1, 2]], 1)]:
            results, end = await s.run(s.plan(lanes, steps))
            assert end.num_steps == (steps,) * len(lanes) and end.wall_ms > 0
            assert len(results) == steps * len(lanes)
            assert all(len(result.results) == len(lanes[result.lane]) for result in results)
            for lane in range(len(lanes)):  # each lane's results come in order
                numbers = [result.step for result in results if result.lane == lane]
                assert numbers == list(range(numbers[0], numbers[0] + steps))
        for slot, prompt in prompts.items():
            assert s._open[slot][len(prompt) :] == expected_tokens(prompt, len(s._open[slot]) - len(prompt))
        for stage in s.stages:  # each counts the same, prompts and bursts
            stats = await stage.stats.remote()
            assert stats.steps == len(prompts) + 2 * 17 + 2 * 5 + 3 + 2 * 1
            assert stats.tokens == sum(map(len, prompts.values())) + 5 * 17 + 4 * 5 + 3 + 4 * 1

    play(scenario, num_stages, transport)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_steps_are_prepared_before_what_they_need_is_there(num_stages):
    """All but a lane's first one; what was prepared for a row that has ended is dropped, and nothing is left at the end."""

    async def scenario(s):
        for slot in range(2):
            await s.prefill(slot, [50 + slot])
        models = [stage.actor._steps.model for stage in s.stages]
        lanes = [[0], [1]] if num_stages > 1 else [[0, 1]]
        await s.run(s.plan(lanes, 10))
        assert [(m.num_prepared, m.num_dropped, m.prepared) for m in models] == [(9 * len(lanes), 0, [])] * num_stages
        plan = s.plan(lanes, 10)
        tokens = expected_tokens(s._open[0][:1], len(s._open[0]) + 3)[-4:]
        results, _ = await s.run(replace(plan, eos_token_ids=(tokens[2],)))  # slot 0 ends with its third step of ten
        assert [(m.num_dropped, m.prepared) for m in models] == [(1, [])] * num_stages
        assert sum(e.request_id == "r0" for result in results for e in result.results) == 3
        for slot in range(2):
            assert s._open[slot][1:] == expected_tokens([50 + slot], len(s._open[slot]) - 1)

    play(scenario, num_stages, "p2p")


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_stage_that_has_lost_a_slot_fails_that_lane_alone(stage):
    """Wherever it is, and although the next step would have been prepared."""

    async def scenario(s):
        for slot in range(2):
            await s.prefill(slot, [50 + slot])
        await s.stages[stage].release.remote(0, (0,))
        results, _ = await s.run(s.plan([[0], [1]], 5))
        assert [result.lane for result in results if result.error is not None] == [0] and len(results) == 6
        assert all(one.actor._steps.model.prepared == [] for one in s.stages)

    play(scenario, 3, "p2p")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_cut_ends_a_burst_after_the_steps_under_way(transport):
    async def scenario(s):
        for slot in range(2):
            await s.prefill(slot, [60 + slot])
        plan = s.plan([[0], [1]], 3000)
        running = asyncio.ensure_future(s.run(plan))
        await asyncio.sleep(0.2)
        await s.stages[0].cut.remote(plan.epoch, plan.step)
        results, end = await asyncio.wait_for(running, 5)
        assert min(end.num_steps) > 0 and max(end.num_steps) < 3000 and abs(end.num_steps[0] - end.num_steps[1]) <= 1
        early = s.plan([[0], [1]], 100)  # a cut may come before the burst begins
        await s.stages[0].cut.remote(early.epoch, early.step)
        results, end = await s.run(early)
        assert results == [] and end.num_steps == (0, 0)
        await s.run(s.plan([[0], [1]], 4))
        for slot in range(2):
            assert s._open[slot][1:] == expected_tokens([60 + slot], len(s._open[slot]) - 1)

    play(scenario, transport=transport)


def test_frames_of_a_lost_schedulers_link_are_not_taken_for_its_successors():
    async def scenario(s):
        lost = s._linker._number
        for stage in s.stages:
            await stage.reset.remote(1_000_000)
        s._linker = Linker(s.stages, "object_store", "cpu")  # as a new process has it
        await s._linker.link()
        assert not await asyncio.wrap_future(s.stages[1].deliver.remote(lost, "frame0", b"late", None).future())

    play(scenario)


def test_rows_that_end_drop_out_and_the_others_go_on():
    async def scenario(s):
        for slot in range(2):
            await s.prefill(slot, [70 + slot])
        plan = s.plan([[0, 1]], 10)
        short = plan.lanes[0][0].__class__(**{**plan.lanes[0][0].__dict__, "remaining": 3})
        results, end = await s.run(BurstPlan(plan.epoch, plan.step, ((short, plan.lanes[0][1]),), 10))
        assert [len(result.results) for result in results] == [2] * 3 + [1] * 7
        assert end.num_steps == (10,)

    play(scenario)


class SlowCard:
    """Makes a stage's tokens as a card does: not there yet when the step has been launched, but once `num_after` more have
    been, or all `num_steps`. State: what happened in turn."""

    PATIENCE_S = 10.0  # after which the tokens are there all the same

    def __init__(self, stage: LocalStage, num_after: int, num_steps: int) -> None:
        self.num_after, self.num_steps, self.num_launched = num_after, num_steps, 0
        self.log: list[tuple[str, int]] = []
        steps = stage.actor._steps
        self._begin, self._compute = steps.begin_sample, steps.compute
        steps.begin_sample, steps.compute = self.begin_sample, self.compute

    def compute(self, plan, hidden):
        self.num_launched += 1
        self.log.append(("launch", plan.lane))
        return self._compute(plan, hidden)

    def begin_sample(self, plan, logits):
        return SlowChoices(self, plan.lane, self._begin(plan, logits))


class SlowChoices:
    def __init__(self, card, lane, choices) -> None:
        self.card, self.lane, self.choices = card, lane, choices
        self.enough = min(card.num_launched + card.num_after, card.num_steps)
        self.deadline = time.monotonic() + card.PATIENCE_S

    @property
    def are_made(self):
        return self.card.num_launched >= self.enough or time.monotonic() > self.deadline

    def wait(self):
        assert self.card.num_launched >= self.enough, "nothing more was launched"
        self.card.log.append(("tokens", self.lane))
        return self.choices.wait()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_last_stage_launches_the_next_step_while_the_card_chooses_tokens(transport):
    async def scenario(s):
        for slot in range(3):
            await s.prefill(slot, [60 + slot])
        card = SlowCard(s.stages[-1], num_after=1, num_steps=12)
        await s.run(s.plan([[0, 1], [2]], 6))
        for slot in range(3):
            assert s._open[slot][1:] == expected_tokens([60 + slot], len(s._open[slot]) - 1)
        for lane in range(2):
            assert [what for what, of in card.log if of == lane] == ["launch", "tokens"] * 6

    play(scenario, transport=transport)


def test_tokens_that_are_there_when_a_frame_has_come_are_answered_before_its_step_is_launched():
    async def scenario(s):
        await s.prefill(0, [61])
        await s.prefill(1, [62])
        steps = s.stages[-1].actor._steps
        transport, compute, begin, log = steps.linked, steps.compute, steps.begin_sample, []
        receive, answer = transport.receive, transport.answer

        class Choices:  # made while the next frame is being received
            def __init__(self, choices):
                self.num_before, self.wait = log.count("frame"), choices.wait
                self.give_up_at = time.monotonic() + 0.5

            @property
            def are_made(self):
                return log.count("frame") > self.num_before or time.monotonic() > self.give_up_at

        transport.receive = lambda: (receive(), log.append("frame"))[0]
        transport.answer = lambda data: (log.append("answer"), answer(data))[1]
        steps.compute = lambda plan, hidden: (log.append("launch"), compute(plan, hidden))[1]
        steps.begin_sample = lambda plan, logits: Choices(begin(plan, logits))
        await s.run(s.plan([[0], [1]], 1))
        assert log[:5] == ["frame", "launch", "frame", "answer", "launch"]
        assert s._open[0][1:] == expected_tokens([61], 2) and s._open[1][1:] == expected_tokens([62], 2)

    play(scenario, transport="p2p")


def test_a_step_that_raises_behind_one_that_is_not_done_is_answered_in_its_turn():
    async def scenario(s):
        await s.prefill(0, [61])
        await s.prefill(1, [62])
        SlowCard(s.stages[-1], num_after=1, num_steps=2)
        s._open[1][-1] = RAISE_LAST
        results, end = await s.run(s.plan([[0], [1]], 3))
        assert [(r.lane, r.error is None) for r in results] == [(0, True), (1, False), (0, True), (0, True)]
        assert end.num_steps == (3, 1)

    play(scenario, transport="p2p")


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("trouble", [RAISE_0, RAISE_LAST])
def test_a_step_that_raises_ends_its_lane_with_an_error_and_no_other(num_stages, trouble, transport):
    async def scenario(s):
        for slot in range(2):
            await s.prefill(slot, [80 + slot])
        s._open[0][-1] = trouble
        results, _ = await s.run(s.plan([[0], [1]], 6))
        (failed,) = [result for result in results if result.lane == 0]
        assert "scripted failure" in failed.error and failed.results == ()
        assert [result.error for result in results if result.lane == 1] == [None] * 6
        assert s._open[1][1:] == expected_tokens([81], 7)
        for stage in s.stages:
            await stage.release.remote(0, (0,))
        await s.prefill(0, [90])
        await s.run(s.plan([[0], [1]], 3))
        assert s._open[0][1:] == expected_tokens([90], 4)

    play(scenario, num_stages, transport)


def test_a_row_without_a_number_ends_alone():
    async def scenario(s):
        for slot in range(2):
            await s.prefill(slot, [80 + slot])
        s._open[0][-1] = NAN
        results, _ = await s.run(s.plan([[0, 1]], 4))
        assert "finite" in results[0].results[0].error and results[0].results[1].token is not None
        assert [len(result.results) for result in results] == [2, 1, 1, 1]

    play(scenario)


def test_known_tokens_are_fed_one_a_step_before_any_is_sampled():
    async def scenario(s):
        await s.prefill(0, [5])
        known = (11, 12, 13)
        item = BurstItem("r0", 0, 1, known, GREEDY, (), 1000)
        results, _ = await s.run(BurstPlan(0, s._step, ((item,),), 5))
        tokens = [entry.token and entry.token.token_id for result in results for entry in result.results]
        first = next_token(13, 3)
        assert tokens == [None, None, first, next_token(first, 4), next_token(next_token(first, 4), 5)]

    play(scenario)


def test_a_reset_that_waits_for_its_card_is_helped_by_a_late_word_to_give_up():
    async def scenario(s):
        stage = s.stages[1]
        steps = stage.actor._steps
        link, is_waiting = steps.transport, threading.Event()
        abandoned = threading.Event()
        end, link.abandon = link.abandon, lambda *reason: (end(*reason), abandoned.set())

        def settle() -> None:
            is_waiting.set()
            assert abandoned.wait(10), "the card waits for ever"

        steps.settle = settle
        resetting = stage.reset.remote(3)
        assert await asyncio.to_thread(is_waiting.wait, 10)
        await stage.abandon.remote(3)
        await asyncio.wait_for(resetting, 15)

    play(scenario, transport="p2p")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stage_that_is_told_to_give_up_does_so_and_begins_anew(transport):
    async def scenario(s):
        await s.prefill(0, [5])
        waiting = s.stages[1].follow.remote(0, 50)  # nobody drives this burst
        await asyncio.sleep(0.1)
        for stage in s.stages:
            await stage.abandon.remote(3)
        with pytest.raises(Exception, match=r"abandoned|closed"):
            await asyncio.wait_for(waiting, 1)
        for stage in s.stages:
            await stage.reset.remote(3)
            assert (await stage.stats.remote()).pool.num_free == 64
        with pytest.raises(RuntimeError, match="came late"):
            await s.prefill(0, [5], epoch=2)
        await s._linker.link()
        for stage in s.stages:
            await stage.abandon.remote(3)  # late, and about the link before
        await s.prefill(0, [5], epoch=3)
        await s.run(s.plan([[0]], 3, epoch=3))
        assert s._open[0][1:] == expected_tokens([5], 4)

    play(scenario, transport=transport)
