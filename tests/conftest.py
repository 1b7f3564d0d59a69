"""What every test shares: memory that nobody wrote is NaN, and the working directory is a scratch folder's business."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
if not Path("/dev/nvidiactl").exists():  # without a GPU, Triton's kernels run in its interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    import triton_interpreter

    triton_interpreter.speed_up()

pytest_plugins = ["ray_cluster"]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """`-m slow` asks for slow tests of cards too."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan():
    """`torch.empty` yields NaN (the largest value for integers), so an operator that forgets part of its output fails."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(0)
