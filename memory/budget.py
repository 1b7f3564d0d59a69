"""Who may take how much of a device: weights, workspace and KV chunks of each stage. Arithmetic, and a probe of free memory.

Everything is decided here before weights are read, so a start that cannot fit ends with one line that says what to change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from qsa.errors import BudgetError, ConfigError
from qsa.memory.layout import CHUNK_BYTES

CPU_KV_SHARE = 0.4  # of the available memory, all stages together, for a pool whose size is not configured
CUDA_KV_SHARE = 0.9  # of what weights and workspace leave free on a card

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


def available_device_bytes(device: torch.device) -> int:
    """Free memory of a GPU, or of the host for the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_host_bytes()


def share_host(needs: Sequence[StageNeed], available: int, device_bytes: int | None) -> tuple[int, ...]:
    """Chunks of each stage when all stages share the host's memory.

    Args:
        device_bytes: configured bytes of a stage's pool; None: as wanted, at most CPU_KV_SHARE of `available` in all.

    Raises:
        BudgetError: weights and workspace, or these and the pools, exceed what is available, or a pool is too small.
    """
    fixed = sum(need.fixed_bytes for need in needs)
    if fixed > available:
        raise BudgetError(
            f"weights and workspace of {len(needs)} stages need {gib(fixed)}, {gib(available)} are available;"
            " choose a smaller model (model.path) or free memory"
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


def share_cards(needs: Sequence[StageNeed], available: Sequence[int], device_bytes: int | None) -> tuple[int, ...]:
    """Chunks of each stage when every stage has a card of its own; `available`: free bytes of each card.

    Raises:
        BudgetError: a card cannot hold its stage, or a pool is too small.
    """
    if device_bytes is not None:
        _configured(needs, device_bytes)
    chunks = []
    for stage, (need, free) in enumerate(zip(needs, available, strict=True)):
        left = free - need.fixed_bytes
        if left < (device_bytes or CHUNK_BYTES):
            raise BudgetError(
                f"stage {stage} needs {gib(need.fixed_bytes)} for weights and workspace and {gib(device_bytes or CHUNK_BYTES)}"
                f" for KV, its card has {gib(free)} free; lower cache.device_bytes, or raise pipeline.num_stages"
            )
        limit = int(CUDA_KV_SHARE * left) // CHUNK_BYTES
        chunks.append(device_bytes // CHUNK_BYTES if device_bytes is not None else _planned(stage, need, limit))
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


def split_layers(num_layers: int, num_stages: int, head_cost_layers: float = 0.0) -> tuple[int, ...]:
    """Layers of each stage so that the slowest is as fast as can be; the last one also has the head.

    Args:
        head_cost_layers: time of the head, the last norm and the sampler, in layers.

    Raises:
        ConfigError: fewer layers than stages.
    """
    if num_stages > num_layers:
        raise ConfigError(f"pipeline.num_stages is {num_stages}, but the model has {num_layers} layers; lower it")
    if num_stages == 1:
        return (num_layers,)
    others = num_stages - 1

    def slowest(last: int) -> tuple[float, float]:
        first = -(-(num_layers - last) // others)
        return max(first, last + head_cost_layers), abs(first - last - head_cost_layers)

    last = min(range(1, num_layers - others + 1), key=slowest)
    rest = num_layers - last
    return (*(rest // others + (stage < rest % others) for stage in range(others)), last)


def gib(num_bytes: int) -> str:
    """Bytes for a message: MiB below one GiB."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
