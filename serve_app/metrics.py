"""Prometheus metrics: what HTTP saw, and the engine's own statistics at the moment of the scrape."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from enum import Enum
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

HELP = {  # of the engine's statistics, by the end of their names
    "stages_busy_seconds": "Computing, of a stage, since the engine was ready.",
    "stages_wait_seconds": "Waiting for another stage's data within bursts, of a stage, since the engine was ready.",
    "stages_transfer_seconds": "Packing, sending and unpacking hidden states, of a stage, since the engine was ready.",
    "stages_idle_share": "Waiting, as a share of computing, transfers and waiting: the bubble that a stage sees.",
    "stages_in_flight": "Frames and chunks that a stage has sent and the next one has not taken yet.",
    "stages_sent_bytes": "Hidden states that a stage has sent.",
    "recoveries": "Losses of stages that the engine has come back from.",
    "recovery_seconds": "How long the last recovery took.",
    "stages_running_seconds": "How long the step under way has been running.",
}
SCHEDULER_TOTALS = (
    "added",
    "finished",
    "aborted",
    "failed",
    "refused",
    "preempted",
    "generated_tokens",
    "computed_tokens",
    "steps",
)
STAGE_TOTALS = ("busy_seconds", "wait_seconds", "transfer_seconds", "steps", "tokens", "sent_bytes")
COUNTERS = frozenset(
    [*(f"scheduler_{name}" for name in SCHEDULER_TOTALS), *(f"stages_{name}" for name in STAGE_TOTALS), "recoveries"]
)
LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class HttpMetrics:
    """Counters of one app, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("qsa_http_requests", "Answered requests.", ["endpoint", "status"], registry=self.registry)
        self.in_flight = Gauge("qsa_http_requests_in_flight", "Requests being answered.", registry=self.registry)
        self.disconnects = Counter("qsa_http_disconnects", "Clients that left before the end.", registry=self.registry)
        self.stream_errors = Counter("qsa_http_stream_errors", "Streams that ended with an error.", registry=self.registry)
        self.prompt_tokens = Counter("qsa_prompt_tokens", "Tokens of accepted prompts.", registry=self.registry)
        self.generated_tokens = Counter("qsa_generated_tokens", "Tokens generated.", registry=self.registry)
        self.first_token_s = Histogram(
            "qsa_time_to_first_token_seconds", "From the request to its first token.", buckets=LATENCY_S, registry=self.registry
        )
        self.token_s = Histogram(
            "qsa_time_per_output_token_seconds",
            "Mean time between tokens, a sequence.",
            buckets=LATENCY_S,
            registry=self.registry,
        )

    def render(self, engine_stats: Any) -> bytes:
        """The text format, with the engine's numbers as `qsa_engine_*`; None: the engine did not answer."""
        return generate_latest(self.registry) + generate_latest(_engine_registry(engine_stats))


class _EngineCollector(Collector):
    """Every number of a tree of dataclasses, as a counter what only grows until its process is replaced, all else as a gauge.

    Entries of a list are told apart by `stage`. Prometheus wants `_total` at the end of a counter's name.
    Words, such as a stage's device, are the label of a gauge that is 1 and whose name ends in `_info`.
    """

    def __init__(self, stats: Any) -> None:
        self._stats = stats

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for name, stage, value in leaves(self._stats):
            labels = {} if stage is None else {"stage": stage}
            if isinstance(value, str):
                field = name.rpartition("_")[2]
                name, labels, value = f"{name}_info", {**labels, field: value}, 1.0
            name = with_unit(name)
            family = families.get(name)
            if family is None:
                short = name.removeprefix("qsa_engine_")
                kind = CounterMetricFamily if short in COUNTERS else GaugeMetricFamily
                text = HELP.get(short, "From the engine's statistics.")
                family = families[name] = kind(name, text, labels=list(labels))
            family.add_metric(list(labels.values()), value)
        yield from families.values()


def _engine_registry(stats: Any) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(_EngineCollector(stats))
    return registry


def leaves(value: Any, name: str = "qsa_engine", stage: str | None = None) -> Iterator[tuple[str, str | None, float | str]]:
    """All finite numbers and, of stages, all words below `value` with their names."""
    if isinstance(value, (bool, int, float)):
        if math.isfinite(value):
            yield name, stage, float(value)
    elif isinstance(value, str):
        if stage is not None and value:
            yield name, stage, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{name}_{key}", stage)
    elif isinstance(value, (list, tuple)):
        if stage is None:
            for index, item in enumerate(value):
                yield from leaves(item, name, str(index))
    elif dataclasses.is_dataclass(value):
        yield from leaves(plain(value), name, stage)


def with_unit(name: str) -> str:
    """A field's name with its unit spelled as Prometheus wants it: `busy_s` is busy_seconds."""
    for suffix, unit in (("_per_s", "_per_second"), ("_s", "_seconds")):
        if name.endswith(suffix):
            return name.removesuffix(suffix) + unit
    return name


def plain(value: Any) -> Any:
    """Dataclasses, enumerations and tuples as what strict JSON can hold."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
