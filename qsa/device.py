"""Where stages compute: what `pipeline.device: auto` and a missing `pipeline.gpus_per_stage` mean on this machine or cluster.

Looking does not touch a card: no CUDA context is made, so a process that only plans takes no memory there.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from qsa.config import EngineConfig
from qsa.errors import ConfigError
from qsa.memory.budget import CardMemory

CPU_PREFILL_CHUNK = 512
CARD_PREFILL_CHUNK = 8192
CARD_BUSY_CHUNK = 1536
CPU_BURST_STEPS = 32
CARD_BURST_STEPS = 256  # a burst's end costs some milliseconds: less than a step on the CPU, more than one on a card
MAX_LANES = 2
OLDEST_CAPABILITY = (8, 0)  # Ampere
_QUERY = "index,uuid,name,memory.free,memory.total"


def missing_for_cards() -> str | None:
    """What this installation lacks for computing on cards, whether or not there are any; None when nothing."""
    if torch.version.cuda is None:
        return "this PyTorch is built without CUDA (`make install TORCH=cuda` installs one that is not)"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    return None


def why_not_cards() -> str | None:
    """Why stages cannot compute on this machine's cards; None when they can."""
    missing = missing_for_cards()
    if missing is not None:
        return missing
    if not torch.cuda.is_available():
        return "PyTorch finds no NVIDIA GPU"
    found = torch.cuda.get_device_capability(0)
    if found < OLDEST_CAPABILITY:
        return f"{torch.cuda.get_device_name(0)} has compute capability {found[0]}.{found[1]}, the operators need 8.0 (Ampere)"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "there is no C compiler, which Triton needs to start a kernel; install gcc"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return "Python's C headers, which Triton needs to start a kernel, are not installed (python3-dev)"
    return None


def num_local_cards() -> int:
    """Cards of this machine that stages can compute on."""
    return torch.cuda.device_count() if why_not_cards() is None else 0


def planned_device(config: EngineConfig, num_cards: int | None = None) -> str:
    """Where the stages compute: `cpu` or `cuda`. num_cards: of the cluster; None: this machine's."""
    if config.pipeline.device != "auto":
        return config.pipeline.device
    return "cuda" if (num_local_cards() if num_cards is None else num_cards) else "cpu"


def settle(config: EngineConfig, num_cards: int | None = None) -> EngineConfig:
    """The same configuration with everything said that depends on where it runs: device, cards a stage, chunks, lanes, bursts.

    num_cards: of the cluster; None: this machine's. Settling twice changes nothing.

    Raises:
        ConfigError: a setting does not go with another one's default.
    """
    pipeline, limits = config.pipeline, config.limits
    device = planned_device(config, num_cards)
    if device == "cuda":
        share = pipeline.gpus_per_stage
        if share is None:
            cards = num_local_cards() if num_cards is None else num_cards
            share = 1.0 if cards == 0 else 1 / -(-pipeline.num_stages // cards)
        share = int(share * 1e4 + 1e-6) / 1e4  # Ray counts in ten-thousandths
        pipeline = pipeline.model_copy(update={"gpus_per_stage": share})
    chunk = limits.prefill_chunk or (CARD_PREFILL_CHUNK if device == "cuda" else CPU_PREFILL_CHUNK)
    if limits.busy_chunk is not None and limits.busy_chunk > chunk:
        raise ConfigError(
            f"limits.busy_chunk is {limits.busy_chunk}, but limits.prefill_chunk is {chunk}, its default on {device}; lower the"
            " one or raise the other"
        )
    busy_chunk = limits.busy_chunk or (CARD_BUSY_CHUNK if device == "cuda" else chunk)
    limits = limits.model_copy(update={"prefill_chunk": chunk, "busy_chunk": min(chunk, busy_chunk)})
    lanes = pipeline.lanes or min(MAX_LANES, pipeline.num_stages)
    steps = pipeline.burst_steps or (CARD_BURST_STEPS if device == "cuda" else CPU_BURST_STEPS)
    pipeline = pipeline.model_copy(update={"device": device, "lanes": lanes, "burst_steps": steps})
    return config.model_copy(update={"pipeline": pipeline, "limits": limits})


def prefill_chunk(config: EngineConfig) -> int:
    """Tokens of a prompt computed in one step."""
    chunk = settle(config).limits.prefill_chunk
    assert chunk is not None
    return chunk


def busy_chunk(config: EngineConfig) -> int:
    """Tokens of a prompt computed in one step while others decode."""
    chunk = settle(config).limits.busy_chunk
    assert chunk is not None
    return chunk


def num_lanes(config: EngineConfig) -> int:
    """Micro-batches that decodes are divided into."""
    lanes = settle(config).pipeline.lanes
    assert lanes is not None
    return lanes


def burst_steps(config: EngineConfig) -> int:
    """Decode steps of a burst, at most."""
    steps = settle(config).pipeline.burst_steps
    assert steps is not None
    return steps


def stage_threads(config: EngineConfig) -> int:
    """CPU threads of a stage's operators."""
    pipeline = config.pipeline
    return pipeline.threads_per_stage or max(1, len(os.sched_getaffinity(0)) // pipeline.num_stages)


def stages_per_card(config: EngineConfig) -> int:
    """Stages that may find themselves on one card."""
    share = settle(config).pipeline.gpus_per_stage or 1.0
    return min(config.pipeline.num_stages, int(1 / share + 1e-6))


@dataclass(frozen=True)
class Card:
    """A card as the driver lists it. Sizes in bytes."""

    name: str
    free_bytes: int
    total_bytes: int


def local_cards() -> list[Card]:
    """This machine's cards, in CUDA's order, with what is free on them now.

    Raises:
        ConfigError: stages cannot compute on them, or there are none.
    """
    reason = why_not_cards()
    if reason is not None:
        raise ConfigError(f"pipeline.device is cuda, but {reason}; set pipeline.device to cpu")
    listed = _driver_list()
    if len(listed) == torch.cuda.device_count():
        return listed
    cards = []  # the driver's tool is not there, or counts otherwise, as with parts of cards; this makes a CUDA context
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        cards.append(Card(torch.cuda.get_device_name(index), free, total))
    return cards


def stage_cards(config: EngineConfig) -> list[CardMemory]:
    """For each stage the card of this machine it would get, before anything runs there.

    Raises:
        ConfigError: there are not as many as the stages need.
    """
    cards, each = local_cards(), stages_per_card(config)
    num_stages = config.pipeline.num_stages
    if -(-num_stages // each) > len(cards):
        raise ConfigError(
            f"pipeline.num_stages is {num_stages} with {each} on a card, but this machine has {len(cards)};"
            " lower pipeline.num_stages or pipeline.gpus_per_stage"
        )
    found = [(index // each, cards[index // each]) for index in range(num_stages)]
    return [CardMemory(str(place), card.name, card.free_bytes, card.total_bytes) for place, card in found]


def _driver_list() -> list[Card]:
    """Cards by `nvidia-smi`, those that CUDA_VISIBLE_DEVICES leaves; empty where it does not run."""
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
        rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
        known = {key: Card(name, int(free) << 20, int(total) << 20) for *keys, name, free, total in rows for key in keys}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        order = [row[0] for row in rows] if visible is None else [key.strip() for key in visible.split(",") if key.strip()]
        return [known[key] for key in order]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError):
        return []
