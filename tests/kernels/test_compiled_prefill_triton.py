"""The compiled prefill kernels fit the smallest card they are meant for, and use what Hopper has."""

from __future__ import annotations

import pytest
from compiled_kernels import ADA_AND_HOPPER, SHARED_BYTES, Compiled

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Compiled:
    return Compiled("compile_prefill.py", tmp_path_factory.mktemp("triton"))


@pytest.mark.parametrize("capability", ADA_AND_HOPPER)
def test_kernels_fit(compiled, capability):
    assert len(compiled[capability]) == {89: 9, 90: 11}[capability]
    for name, needs in compiled[capability].items():
        assert needs["shared"] <= SHARED_BYTES[capability], (name, needs)
        assert needs["spilled"] <= 64, (name, needs)  # what no loop needs


@pytest.mark.slow
def test_on_hopper_products_run_beside_other_work(compiled):
    for name, needs in compiled[90].items():
        if "units" in needs:
            wanted = ["cp.async.bulk.tensor", "wgmma.mma_async"] if "descriptor" in name else ["wgmma.mma_async"]
            assert needs["units"] == wanted, (name, needs)


@pytest.mark.parametrize("capability", ADA_AND_HOPPER)
def test_slices_are_copied_16_bytes_at_a_time(compiled, capability):
    for name, needs in compiled[capability].items():
        if "units" in needs:
            assert "cp.async.cg" in needs["loads"], (name, needs)
            assert not {"ld.global.b8", "ld.global.b16"} & set(needs["loads"]), (name, needs)
