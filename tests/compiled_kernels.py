"""What compiled kernels need on cards that are not here: scripts that compile for an architecture, in their own processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}  # of a block
ADA_AND_HOPPER = [89, pytest.param(90, marks=pytest.mark.slow)]  # Ada has the least shared memory
ALL = [pytest.param(80, marks=pytest.mark.slow), *ADA_AND_HOPPER]


class Compiled(dict[int, Any]):
    """By capability, what each kernel of a script `tests/compile_*.py` needs; compiled when it is first asked for."""

    def __init__(self, script: str, cache: Path) -> None:
        super().__init__()
        self._script = Path(__file__).parent / script
        self._environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
        self._environment.pop("TRITON_INTERPRET", None)

    def __missing__(self, capability: int) -> Any:
        command = [sys.executable, self._script, str(capability)]
        done = subprocess.run(command, capture_output=True, text=True, env=self._environment)
        assert done.returncode == 0, done.stderr
        self[capability] = json.loads(done.stdout)
        return self[capability]
