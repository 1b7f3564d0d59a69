"""The compiled kernels of scans and selection fit the smallest cards they are meant for; summaries are read in vectors."""

from __future__ import annotations

import pytest
from compiled_kernels import ADA_AND_HOPPER, SHARED_BYTES, Compiled

pytest.importorskip("triton")

KERNELS = {
    "_quantise_queries_kernel",
    "_scan_code_rows_kernel",
    "_scan_codes_kernel",
    "_scan_sketch_kernel",
    "_scan_sketch_rows_kernel",
    "_scan_vector_rows_kernel",
    "_scan_vectors_kernel",
    "_select_decode_kernel",
    "_select_tiles_kernel",
    "_update_sketch_kernel",
    "_update_vectors_kernel",
}


@pytest.fixture(scope="module", params=ADA_AND_HOPPER)
def compiled(request, tmp_path_factory):
    """A capability, and what every kernel needs there."""
    return request.param, Compiled("compile_select.py", tmp_path_factory.mktemp("triton"))[request.param]


def test_kernels_fit(compiled):
    capability, kernels = compiled
    assert {name.split()[0] for name in kernels} == KERNELS
    for name, needs in kernels.items():
        assert needs["shared"] <= SHARED_BYTES[capability], (name, needs)
        assert needs["spilled"] <= (32 if name.endswith("1M") else 0), (name, needs)


def test_summaries_are_copied_16_bytes_at_a_time(compiled):
    """An address from a table says nothing of its alignment; where it is not stated, each number is a load of its own."""
    for name, needs in compiled[1].items():
        if name.startswith("_scan_") and name.endswith("7B"):
            assert "cp.async.cg" in needs["loads"], (name, needs)
            assert not {"ld.global.b8", "cp.async.ca"} & set(needs["loads"]), (name, needs)


def test_scores_are_read_16_bytes_at_a_time(compiled):
    for name, needs in compiled[1].items():
        if name.startswith("_select_"):
            assert any("v4" in load or "cp.async.cg" in load for load in needs["loads"]), (name, needs)


def test_as_many_programs_as_a_code_scan_has_run_at_once_on_hopper(compiled):
    """Four on each multiprocessor: what waits for a place would run almost alone."""
    capability, kernels = compiled
    if capability != 90:
        pytest.skip("other launch parameters")
    needs = kernels["_scan_codes_kernel code 7B"]
    assert min(227 * 1024 // (needs["shared"] + 1024), 65536 // (-(-needs["registers"] // 8) * 8 * 128)) >= 4, needs
