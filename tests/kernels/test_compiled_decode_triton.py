"""The compiled decode attention kernels fit the smallest cards they are meant for, and read K and V in whole vectors."""

from __future__ import annotations

import pytest
from compiled_kernels import ALL, SHARED_BYTES, Compiled

pytest.importorskip("triton")

KERNELS = {"_rerank_scores_kernel", "_rerank_values_kernel", "_sparse_decode_kernel", "_dense_decode_kernel"}


@pytest.fixture(scope="module", params=ALL)
def compiled(request, tmp_path_factory):
    """A capability, and what every kernel needs there."""
    return request.param, Compiled("compile_decode.py", tmp_path_factory.mktemp("triton"))[request.param]


def test_kernels_fit(compiled):
    capability, kernels = compiled
    assert {name.split()[0] for name in kernels} == KERNELS
    for name, needs in kernels.items():
        assert needs["shared"] <= SHARED_BYTES[capability], (name, needs)
        assert needs["spilled"] <= 16, (name, needs)


def test_k_and_v_are_copied_16_bytes_at_a_time(compiled):
    """An address from a table says nothing of its alignment; where it is not stated, each number is a load of its own."""
    for name, needs in compiled[1].items():
        assert "cp.async.cg" in needs["loads"], (name, needs)
        assert not {"ld.global.b8", "ld.global.b16"} & set(needs["loads"]), (name, needs)


def test_all_programs_of_the_reference_shape_run_at_once_on_hopper(compiled):
    """8 sequences of 4 KV heads on 132 multiprocessors: what waits for a place would run almost alone."""
    capability, kernels = compiled
    if capability != 90:
        pytest.skip("another number of multiprocessors")
    for name, needs in kernels.items():
        splits = {"_rerank_scores_kernel": 16, "_rerank_values_kernel": 8, "_sparse_decode_kernel": 8}.get(name.split()[0])
        if splits is not None:
            at_once = min(227 * 1024 // (needs["shared"] + 1024), 65536 // (needs["registers"] * 32 * needs["warps"]))
            assert splits * 32 <= 132 * at_once, (name, needs)
