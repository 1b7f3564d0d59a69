"""How fast work gets done: tokens per second, time of a step, typical length of an answer. Feeds Retry-After."""

from __future__ import annotations

from collections import deque

WINDOW_S = 30.0
SMOOTHING = 0.2  # weight of the newest value in a running mean
MIN_RETRY_S, MAX_RETRY_S = 1.0, 300.0


class RunningMean:
    """An exponentially weighted mean; None before the first value."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, value: float) -> None:
        self.value = value if self.value is None else self.value + SMOOTHING * (value - self.value)


class RecentLow:
    """The lower quartile of the last values, where something now and then only adds to them; None before the first value."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=8)
        self.value: float | None = None

    def add(self, value: float) -> None:
        self._recent.append(value)
        self.value = sorted(self._recent)[(len(self._recent) - 1) // 4]


class Rates:
    """Measured over the last WINDOW_S seconds, or as running means."""

    def __init__(self) -> None:
        self.chunk_ms = RunningMean()  # a full chunk of a prompt, on the slowest stage
        self.decode_ms = RecentLow()  # one step of every lane; bursts may begin with waiting for a stage's chunk
        self.completion_len = RunningMean()
        self._steps: deque[tuple[float, int]] = deque()
        self._window_tokens = 0

    def add_step(self, now: float, num_tokens: int) -> None:
        """Count a step's tokens."""
        self._steps.append((now, num_tokens))
        self._window_tokens += num_tokens
        self._drop_old(now)

    def add_chunk_time(self, num_tokens: int, slowest_ms: float, full_tokens: int) -> None:
        """Learn from a chunk what a full one takes. 0 ms means not measured; a small one says nothing about full ones."""
        if slowest_ms > 0 and 2 * num_tokens >= full_tokens:
            self.chunk_ms.add(slowest_ms * full_tokens / num_tokens)

    def add_burst_time(self, wall_ms: float, num_steps: int) -> None:
        """Learn from a burst what a step of every lane takes. `num_steps`: of its longest lane; 0 ms means not measured."""
        if wall_ms > 0 and num_steps > 0:
            self.decode_ms.add(wall_ms / num_steps)

    def tokens_per_s(self, now: float) -> float:
        """Tokens computed per second, prompts and generated together; 0 when nothing ran lately."""
        self._drop_old(now)
        if not self._steps:
            return 0.0
        return self._window_tokens / max(now - self._steps[0][0], 0.1)

    def expected_completion(self, max_tokens: int) -> float:
        """Tokens that an answer will have: as the last ones had, at most `max_tokens`."""
        return min(max_tokens, self.completion_len.value if self.completion_len.value is not None else max_tokens)

    def retry_after_s(self, now: float, backlog_tokens: float, num_requests: int) -> float:
        """Seconds until one of `num_requests` requests, which have `backlog_tokens` to go together, should be done."""
        speed = self.tokens_per_s(now)
        if speed <= 0 or num_requests == 0:
            return MIN_RETRY_S
        return min(MAX_RETRY_S, max(MIN_RETRY_S, backlog_tokens / num_requests / speed))

    def _drop_old(self, now: float) -> None:
        while self._steps and now - self._steps[0][0] > WINDOW_S:
            self._window_tokens -= self._steps.popleft()[1]
