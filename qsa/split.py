"""How layers are divided between stages: so that the slowest one is as fast as can be, embedding, head and sampler included.

Before anything runs, times are estimated from the sizes of weights. A start then measures them (`qsa.model.layer_times`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from qsa.config import EngineConfig
from qsa.device import num_lanes
from qsa.errors import ConfigError
from qsa.model.layer_times import LayerTimes
from qsa.model.spec import ModelSpec

HEAD_SHARE = 0.5  # the head counts like this share of its weights in layers: it runs for sampled rows only
SLACK = 0.03  # a split stays as estimated while the best one's slowest stage is no more than this faster
CARD_SLACK = 0.1  # on cards, where layers are divided for prompts too
MAX_HEAD = 2.1  # times what its size says; a sampler and attention can explain less, a busy machine measures anything
CARD_MAX_HEAD = 4.0  # on cards: the sampler is many small launches
MAX_SPREAD = 0.25  # times whose two halves differ by more are not believed


@dataclass(frozen=True)
class LayerSplit:
    """Layers of each stage, and what is known of the stages' times.

    Attributes:
        counts:      layers of each stage.
        source:      what they follow: pipeline.split, measured times, or the sizes of weights.
        times:       measured ones, which a split that was given may have too.
        head_layers: time of the head in layers, estimated.
        estimate:    the split by sizes.
        remark:      why measured times were not used; empty when they were, or there are none.
    """

    counts: tuple[int, ...]
    source: Literal["given", "measured", "estimated"]
    times: LayerTimes | None
    head_layers: float
    estimate: tuple[int, ...]
    remark: str = ""

    @property
    def layers(self) -> list[tuple[int, int]]:
        """First layer and the one after the last, of each stage."""
        ends = list(accumulate(self.counts))
        return list(zip([0, *ends[:-1]], ends, strict=True))

    @property
    def stage_times(self) -> tuple[float, ...]:
        """Of a decode step, for each stage: milliseconds where times are measured, else in layers."""
        return self._times_of(self.counts)

    @property
    def cells(self) -> list[str]:
        """`stage_times` for a table."""
        return [f"{time:.2f} ms" if self.times else f"{time:.1f} layers" for time in self.stage_times]

    @property
    def line(self) -> str:
        """The split and all stages' times in one line, for a log."""
        text = f"layers are divided {_plus(self.counts)}, "
        if self.source == "given":
            text += "as pipeline.split says"
        elif self.source == "measured":
            text += "by measured times"
        else:
            text += f"by the sizes of weights: the head counts as {self.head_layers:.1f} layers"
        text += f"; a decode step takes {_and(self.cells)}"
        if self.times is not None:
            text += f" on the stages: {self.times}"
            if self.estimate != self.counts:
                other = [f"{time:.2f} ms" for time in self._times_of(self.estimate)]
                text += f"; {_plus(self.estimate)}, as by sizes, would take {_and(other)}"
        return f"{text}; {self.remark}" if self.remark else text

    def _times_of(self, counts: Sequence[int]) -> tuple[float, ...]:
        if self.times is None:
            return stage_times(counts, 1.0, 0.0, self.head_layers)
        times = self.times
        return tuple(times.step_ms + time for time in stage_times(counts, times.layer_ms, times.first_ms, times.head_ms))


def plan_split(spec: ModelSpec, config: EngineConfig, times: LayerTimes | None = None) -> LayerSplit:
    """Layers of each stage: as pipeline.split says, else by measured times, else by the sizes of weights.

    Measured times change the estimated split only where that makes the slowest stage more than `SLACK` faster, and then to
    the nearest split that is within `SLACK` of the best: so noise does not move layers from one start to the next. On cards
    it is the most even split within `CARD_SLACK` of the best, in either case: prompts, where the head counts nothing, want as
    many layers on each stage, and a part of what decodes lose by it they lose anyway, waiting for tokens between two steps.

    Raises:
        ConfigError: the layers do not go into so many stages.
    """
    num_layers, num_stages, given = spec.num_layers, config.pipeline.num_stages, config.pipeline.split
    if given is not None and (sum(given) != num_layers or min(given) < 1):
        raise ConfigError(
            f"pipeline.split is {list(given)}, {sum(given)} layers, but {spec.name} has {num_layers};"
            " every stage needs at least one"
        )
    head_layers, is_card = head_cost_layers(spec), config.pipeline.device == "cuda"
    even = even_split(num_layers, num_stages) if is_card else None
    slack, max_head = (CARD_SLACK, CARD_MAX_HEAD) if is_card else (SLACK, MAX_HEAD)
    estimate = split_by_time(num_layers, num_stages, 1.0, 0.0, head_layers, near=even, slack=slack)
    problem = None if times is None else why_not(times, num_layers, head_layers, max_head)
    remark = f"measured times were not used: {problem}" if problem else ""
    times = None if problem else times
    if given is not None:
        return LayerSplit(given, "given", times, head_layers, estimate, remark)
    if times is None:
        return LayerSplit(estimate, "estimated", None, head_layers, estimate, remark)
    parts = times.layer_ms, times.first_ms, times.head_ms
    counts = split_by_time(num_layers, num_stages, *parts, near=even or estimate, slack=slack, fixed_ms=times.step_ms)
    return LayerSplit(counts, "measured", times, head_layers, estimate)


def has_choice(spec: ModelSpec, config: EngineConfig) -> bool:
    """Whether measured times could change anything."""
    pipeline = config.pipeline
    return pipeline.split is None and 1 < pipeline.num_stages < spec.num_layers


def lane_batch(config: EngineConfig) -> int:
    """Sequences of a decode step when all that may run do: those of a lane."""
    return -(-config.limits.max_sequences // num_lanes(config))


def why_not(times: LayerTimes, num_layers: int, head_layers: float, max_head: float = MAX_HEAD) -> str | None:
    """What is wrong with measured times; None when they can be used. `head_layers`: the head's time in layers, by sizes."""
    if len(times.layer_ms) != num_layers:
        return f"they are of {len(times.layer_ms)} layers, not {num_layers}"
    numbers = (*times.layer_ms, times.head_ms, times.first_ms, times.step_ms, times.spread)
    if not all(map(math.isfinite, numbers)) or min(times.layer_ms) <= 0 or min(numbers) < 0:
        return f"they are absurd ({times})"
    if times.spread > MAX_SPREAD:
        return f"repeated, they differ by {times.spread:.0%}"
    measured = times.head_ms * num_layers / sum(times.layer_ms)
    if measured > max_head * max(1.0, head_layers):
        return f"the head would take as long as {measured:.1f} layers, where its size says {head_layers:.1f}"
    return None


def head_cost_layers(spec: ModelSpec) -> float:
    """Time of the head in layers, estimated from the sizes of its weights and a layer's."""
    attention = 2 * spec.hidden_size * spec.head_dim * (spec.num_q_heads + spec.num_kv_heads)
    layer = attention + 3 * spec.hidden_size * spec.intermediate_size
    return HEAD_SHARE * spec.hidden_size * spec.vocab_size / layer


# the arithmetic


def stage_times(counts: Sequence[int], layer_ms: Sequence[float] | float, first_ms: float, head_ms: float) -> tuple[float, ...]:
    """Time of each stage.

    Args:
        counts:   layers of each stage.
        layer_ms: of each layer of the model, or of any; in any unit, like the others.
        first_ms: of what only the first stage does.
        head_ms:  of what only the last stage does.
    """
    each = [layer_ms] * sum(counts) if isinstance(layer_ms, int | float) else list(layer_ms)
    ends = list(accumulate(counts))
    times = [sum(each[end - count : end]) for count, end in zip(counts, ends, strict=True)]
    times[0] += first_ms
    times[-1] += head_ms
    return tuple(times)


def even_split(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage, as many on each as can be; odd ones on the first stages, since the last one has the head."""
    ends = [-(-num_layers * stage // num_stages) for stage in range(num_stages + 1)]
    return tuple(end - begin for begin, end in pairwise(ends))


def split_by_time(
    num_layers: int,
    num_stages: int,
    layer_ms: Sequence[float] | float,
    first_ms: float,
    head_ms: float,
    *,
    near: Sequence[int] | None = None,
    slack: float = SLACK,
    fixed_ms: float = 0.0,
) -> tuple[int, ...]:
    """Layers of each stage, at least one, so that the slowest stage is as fast as can be.

    Of splits that are equally good, the one whose times are the most even.

    Args:
        layer_ms, first_ms, head_ms: as `stage_times` takes them.
        near:     another split: of all whose slowest stage is at most `slack` slower than the best's, the nearest to it.
        fixed_ms: that each stage takes besides, whatever its layers; part of what `slack` is a share of.

    Raises:
        ConfigError: fewer layers than stages.
    """
    if num_stages > num_layers:
        raise ConfigError(f"pipeline.num_stages is {num_stages}, but the model has {num_layers} layers; lower it")
    each = [layer_ms] * num_layers if isinstance(layer_ms, int | float) else list(layer_ms)
    if len(each) != num_layers:
        raise ValueError(f"layer_ms has {len(each)} entries, but there are {num_layers} layers")
    until = [0.0, *accumulate(each)]

    def time(stage: int, begin: int, end: int) -> float:
        ends = first_ms * (stage == 0) + head_ms * (stage == num_stages - 1)
        return fixed_ms + ends + until[end] - until[begin]

    slowest, _ = _cheapest(num_layers, num_stages, time, max)
    limit = slowest * (1 + (slack if near is not None else 0.0) + 1e-9)  # sums in another order differ in their last digits
    wanted = list(accumulate(near)) if near is not None else []

    def cost(stage: int, begin: int, end: int) -> float:
        taken = time(stage, begin, end)
        if taken > limit:
            return math.inf
        return abs(end - wanted[stage]) if wanted else taken * taken

    _, ends = _cheapest(num_layers, num_stages, cost, lambda one, other: one + other)
    return tuple(end - begin for begin, end in zip((0, *ends[:-1]), ends, strict=True))


def _cheapest(
    num_layers: int,
    num_stages: int,
    cost: Callable[[int, int, int], float],
    join: Callable[[float, float], float],
) -> tuple[float, tuple[int, ...]]:
    """The least that all stages can cost together, and where each then ends; stage by stage, for every place it may end at.

    cost: of a stage with layers [begin, end).
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(num_stages):
        later = num_stages - 1 - stage
        places = range(stage + 1, num_layers - later + 1) if later else [num_layers]
        best = {
            end: min((join(done, cost(stage, begin, end)), (*ends, end)) for begin, (done, ends) in best.items() if begin < end)
            for end in places
        }
    return best[num_layers]


def _plus(counts: Sequence[int]) -> str:
    return " + ".join(map(str, counts))


def _and(cells: Sequence[str]) -> str:
    return cells[0] if len(cells) == 1 else f"{', '.join(cells[:-1])} and {cells[-1]}"
