"""Stages that only count, and the order in which stages run their calls: what the simulator and tests play plans on.

The stages check every plan as a real one would suffer it: slots, positions and tokens must follow on, and a chunk that is
not there is an error. Tokens come from a hash of (seed, position), so a text does not depend on timing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from qsa.errors import OutOfChunksError
from qsa.memory.layout import sequence_chunks
from qsa.scheduler.burst import Burst
from qsa.scheduler.growth import StageCapacity
from qsa.scheduler.plan import SelectionStats, SequenceResult, SequenceStep, StepPlan, StepResult
from qsa.scheduler.request import SamplingParams, TokenOutput

VOCAB_SIZE = 1000

Releases = tuple[int, ...]
Call = StepPlan | Burst | Releases  # a chunk of a prompt, a burst, slots to release


class SimulatedStage:
    """Counts the chunks of one stage exactly, and holds plans to what a real stage needs."""

    def __init__(self, capacity: StageCapacity) -> None:
        self._capacity = capacity
        self._slots: dict[int, tuple[int, list[int]]] = {}  # sparse id, tokens computed so far
        self.log: list[StepPlan | Releases] = []
        self.max_held = 0

    @property
    def held(self) -> int:
        return sum(map(self.held_by, self._slots))

    @property
    def num_sequences(self) -> int:
        return len(self._slots)

    def release(self, slots: Releases) -> None:
        """Close slots; those that are not open are left alone."""
        self.log.append(slots)
        for slot in slots:
            self._slots.pop(slot, None)

    def run(self, plan: StepPlan) -> None:
        """Open, extend.

        Raises:
            OutOfChunksError: the pool would have to hold more chunks than it has.
        """
        self.log.append(plan)
        for slot, sparse_id in plan.open_slots:
            assert slot not in self._slots, f"slot {slot} is opened twice"
            self._slots[slot] = (sparse_id, [])
        slots = [item.slot for item in plan.items]
        assert slots and len(slots) == len(set(slots)), f"a plan holds no slot, or one twice: {slots}"
        assert len(slots) == 1 or not any(item.is_prefill for item in plan.items), "a chunk of a prompt has company"
        assert plan.items[0].is_prefill or not plan.open_slots, "a decode step opens slots"
        for item in plan.items:
            assert item.slot in self._slots, f"slot {item.slot} of {item.request_id} is not open"
            tokens = self._slots[item.slot][1]
            assert item.token_ids and item.start == len(tokens), f"{item.request_id} starts at {item.start} of {len(tokens)}"
            assert item.is_prefill or len(item.token_ids) == 1
            tokens.extend(item.token_ids)
            if self.held > self._capacity.num_chunks:
                raise OutOfChunksError(f"step {plan.step} needs {self.held} chunks of {self._capacity.num_chunks}")
        self.max_held = max(self.max_held, self.held)

    def held_by(self, slot: int) -> int:
        """Chunks of one slot; 0 when it is not open."""
        if slot not in self._slots:
            return 0
        sparse_id, tokens = self._slots[slot]
        return self._chunks(sparse_id, len(tokens))

    def tokens(self, slot: int) -> list[int]:
        """Tokens computed in an open slot."""
        return self._slots[slot][1]

    def _chunks(self, sparse_id: int, seq_len: int) -> int:
        c = self._capacity
        return sequence_chunks(c.kv, c.summaries[sparse_id], c.num_layers, seq_len)


class StageCalls:
    """The calls in front of every stage. The state: queues, and chunks that wait for the next burst before they go on.

    While anything decodes there are rounds: a burst on all stages, then on each stage the chunk that has come so far. So a
    later stage runs a chunk after bursts that were planned later than the chunk.
    """

    def __init__(self, num_stages: int) -> None:
        self.queues: list[deque[Call]] = [deque() for _ in range(num_stages)]
        self._delayed: list[tuple[StepPlan, int]] = []  # the stage that it goes to next
        self._done: dict[int, int] = {}  # step of a chunk -> stages that have run it

    @property
    def is_empty(self) -> bool:
        return not any(self.queues) and not self._delayed

    def release(self, slots: Releases) -> None:
        for queue in self.queues:
            queue.append(slots)

    def send_burst(self, burst: Burst) -> None:
        """A burst on all stages; chunks that have waited for it go one stage further behind it."""
        for queue in self.queues:
            queue.append(burst)
        delayed, self._delayed = self._delayed, []
        for plan, stage in delayed:
            self.queues[stage].append(plan)
            if stage + 1 < len(self.queues):
                self._delayed.append((plan, stage + 1))

    def send_chunk(self, plan: StepPlan, *, in_round: bool) -> None:
        """A chunk on all stages; on the first one only when a burst is under way."""
        self._delayed.append((plan, 0))
        if not in_round:
            self.flush()
            return
        self._delayed.pop()
        self.queues[0].append(plan)
        if len(self.queues) > 1:
            self._delayed.append((plan, 1))

    def flush(self) -> None:
        """No burst follows: chunks that have waited for one go through."""
        for plan, first in self._delayed:
            for queue in self.queues[first:]:
                queue.append(plan)
        self._delayed = []

    def head(self, stage: int) -> Call | None:
        """The call that the stage runs next; None when there is none, or when the stage before is not done with it."""
        if not self.queues[stage]:
            return None
        call = self.queues[stage][0]
        is_ready = not isinstance(call, StepPlan) or self._done.get(call.step, 0) >= stage
        return call if is_ready else None

    def take(self, stage: int) -> None:
        """The stage begins its next call."""
        self.queues[stage].popleft()

    def chunk_done(self, plan: StepPlan, stage: int) -> bool:
        """A stage has run a chunk; True when it was the last one."""
        self._done[plan.step] = stage + 1
        if stage + 1 < len(self.queues):
            return False
        del self._done[plan.step]
        return True


def next_token(sampling: SamplingParams, position: int) -> int:
    """The scripted model: a token that depends on the seed and the position alone; never 0, which tests use as end."""
    return 1 + (sampling.seed * 2654435761 + position * 40503 + (position * position) % 7919) % (VOCAB_SIZE - 1)


def scripted_result(plan: StepPlan, choose: Callable[[SequenceStep], int], stage_ms: Sequence[float] = ()) -> StepResult:
    """What the last stage answers to a plan."""
    results = tuple(
        SequenceResult(item.request_id, TokenOutput(choose(item)) if item.sampling is not None else None) for item in plan.items
    )
    selection = tuple(
        SelectionStats(item.request_id, attended=min(item.end, 1056), context=item.end, num_selected=16, newly_hit=4)
        for item in plan.items
    )
    return StepResult(plan.epoch, plan.step, plan.lane, results, selection, tuple(stage_ms))


def choose_token(item: SequenceStep) -> int:
    """The scripted model's answer to a step that samples."""
    assert item.sampling is not None
    return next_token(item.sampling, item.end)
