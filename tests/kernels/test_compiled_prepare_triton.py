"""The compiled kernels around attention fit the smallest card they are meant for, and read what is large in whole vectors."""

from __future__ import annotations

import pytest
from compiled_kernels import ADA_AND_HOPPER, SHARED_BYTES, Compiled

pytest.importorskip("triton")

NUM_KERNELS = 24


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Compiled:
    return Compiled("compile_prepare.py", tmp_path_factory.mktemp("triton"))


@pytest.mark.parametrize("capability", ADA_AND_HOPPER)
def test_kernels_fit(compiled, capability):
    assert len(compiled[capability]) == NUM_KERNELS
    for name, needs in compiled[capability].items():
        assert needs["shared"] <= SHARED_BYTES[capability], (name, needs)
        assert needs["spilled"] == 0, (name, needs)


@pytest.mark.parametrize("capability", ADA_AND_HOPPER)
def test_what_is_large_is_read_16_bytes_at_a_time(compiled, capability):
    for name, needs in compiled[capability].items():
        kernel = name.split()[0]
        wide = "cp.async.cg" if kernel == "_prefill_codes_kernel" else "ld.global.v4.b32"
        if kernel != "_argmax_kernel":  # reads a few bytes a row
            assert wide in needs["loads"], (name, needs)
        if kernel not in ("_argmax_kernel", "_decode_prepare_kernel"):  # heads of one row are no more than a number a thread
            assert not {"ld.global.b8", "ld.global.b16"} & set(needs["loads"]), (name, needs)


@pytest.mark.parametrize("capability", ADA_AND_HOPPER)
def test_memory_bound_kernels_leave_room_for_many_threads(compiled, capability):
    """With 128 registers a thread, 512 threads run on a multiprocessor: with 16 bytes each on the way, enough."""
    for name, needs in compiled[capability].items():
        assert needs["registers"] <= 128, (name, needs)
