"""Who may take how much of a device: weights, workspace and KV chunks of each stage. Arithmetic, and a probe of free memory.

Everything is decided here before weights are read, so a start that cannot fit ends with one line that says what to change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qsa.errors import BudgetError
from qsa.memory.layout import CHUNK_BYTES

CPU_KV_SHARE = 0.4  # of the available memory, all stages together, for a pool whose size is not configured
CARD_KV_SHARE = 0.97  # of what weights and workspace leave free on a card: allocators round up

_MEMINFO = Path("/proc/meminfo")
_V2, _V1 = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")
_CGROUPS: tuple[tuple[Path, Path, Path, str], ...] = (  # limit, usage, figures, and the one of cached files not in use
    (_V2 / "memory.max", _V2 / "memory.current", _V2 / "memory.stat", "inactive_file"),
    (_V1 / "memory.limit_in_bytes", _V1 / "memory.usage_in_bytes", _V1 / "memory.stat", "total_inactive_file"),
)


@dataclass(frozen=True)
class StageNeed:
    """What one stage takes before its KV, and the chunks it would like: `wanted_chunks` for all sequences at full length,
    `sequence_chunks` for one of them, `least_chunks` for the shortest request."""

    weight_bytes: int
    workspace_bytes: int
    wanted_chunks: int
    sequence_chunks: int
    least_chunks: int

    @property
    def fixed_bytes(self) -> int:
        return self.weight_bytes + self.workspace_bytes


@dataclass(frozen=True)
class CardMemory:
    """The card a stage computes on, as it is before the stage takes anything. `card`: the same for stages that share one."""

    card: str
    name: str
    free_bytes: int
    total_bytes: int


def available_host_bytes() -> int:
    """Memory that processes of this machine, or of this container, can still take.

    A container's usage counts cached files, such as a checkpoint read a minute ago; the kernel gives them up when asked.
    """
    fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    for limit, usage, figures, cached in _CGROUPS:
        try:
            left = int(limit.read_text()) - int(usage.read_text())
            stat = dict(line.split() for line in figures.read_text().splitlines())
            left += int(stat.get(cached, 0))
        except (OSError, ValueError):  # no such file, or the word "max"
            continue
        available = min(available, max(left, 0))
    return available


def share_host(needs: Sequence[StageNeed], available: int, device_bytes: int | None) -> tuple[int, ...]:
    """Chunks of each stage when all stages share the host's memory.

    Args:
        device_bytes: configured bytes of a stage's pool; None: as wanted, at most CPU_KV_SHARE of `available` in all.

    Raises:
        BudgetError: weights and workspace, or these and the pools, exceed what is available, or a pool is too small.
    """
    fixed = sum(need.fixed_bytes for need in needs)
    if fixed > available:
        advice = "choose a smaller model (model.path)"
        if sum(need.weight_bytes for need in needs) < available / 2:
            advice = "lower limits.max_sequences, limits.prefill_chunk or the sizes under sparse,"
        raise BudgetError(
            f"weights and workspace of {len(needs)} stages need {gib(fixed)}, {gib(available)} are available;"
            f" {advice} or free memory"
        )
    if device_bytes is None:
        limit = int(min(CPU_KV_SHARE * available, available - fixed)) // len(needs) // CHUNK_BYTES
        return tuple(_planned(stage, need, limit) for stage, need in enumerate(needs))
    chunks = _configured(needs, device_bytes)
    pools = len(needs) * device_bytes
    if fixed + pools > available:
        raise BudgetError(
            f"cache.device_bytes is {gib(device_bytes)} for each of {len(needs)} stages and weights and workspace need"
            f" {gib(fixed)}, {gib(fixed + pools)} in all, but {gib(available)} are available; lower cache.device_bytes"
            f" to at most {(available - fixed) // len(needs) // CHUNK_BYTES} MiB"
        )
    return chunks


def share_cards(needs: Sequence[StageNeed], cards: Sequence[CardMemory], device_bytes: int | None) -> tuple[int, ...]:
    """Chunks of each stage on its card; stages on one card share what is free there by the chunks a sequence takes.

    Args:
        cards:        the card of each stage.
        device_bytes: configured bytes of a stage's pool; None: as wanted, at most CARD_KV_SHARE of what is left.

    Raises:
        BudgetError: a card cannot hold its stages, or a pool is too small.
    """
    if device_bytes is not None:
        _configured(needs, device_bytes)
    chunks = []
    for stage, (need, own) in enumerate(zip(needs, cards, strict=True)):
        mates = [other for other, card in zip(needs, cards, strict=True) if card.card == own.card]
        free = min(card.free_bytes for card in cards if card.card == own.card)
        fixed = sum(mate.fixed_bytes for mate in mates)
        left = free - fixed
        wanted = len(mates) * (CHUNK_BYTES if device_bytes is None else device_bytes)
        if left < wanted:
            who = f"stage {stage} needs" if len(mates) == 1 else f"{len(mates)} stages on one card need"
            advice = "raise pipeline.num_stages" if len(mates) == 1 else "give each a card (pipeline.gpus_per_stage: 1)"
            most = left // len(mates) // CHUNK_BYTES
            if device_bytes is not None and most >= max(mate.least_chunks for mate in mates):
                advice = f"lower cache.device_bytes to at most {most} MiB"
            raise BudgetError(
                f"{who} {gib(fixed)} for weights and workspace and {gib(wanted)} for KV, but {own.name} has {gib(free)} of"
                f" {gib(own.total_bytes)} free; {advice}, or choose smaller weights (model.quantization)"
            )
        if device_bytes is not None:
            chunks.append(device_bytes // CHUNK_BYTES)
            continue
        share = need.sequence_chunks / sum(mate.sequence_chunks for mate in mates)
        chunks.append(_planned(stage, need, int(CARD_KV_SHARE * left * share) // CHUNK_BYTES))
    return tuple(chunks)


def _planned(stage: int, need: StageNeed, limit: int) -> int:
    if limit < need.sequence_chunks:
        raise BudgetError(
            f"one sequence of full length takes {need.sequence_chunks} chunks of 1 MiB on stage {stage}, but only {limit} are"
            " to spare; lower model.max_model_len, or set cache.device_bytes to accept shorter requests only"
        )
    return min(need.wanted_chunks, limit)


def _configured(needs: Sequence[StageNeed], device_bytes: int) -> tuple[int, ...]:
    num_chunks = device_bytes // CHUNK_BYTES
    for stage, need in enumerate(needs):
        if num_chunks < need.least_chunks:
            raise BudgetError(
                f"cache.device_bytes is {num_chunks} MiB, but the shortest request takes {need.least_chunks} chunks of 1 MiB"
                f" on stage {stage}; raise cache.device_bytes to at least {need.least_chunks} MiB"
                f" ({need.sequence_chunks} MiB for a sequence of full length)"
            )
    return (num_chunks,) * len(needs)


def gib(num_bytes: int) -> str:
    """Bytes for a message: MiB below one GiB."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
