"""Any mix of requests, aborts, failures and timings: no stage runs out, every request ends, everything comes back."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_loads import make_request, make_stages, solo_tokens

from qsa.errors import CapacityError, OverloadedError
from qsa.scheduler.plan import StepPlan
from qsa.scheduler.request import FinishReason, Request, RequestOutput
from qsa.scheduler.scheduler import Scheduler
from qsa.scheduler.sequence import MAX_PREEMPTIONS
from qsa.scheduler.simulator import Arrival, SimulatedStage, Simulation, choose_token, scripted_result


class SchedulerMachine(RuleBasedStateMachine):
    """Two lanes over counting stages with scarce chunks; the order of events is hypothesis's choice."""

    @initialize(
        chunks=st.tuples(st.integers(4, 14), st.integers(4, 14)), max_sequences=st.integers(1, 5), horizon=st.integers(1, 200)
    )
    def build(self, chunks, max_sequences, horizon):
        stages = make_stages(*chunks)
        self.now = 0.0
        self.scheduler = Scheduler(
            stages, max_sequences=max_sequences, max_waiting=6, max_model_len=2048, prefill_chunk=128,
            growth_horizon=horizon, eos_token_ids=(0,), clock=lambda: self.now,
        )  # fmt: skip
        self.stages = [SimulatedStage(stage) for stage in stages]
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.flights: list[StepPlan] = []
        self.may_differ = False

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

    @rule(number=st.integers(0, 30))
    def abort(self, number):
        self.scheduler.abort(f"r{number}")

    @rule(lane=st.integers(0, 1))
    def start(self, lane):
        plan = self.scheduler.next_plan(lane)
        if plan is None:
            return
        assert all(flight.lane != lane for flight in self.flights)
        elsewhere = {item.request_id: item.is_prefill for flight in self.flights for item in flight.items}
        for item in plan.items:  # only chunks of one prompt follow each other unseen
            assert item.is_prefill and elsewhere[item.request_id] if item.request_id in elsewhere else True
        for stage in self.stages:
            stage.run(plan)
        self.flights.append(plan)

    @precondition(lambda self: self.flights)
    @rule(which=st.integers(0, 1))
    def finish(self, which):
        self.now += 0.01
        plan = self.flights.pop(which % len(self.flights))
        self.take(self.scheduler.apply(scripted_result(plan, choose_token, (1.0,))))

    @rule(lanes=st.integers(1, 2), count=st.integers(1, 120))
    def go_on(self, lanes, count):
        """Many ordinary steps at once, so that sequences grow until chunks run short."""
        for _ in range(count):
            for lane in range(lanes):
                self.start(lane)
            while self.flights:
                self.finish(0)

    @rule(lane=st.integers(0, 1), reached=st.integers(0, 2))
    def fail(self, lane, reached):
        """A plan fails; only the first stages have run it."""
        plan = self.scheduler.next_plan(lane)
        if plan is None:
            return
        for stage in self.stages[:reached]:
            stage.run(plan)
        self.scheduler.fail_plan(plan, "stage failed")
        self.may_differ = True

    @invariant()
    def ledger_is_exact(self):
        if not hasattr(self, "scheduler"):
            return
        counters = self.scheduler.counters()
        if not self.may_differ:
            assert counters.held_chunks == tuple(stage.held for stage in self.stages)
        assert all(0 <= held <= pool for held, pool in zip(counters.held_chunks, counters.pool_chunks, strict=True))
        preemptions = [s.num_preemptions for s in (*self.scheduler._waiting.values(), *self.scheduler._running.values())]
        assert max(preemptions, default=0) <= MAX_PREEMPTIONS
        self.take(self.scheduler.take_outputs())

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
        for _ in range(20000):
            self.take(self.scheduler.take_outputs())
            if self.scheduler.is_idle:
                break
            self.now += 0.01
            before = self.scheduler.counters()
            for lane in (0, 1):
                self.start(lane)
            assert self.flights, f"stuck: {before}"
            while self.flights:
                self.finish(0)
        assert self.scheduler.is_idle, self.scheduler.counters()
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
    max_examples=60,
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
@given(LOADS, st.tuples(st.integers(9, 20), st.integers(9, 20)), st.integers(1, 5), st.integers(1, 300), st.integers(1, 2))
def test_every_load_is_played_to_its_end(rows, chunks, max_sequences, horizon, lanes):
    load = [
        Arrival(ms / 1e3, make_request(f"r{i}", prompt_len, max_tokens, sparse_id=sparse), None if left is None else left / 1e3)
        for i, (ms, prompt_len, max_tokens, sparse, left) in enumerate(rows)
    ]
    simulation = Simulation(
        make_stages(*chunks), max_sequences=max_sequences, prefill_chunk=128, growth_horizon=horizon, lanes=lanes
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
    assert [stage.held for stage in simulation.stages] == [0] * len(chunks)
