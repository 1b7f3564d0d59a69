"""Recovery over stand-in stages: who is started again and who is not, what goes wrong on the way, and when it gives up."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from stand_in_stages import StandInStage

from qsa.actors import recovery as module
from qsa.actors.process import ProcessId, end_process, this_process
from qsa.actors.recovery import MAX_RECOVERIES, Recovery, RecoveryLimits
from qsa.actors.watchdog import Trouble
from qsa.errors import BudgetError, CheckpointError, EngineDeadError

LIMITS = RecoveryLimits(total_s=3, reset_s=0.1, silent_s=0.1, loading_silent_s=0.15, starting_s=0.5, ask_s=0.005, memory_s=0.05)
DIED = Trouble("died", 1, "stage 1 has died")
SILENT = Trouble("silent", 1, "stage 1 has not answered for 6 s")


class Harness:
    def __init__(self, monkeypatch, num_stages=3, **limits) -> None:
        self.stages = [StandInStage() for _ in range(num_stages)]
        for stage in self.stages:
            stage.is_loaded = True
        self.first = [stage.process for stage in self.stages]
        self.links: list[list[int]] = []  # the stages' epochs at each link
        self.epochs = itertools.count(7)
        self.on_link = lambda: None
        self.processes = dict(enumerate(self.first))
        monkeypatch.setattr(module, "_kill_actor", lambda handle: loop.call_soon_threadsafe(handle.die))
        loop = asyncio.get_running_loop()
        limits = RecoveryLimits(**vars(LIMITS) | limits)
        self.recovery = Recovery(self.stages, self.link, self.processes, limits)
        self.recovery.loads = [(n, (n, n + 1)) for n in range(num_stages)]

    async def link(self) -> None:
        self.links.append([stage.epoch for stage in self.stages])
        await asyncio.gather(*(stage.open_link.remote() for stage in self.stages))
        self.on_link()

    async def recover(self, trouble=DIED, **more) -> None:
        await self.recovery.run(trouble, lambda: next(self.epochs), **more)

    def check(self, started: set[int], num_links: int = 1) -> None:
        """Everything is ready in the same epoch, and only these stages were started again."""
        assert {n for n, stage in enumerate(self.stages) if stage.process != self.first[n]} == started
        assert all(stage.is_loaded for stage in self.stages) and len({stage.epoch for stage in self.stages}) == 1
        assert [self.processes[n] for n in range(len(self.stages))] == [stage.process for stage in self.stages]
        assert len(self.links) == num_links and self.recovery.reason is None


@pytest.fixture
def run(monkeypatch):
    """Run `scenario(harness)` in a loop of its own."""

    def run(scenario, **settings):
        async def main():
            await scenario(Harness(monkeypatch, **settings))

        asyncio.run(main())

    return run


def test_the_dead_stage_is_loaded_again_and_survivors_only_reset(run):
    async def scenario(h):
        h.stages[1].die()
        await h.recover()
        h.check({1})
        assert h.stages[1].calls[:3] == [("load", 1, (1, 2)), ("warm_up",), ("reset", 7)]
        assert "abandon" in h.stages[0].names and "load" not in h.stages[0].names and h.stages[0].epoch == 7
        assert h.recovery.count == 1 and h.recovery.seconds < 1

    run(scenario)


def test_stages_recover_at_the_same_time(run):
    async def scenario(h):
        for stage in h.stages:
            stage.start_s = 0.15
            stage.die()
        await h.recover()
        h.check({0, 1, 2})
        assert h.recovery.seconds < 0.4

    run(scenario)


def test_a_stage_that_does_not_answer_is_ended_first(run):
    async def scenario(h):
        h.stages[1].frozen = True
        await h.recover(SILENT)
        h.check({1})

    run(scenario)


def test_it_finds_out_by_itself_who_has_died(run):
    async def scenario(h):
        h.stages[0].die()
        h.stages[2].die()
        await h.recover(Trouble("stalled", None, "a stage has died"))
        h.check({0, 2})

    run(scenario)


def test_a_stage_that_was_reported_dead_and_lives_keeps_its_weights(run):
    async def scenario(h):
        await h.recover()
        h.check(set())

    run(scenario)


def test_a_survivor_whose_step_does_not_end_is_started_again(run):
    async def scenario(h):
        h.stages[1].die()
        h.stages[0].stuck = True
        await h.recover()
        h.check({0, 1})

    run(scenario)


def test_a_survivor_may_be_in_a_long_step(run):
    async def scenario(h):
        h.stages[1].die()
        h.stages[0].stuck = True
        asyncio.get_running_loop().call_later(0.3, lambda: setattr(h.stages[0], "stuck", False))
        await h.recover(step_s=1.0)
        h.check({1})

    run(scenario)


def test_a_survivor_that_freezes_meanwhile_is_started_again(run):
    async def scenario(h):
        h.stages[1].die()
        h.stages[2].frozen = True
        await h.recover()
        h.check({1, 2})

    run(scenario)


@pytest.mark.parametrize("when", ["load", "warm_up", "reset"])
@pytest.mark.parametrize("how", ["die", "freeze"])
def test_another_death_on_the_way(run, when, how):
    async def scenario(h):
        stage = h.stages[1]

        def once(name):
            if name == when:
                stage.on_call = lambda _: None
                if how == "freeze":
                    stage.frozen = True
                else:
                    stage.die()

        stage.on_call = once
        stage.die()
        await h.recover()
        h.check({1})
        assert stage.num_starts == 3

    run(scenario)


def test_a_death_while_the_stages_are_linked_makes_another_round(run):
    async def scenario(h):
        def once():
            h.on_link = lambda: None
            h.stages[2].die()
            raise ConnectionError("stage 2 hung up")

        h.on_link = once
        h.stages[1].die()
        await h.recover()
        h.check({1, 2}, num_links=2)
        assert h.stages[0].epoch == 8, "a new epoch every round"

    run(scenario)


def test_a_stage_that_freezes_while_the_stages_are_linked(run):
    async def scenario(h):
        def once():
            h.on_link = lambda: None
            h.stages[0].frozen = True

        link = h.link

        async def link_and_wait():
            await link()
            await h.stages[0].open_link.remote()

        h.on_link = once
        h.recovery._link = link_and_wait
        await h.recover()
        h.check({0}, num_links=2)

    run(scenario, loading_silent_s=10)


def test_a_link_that_fails_without_a_death_gets_new_processes_in_the_end(run):
    async def scenario(h):
        def refuse():
            if h.stages[0].num_starts == 1:
                raise ConnectionError("no")

        h.on_link = refuse
        await h.recover()
        h.check({0, 1, 2}, num_links=3)

    run(scenario)


def test_memory_that_is_not_free_yet_is_waited_for(run):
    async def scenario(h):
        def full(name):
            if name == "load" and len(h.stages[1].calls) < 3:
                raise BudgetError("the card is full")

        h.stages[1].on_call = full
        h.stages[1].die()
        await h.recover()
        h.check({1})

    run(scenario, memory_s=1.0)


@pytest.mark.parametrize("error", [BudgetError("the card is full"), CheckpointError("the file is gone")])
def test_what_cannot_be_loaded_ends_the_engine(run, error):
    async def scenario(h):
        def refuse(name):
            if name == "load":
                raise error

        h.stages[1].on_call = refuse
        h.stages[1].die()
        with pytest.raises(EngineDeadError, match=f"stage 1 could not be loaded again: {error}"):
            await h.recover()
        assert h.recovery.reason is None

    run(scenario)


def test_it_gives_up_after_its_time(run):
    async def scenario(h):
        h.stages[1].die(comes_back=False)
        with pytest.raises(EngineDeadError, match=r"recovering: stage 1 has died; stage 1 is being started.*after 0.2 s"):
            await h.recover()

    run(scenario, total_s=0.2)


def test_a_stage_for_which_no_node_has_room_is_waited_for(run):
    async def scenario(h):
        told, rooms = [], itertools.chain(["none", None, "none", "none", "none", "still none"], itertools.repeat(None))
        h.recovery._why_no_room = lambda stage: next(rooms) if stage == 1 else "nobody asks about this one"

        def on_no_room(reason):
            told.append((reason, h.recovery.has_no_room, h.recovery.reason))

        h.recovery._on_no_room = on_no_room
        h.stages[1].start_s = 0.4
        h.stages[1].die()
        await h.recover()
        h.check({1})
        assert [reason for reason, _, _ in told] == [
            "stage 1 cannot be started again: none",
            "stage 1 cannot be started again: still none",
        ], "a single answer of that kind is not believed"
        assert all(has for _, has, _ in told) and not h.recovery.has_no_room
        assert told[0][2] == "recovering: stage 1 has died; stage 1 is waiting for a node: none"

    run(scenario)


def test_waiting_for_a_node_is_no_failed_start(run):
    async def scenario(h):
        h.recovery._why_no_room = lambda _: "no room"
        h.stages[1].start_s = 0.5
        h.stages[1].die()
        await h.recover()
        h.check({1})
        assert h.stages[1].num_starts == 2, "nobody ended it meanwhile"

    run(scenario, starting_s=0.15)


def test_what_is_not_known_about_nodes_does_no_harm(run):
    async def scenario(h):
        def fail(_):
            raise ConnectionError("no answer")

        h.recovery._why_no_room = fail
        h.stages[1].start_s = 0.2
        h.stages[1].die()
        await h.recover()
        h.check({1})

    run(scenario)


def test_it_gives_up_when_no_step_is_done_in_between(run):
    async def scenario(h):
        for _ in range(MAX_RECOVERIES):
            await h.recover()
        h.recovery.completed_step()
        for _ in range(MAX_RECOVERIES):
            await h.recover()
        with pytest.raises(EngineDeadError, match=r"stage 1 has died, .* times in a row"):
            await h.recover()

    run(scenario)


def test_it_says_what_it_is_doing(run):
    async def scenario(h):
        seen = []

        def note(name):
            seen.append(h.recovery.reason)

        h.stages[1].on_call = note
        h.stages[1].die()
        await h.recover()
        assert "recovering: stage 1 has died; stage 1 is loading" in seen
        assert any("stage 1 is warming up" in reason for reason in seen)
        assert seen[-1] == "recovering: stage 1 has died; stages are being linked"

    run(scenario)


# processes


def test_only_the_very_process_is_ended():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        here = this_process()
        process = ProcessId(here.space, child.pid, fields[19])
        assert not end_process(ProcessId(here.space, child.pid, "1")), "another process had this number"
        assert not end_process(ProcessId("elsewhere", child.pid, fields[19])) and not end_process(None)
        os.kill(child.pid, signal.SIGSTOP)
        assert child.poll() is None and end_process(process)
        child.wait(5)
        assert not end_process(process)
    finally:
        child.kill()
        child.wait()
