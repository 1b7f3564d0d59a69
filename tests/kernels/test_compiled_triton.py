"""The compiled kernels fit the smallest card they are meant for, and read K, V and codes in whole vectors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

KERNELS = {
    "_scan_codes_kernel",
    "_quantise_queries_kernel",
    "_block_select_kernel",
}
SHARED_BYTES = 99 * 1024  # of a block on Ada (sm_89), less than on Ampere's and Hopper's data-centre cards


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, dict]:
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    environment.pop("TRITON_INTERPRET", None)
    script = Path(__file__).parent.parent / "compile_triton.py"
    done = subprocess.run([sys.executable, script, "89"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_kernels_fit_ada(compiled):
    assert set(compiled) == KERNELS
    for name, needs in compiled.items():
        assert needs["shared"] <= SHARED_BYTES, (name, needs)
        assert needs["spilled"] == 0, (name, needs)


@pytest.mark.parametrize("name", ["_scan_codes_kernel"])
def test_what_is_large_is_copied_16_bytes_at_a_time(name, compiled):
    """An address from a table says nothing of its alignment; where it is not stated, each number is a load of its own."""
    loads = compiled[name]["loads"]
    assert "cp.async.cg" in loads, loads
    assert not {"ld.global.b8", "ld.global.b16"} & set(loads), loads
