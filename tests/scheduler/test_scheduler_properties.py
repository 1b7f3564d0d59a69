"""Any mix of requests, aborts, failures and timings: no stage runs out, every request ends, everything comes back."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_loads import make_request, make_stages, solo_tokens

from qsa.errors import CapacityError, OverloadedError
from qsa.scheduler.burst import Burst
from qsa.scheduler.plan import BurstPlan, StepPlan, StepResult
from qsa.scheduler.request import FinishReason, Request, RequestOutput
from qsa.scheduler.scheduler import Scheduler
from qsa.scheduler.sequence import MAX_PREEMPTIONS, MAX_RESTARTS
from qsa.scheduler.simulated_stages import SimulatedStage, StageCalls, choose_token, scripted_result
from qsa.scheduler.simulator import Arrival, CostModel, Simulation


class SchedulerMachine(RuleBasedStateMachine):
    """Two counting stages with scarce chunks; how far each stage is with its calls is hypothesis's choice."""

    @initialize(
        chunks=st.tuples(st.integers(4, 14), st.integers(4, 14)),
        max_sequences=st.integers(1, 5),
        horizon=st.integers(1, 200),
        lanes=st.integers(1, 2),
        burst_steps=st.integers(1, 40),
        busy_chunk=st.sampled_from([32, 128]),
    )
    def build(self, chunks, max_sequences, horizon, lanes, burst_steps, busy_chunk):
        self.chunks = chunks
        self.now = 0.0
        self.scheduler = Scheduler(
            make_stages(*chunks), max_sequences=max_sequences, max_waiting=6, max_model_len=2048, prefill_chunk=128,
            busy_chunk=busy_chunk, growth_horizon=horizon, eos_token_ids=(0,), lanes=lanes, burst_steps=burst_steps,
            clock=lambda: self.now,
        )  # fmt: skip
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.new_stages()

    def new_stages(self):
        self.stages = [SimulatedStage(stage) for stage in make_stages(*self.chunks)]
        self.calls = StageCalls(2)
        self.burst: Burst | None = None
        self.lanes: list[int] = []  # lanes of the burst that may begin a step
        self.has_chunk = False

    # what the actor does

    def plan(self):
        """Everything that can be planned."""
        if self.burst is None:
            plan = self.scheduler.next_burst()
            self.release()
            if plan is not None:
                self.check_burst(plan)
                self.burst, self.has_chunk = Burst(plan), False
                self.lanes = list(range(len(plan.lanes)))
                self.calls.send_burst(self.burst)
            else:
                self.calls.flush()
        while self.burst is None or not self.has_chunk:
            chunk = self.scheduler.next_chunk()
            self.release()
            if chunk is None:
                break
            assert len(chunk.items) == 1 and chunk.items[0].is_prefill
            assert len(self.scheduler._flights.chunks) <= len(self.stages) + 1
            self.calls.send_chunk(chunk, in_round=self.burst is not None)
            self.has_chunk = True
        if self.burst is not None and self.scheduler.should_cut():
            self.burst.cut()
        self.take(self.scheduler.take_outputs())

    def check_burst(self, plan: BurstPlan):
        items = [item for lane in plan.lanes for item in lane]
        in_chunks = {flight.sequence.slot for flight in self.scheduler._flights.chunks.values()}
        assert not in_chunks & {item.slot for item in items}, "only chunks of one prompt follow each other unseen"
        sizes = [len(lane) for lane in plan.lanes]
        assert min(sizes) > 0 and max(sizes) - min(sizes) <= 1
        assert all(item.remaining > 0 and item.token_ids for item in items)
        for s in self.scheduler._flights.burst.sequences:
            assert s.held == self.scheduler._meter.chunks(s.request.sparse_id, s.burst_end(plan.max_steps)), "booked exactly"

    def release(self):
        slots = self.scheduler.take_releases()
        if slots:
            self.calls.release(slots)

    def advance(self, number: int) -> bool:
        """Let one stage run its next call; a burst's steps run when both stages have come to it. False when it has to wait."""
        call = self.calls.head(number)
        if call is None:
            return False
        if isinstance(call, Burst):
            return self.step_burst(call)
        self.calls.take(number)
        if isinstance(call, StepPlan):
            self.stages[number].run(call)
            if self.calls.chunk_done(call, number):
                self.now += 0.01
                self.take(self.scheduler.apply(scripted_result(call, choose_token, (1.0,))))
                self.plan()
        else:
            self.stages[number].release(call)
        return True

    def step_burst(self, burst: Burst, error: str | None = None) -> bool:
        if any(self.calls.head(number) is not burst for number in (0, 1)):
            return False
        step = None
        while self.lanes and step is None:
            step = burst.next_step(self.lanes.pop(0))
        if step is not None:
            for stage in self.stages[: 1 if error else 2]:
                stage.run(step)
            self.now += 0.001
            result = scripted_result(step, choose_token)
            if error is not None:
                result = StepResult(step.epoch, step.step, step.lane, error=error)
            burst.apply(result)
            self.lanes.append(step.lane)
            self.take(self.scheduler.apply(result))
        else:
            assert burst.is_over
            for number in (0, 1):
                self.calls.take(number)
            self.burst = None
            self.take(self.scheduler.end_burst(burst.end(1.0)))
        self.plan()
        return True

    # what happens

    @rule(
        prompt_len=st.integers(1, 700), max_tokens=st.integers(1, 300), sparse_id=st.integers(0, 1), priority=st.integers(-1, 1)
    )
    def add(self, prompt_len, max_tokens, sparse_id, priority):
        name = f"r{len(self.requests)}"
        request = make_request(name, prompt_len, max_tokens, sparse_id=sparse_id, priority=priority)
        try:
            self.scheduler.add(request)
        except (CapacityError, OverloadedError):
            return
        self.requests[name], self.tokens[name] = request, []
        self.plan()

    @rule(number=st.integers(0, 30))
    def abort(self, number):
        self.scheduler.abort(f"r{number}")
        self.plan()

    @rule(number=st.integers(0, 1), count=st.integers(1, 4))
    def run_stage(self, number, count):
        """One stage gets ahead of the other."""
        for _ in range(count):
            self.advance(number)

    @rule(count=st.integers(1, 300))
    def go_on(self, count):
        """Many ordinary steps at once, so that sequences grow until chunks run short."""
        for _ in range(count):
            self.advance(0)
            self.advance(1)

    @precondition(lambda self: self.burst is not None)
    @rule()
    def cut(self):
        self.burst.cut()

    @precondition(lambda self: self.burst is not None)
    @rule()
    def fail_burst_step(self):
        """The second stage fails in a step of the burst; the first one has computed it."""
        self.step_burst(self.burst, error="boom")

    @rule(luck=st.integers(0, 3))
    def restart(self, luck):
        if luck:
            self.go_on(20)
            return
        self.scheduler.restart("a stage died")
        self.new_stages()
        self.plan()

    @rule(luck=st.integers(0, 3))
    def fail_plans(self, luck):
        """Everything under way fails somewhere: stages keep what they have, and later get the releases."""
        if luck:
            self.go_on(20)
            return
        plans = [flight.plan for flight in self.scheduler._flights.chunks.values()]
        if self.burst is not None:
            plans.append(self.burst.plan)
        for queue in self.calls.queues:  # what is left undone are releases
            left = [call for call in queue if isinstance(call, tuple)]
            queue.clear()
            queue.extend(left)
        self.calls._delayed.clear()
        self.burst, self.lanes, self.has_chunk = None, [], False
        for plan in plans:
            self.scheduler.fail_plan(plan, "stage failed")
        self.plan()

    @invariant()
    def ledger_is_sound(self):
        if not hasattr(self, "scheduler"):
            return
        counters = self.scheduler.counters()
        for held, pool, stage in zip(counters.held_chunks, counters.pool_chunks, self.stages, strict=True):
            assert 0 <= held <= pool and stage.max_held <= pool
        if counters.num_in_flight == 0:
            while any([self.advance(number) for number in (0, 1)]):  # what is left are releases, if nothing new is planned
                pass
            assert self.scheduler.counters().num_in_flight or counters.held_chunks == tuple(stage.held for stage in self.stages)
        self.check_bookings()
        everybody = (*self.scheduler._places.waiting.values(), *self.scheduler._places.running.values())
        assert max((s.num_preemptions for s in everybody), default=0) <= MAX_PREEMPTIONS
        assert max((s.num_restarts for s in everybody), default=0) <= MAX_RESTARTS
        self.take(self.scheduler.take_outputs())

    def check_bookings(self):
        """What a sequence is booked with is what it has when nothing is in flight, and bounds what it has otherwise."""
        places = self.scheduler._places
        holders = [*places.running.values(), *places._ended]
        assert places.slots.held_chunks == tuple(places._add_chunks(s.held for s in holders))
        for s in holders:
            if s.in_flight == 0:
                assert s.held == self.scheduler._meter.chunks(s.request.sparse_id, s.planned_len)
            for number, stage in enumerate(self.stages):
                pending = [call for call in self.calls.queues[number] if isinstance(call, tuple)]
                if not any(s.slot in slots for slots in pending):
                    assert stage.held_by(s.slot) <= s.held[number]

    def take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            name = output.request_id
            assert name not in self.reasons, f"{name} speaks after its end"
            self.tokens[name] += [token.token_id for token in output.tokens]
            if output.finish_reason is not None:
                self.reasons[name] = output.finish_reason

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        self.plan()
        for _ in range(100000):
            if self.scheduler.is_idle and self.calls.is_empty:
                break
            moved = [self.advance(number) for number in (0, 1)]
            assert any(moved), f"stuck: {self.scheduler.counters()}"
        assert self.scheduler.is_idle and self.calls.is_empty, self.scheduler.counters()
        assert self.reasons.keys() == self.requests.keys(), "a request has no end"
        for name, request in self.requests.items():
            expected = solo_tokens(request)
            if self.reasons[name] is FinishReason.LENGTH:
                assert self.tokens[name] == expected
            else:
                assert self.tokens[name] == expected[: len(self.tokens[name])]
        assert [stage.held for stage in self.stages] == [0, 0] and [s.num_sequences for s in self.stages] == [0, 0]
        counters = self.scheduler.counters()
        assert counters.held_chunks == (0, 0) and counters.num_slots == 0
        assert counters.preempted <= MAX_PREEMPTIONS * len(self.requests)
        assert counters.added == counters.finished + counters.aborted + counters.failed


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=150,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking thousands of steps takes longer than reading them
)

LOADS = st.lists(
    st.tuples(
        st.integers(0, 3000), st.integers(1, 900), st.integers(1, 200), st.integers(0, 1), st.none() | st.integers(0, 4000)
    ),
    min_size=1, max_size=12,
)  # fmt: skip


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    LOADS,
    st.tuples(st.integers(9, 20), st.integers(9, 20)),
    st.integers(1, 5),
    st.integers(1, 300),
    st.integers(1, 2),
    st.integers(1, 40),
    st.sampled_from([0.0, 0.4]),
)
def test_every_load_is_played_to_its_end(rows, chunks, max_sequences, horizon, lanes, burst_steps, notice_ms):
    load = [
        Arrival(ms / 1e3, make_request(f"r{i}", prompt_len, max_tokens, sparse_id=sparse), None if left is None else left / 1e3)
        for i, (ms, prompt_len, max_tokens, sparse, left) in enumerate(rows)
    ]
    simulation = Simulation(
        make_stages(*chunks),
        max_sequences=max_sequences,
        prefill_chunk=128,
        busy_chunk=64,
        growth_horizon=horizon,
        lanes=lanes,
        burst_steps=burst_steps,
        cost=CostModel(notice_ms=notice_ms),
    )
    report = simulation.run(load)
    assert all(held <= pool for held, pool in zip(report.max_held, chunks, strict=True))
    for arrival in load:
        name = arrival.request.request_id
        if name in report.refused:
            continue
        log, expected = report.requests[name], solo_tokens(arrival.request)
        assert log.finish_reason in (FinishReason.LENGTH, FinishReason.ABORT)
        assert log.token_ids == expected[: len(log.token_ids)]
        assert log.finish_reason is FinishReason.ABORT or log.token_ids == expected
    assert [stage.counts.held for stage in simulation.stages] == [0] * len(chunks)
