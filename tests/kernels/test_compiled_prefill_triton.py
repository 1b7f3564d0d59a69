"""The compiled prefill kernels fit the smallest card they are meant for, and use what Hopper has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SHARED_BYTES = {89: 99 * 1024, 90: 227 * 1024}  # of a block


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    environment.pop("TRITON_INTERPRET", None)
    script = Path(__file__).parent.parent / "compile_prefill.py"
    needs = {}
    for capability in SHARED_BYTES:
        done = subprocess.run([sys.executable, script, str(capability)], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        needs[capability] = json.loads(done.stdout)
    return needs


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_kernels_fit(compiled, capability):
    assert len(compiled[capability]) == {89: 9, 90: 11}[capability]
    for name, needs in compiled[capability].items():
        assert needs["shared"] <= SHARED_BYTES[capability], (name, needs)
        assert needs["spilled"] <= 64, (name, needs)  # what no loop needs


def test_on_hopper_products_run_beside_other_work(compiled):
    for name, needs in compiled[90].items():
        if "units" in needs:
            wanted = ["cp.async.bulk.tensor", "wgmma.mma_async"] if "descriptor" in name else ["wgmma.mma_async"]
            assert needs["units"] == wanted, (name, needs)


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_slices_are_copied_16_bytes_at_a_time(compiled, capability):
    for name, needs in compiled[capability].items():
        if "units" in needs:
            assert "cp.async.cg" in needs["loads"], (name, needs)
            assert not {"ld.global.b8", "ld.global.b16"} & set(needs["loads"]), (name, needs)
