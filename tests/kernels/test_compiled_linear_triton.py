"""The compiled linear kernels fit the smallest card they are meant for, spill nothing, and read weights in whole vectors."""

from __future__ import annotations

import pytest
from compiled_kernels import ADA_AND_HOPPER, SHARED_BYTES, Compiled

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Compiled:
    return Compiled("compile_linear.py", tmp_path_factory.mktemp("triton"))


@pytest.mark.parametrize("capability", ADA_AND_HOPPER)
def test_kernels_fit(compiled, capability):
    assert len(compiled[capability]) == 20
    for name, needs in compiled[capability].items():
        assert needs["shared"] <= SHARED_BYTES[capability], (name, needs)
        assert needs["spilled"] == 0, (name, needs)


@pytest.mark.parametrize("capability", ADA_AND_HOPPER)
def test_weights_are_copied_16_bytes_at_a_time(compiled, capability):
    products = {name: needs for name, needs in compiled[capability].items() if " " in name and "prefill" not in name}
    assert len(products) == 15
    for name, needs in products.items():
        assert "cp.async.cg" in needs["loads"], (name, needs)
        # scales of 8-bit weights and biases are read once, after the loop; terms of 4-bit weights are copied ahead as well
        assert "ld.global.b8" not in needs["loads"], (name, needs)
        if name.startswith("int4"):
            assert not {"ld.global.b16", "ld.global.b32"} & set(needs["loads"]), (name, needs)


@pytest.mark.slow
def test_on_hopper_products_are_asynchronous(compiled):
    for name, needs in compiled[90].items():
        assert not needs.get("serialised"), (name, needs)


@pytest.mark.parametrize(("kind", "programs"), [("float", 3), ("int8", 3), ("fp8", 3), ("int4", 2)])
@pytest.mark.slow
def test_on_hopper_several_programs_share_a_multiprocessor(compiled, kind, programs):
    for name, needs in compiled[90].items():
        if name.startswith(f"{kind} ") and "prefill" not in name:
            assert programs * (needs["shared"] + 1024) <= 228 * 1024, (name, needs)
            warps = 8 if kind == "int4" and ("32" in name or "64" in name) else 4
            assert programs * needs["registers"] * 32 * warps <= 65536, (name, needs)
