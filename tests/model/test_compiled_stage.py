"""All that a stage launches compiles for the cards it is meant for, with K and V in 16 and in 8 bits, and fits them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}  # of a block
EXPECTED = {  # some of what each part launches
    "decode 0": {"_add_rms_norm_kernel", "_decode_prepare_kernel", "_dense_decode_kernel"},
    "decode 1": {"_scan_codes_kernel", "_select_decode_kernel", "_rerank_scores_kernel", "_selection_figures_kernel"},
    "decode 2": {"_scan_sketch_kernel", "_update_sketch_kernel", "_sparse_decode_kernel"},
    "prefill 1": {"_prefill_prepare_kernel", "_prefill_codes_kernel", "_select_tiles_kernel", "_sparse_prefill_kernel"},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["80 auto auto", "80 auto int4", "89 fp8 fp8", "90 auto auto", "90 fp8 int8"])
def test_a_stage_compiles_and_fits(case, tmp_path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, Path(__file__).parent.parent / "compile_stage.py", *case.split()]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    needs, limit = json.loads(done.stdout), SHARED_BYTES[int(case[:2])]
    for part, kernels in EXPECTED.items():
        assert kernels <= {name.split()[0] for name in needs if f" {part} " in name}, part
    for name, need in needs.items():
        assert need["shared"] <= limit, (name, need)
        assert need["spilled"] <= 128, (name, need)
