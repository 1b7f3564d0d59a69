"""Burst: several decode steps of all lanes, unrolled to step plans where the burst is driven.

Every lane has at most one step under way. The scheduler hears of every result, but no step waits for it.
"""

from __future__ import annotations

from qsa.scheduler.plan import BurstEnd, BurstItem, BurstPlan, SequenceStep, StepPlan, StepResult


class Burst:
    """A burst under way. The state: how far every row of every lane has come, and which lanes have a step under way."""

    def __init__(self, plan: BurstPlan) -> None:
        self.plan = plan
        self._eos_token_ids = frozenset(plan.eos_token_ids)
        self._lanes = [[_Row(item) for item in items] for items in plan.lanes]
        self._under_way: list[StepPlan | None] = [None] * len(plan.lanes)
        self._num_steps = [0] * len(plan.lanes)  # answered
        self._is_cut = False

    @property
    def is_over(self) -> bool:
        """No lane has a step under way, or will have one again."""
        return all(step is None for step in self._under_way) and not any(map(self._has_step, range(len(self._lanes))))

    def next_step(self, lane: int) -> StepPlan | None:
        """The lane's next step; None when the lane is done, for good. The step before must have been answered."""
        assert self._under_way[lane] is None, f"lane {lane} has a step under way"
        if not self._has_step(lane):
            return None
        plan = self.plan
        items = tuple([row.next_step() for row in self._lanes[lane]])
        step = StepPlan(plan.epoch, plan.step + self._num_steps[lane], lane, items)
        self._under_way[lane] = step
        return step

    def expected_step(self, lane: int) -> tuple[tuple[int, int], ...]:
        """Slot and position of every row of the lane's next step, if no token ends its row; empty when there will be none.

        May be asked while a step is under way, whose tokens nobody knows yet.
        """
        is_under_way = self._under_way[lane] is not None
        if self._is_cut or self._num_steps[lane] + is_under_way >= self.plan.max_steps:
            return ()
        places = (row.expected_place(is_under_way) for row in self._lanes[lane])
        return tuple(place for place in places if place is not None)

    def apply(self, result: StepResult) -> None:
        """Take the answer to the lane's step under way; rows that ended or failed with it drop out."""
        step = self._under_way[result.lane]
        assert step is not None, f"lane {result.lane} has no step under way"
        assert (result.epoch, result.step) == (step.epoch, step.step), "the answer belongs to another step"
        self._under_way[result.lane] = None
        self._num_steps[result.lane] += 1
        results = {entry.request_id: entry for entry in result.results}
        rows = []
        if result.error is None:
            for row in self._lanes[result.lane]:
                entry = results.get(row.item.request_id)
                token = entry.token.token_id if entry is not None and entry.token is not None else None
                if (entry is None or entry.error is None) and row.go_on(token, self._eos_token_ids):
                    rows.append(row)
        self._lanes[result.lane] = rows
        sizes = [len(rows) for rows in self._lanes]
        if max(sizes) - min(sizes) >= 2:
            self._is_cut = True  # the next burst spreads the sequences evenly again

    def cut(self) -> None:
        """Begin no further steps. Any thread may call this."""
        self._is_cut = True

    def end(self, wall_ms: float) -> BurstEnd:
        """What the scheduler must know of a burst that is over."""
        assert self.is_over, "a burst ended with steps under way or still to come"
        return BurstEnd(self.plan.epoch, self.plan.step, tuple(self._num_steps), wall_ms)

    def _has_step(self, lane: int) -> bool:
        return not self._is_cut and bool(self._lanes[lane]) and self._num_steps[lane] < self.plan.max_steps


class _Row:
    """One sequence of a lane: how many of its known tokens are fed, and what it has generated in the burst."""

    __slots__ = ("_counts", "_known", "_num_fed", "_remaining", "item")

    def __init__(self, item: BurstItem) -> None:
        self.item = item
        self._known = list(item.token_ids)
        self._num_fed = 0
        self._remaining = item.remaining
        self._counts = dict(item.counts)

    def next_step(self) -> SequenceStep:
        item, fed = self.item, self._num_fed
        sampling = item.sampling if fed + 1 == len(self._known) else None
        counts = tuple(self._counts.items()) if sampling is not None and sampling.needs_counts else ()
        return SequenceStep(item.request_id, item.slot, item.start + fed, (self._known[fed],), False, sampling, counts)

    def expected_place(self, is_under_way: bool) -> tuple[int, int] | None:
        """Slot and position of the row's next step; None when the one under way is sure to be its last."""
        fed = self._num_fed + is_under_way
        if fed == len(self._known) and self._remaining <= 1:
            return None
        return self.item.slot, self.item.start + fed

    def go_on(self, token_id: int | None, eos_token_ids: frozenset[int]) -> bool:
        """Take what the step gave; False when the row ends with it, or when it gave no token although it should have."""
        self._num_fed += 1
        if self._num_fed < len(self._known):
            return True
        if token_id is None:
            return False
        self._known.append(token_id)
        self._remaining -= 1
        if self.item.sampling.needs_counts:
            self._counts[token_id] = self._counts.get(token_id, 0) + 1
        return self.item.sampling.finish_reason(token_id, self._remaining, eos_token_ids) is None
