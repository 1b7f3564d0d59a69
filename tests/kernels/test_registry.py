"""Operators are got by name and backend, set up once and taken down once."""

from __future__ import annotations

import pytest
import torch
from stage_attention import SMALL, Sequence, make_attention, run_prompt

from qsa.kernels import registry
from qsa.kernels.registry import Operator, SparseConfig, get_operator, register
from qsa.model.attention import OPERATORS

DECODER = ("rms_norm", "rotary", "silu_multiply", "float_linear", "int4_linear", "int8_linear", "int8_head")
SUMMARIES = ("code_summary", "sketch_summary", "minmax_summary", "mean_summary")


@pytest.mark.parametrize("name", [*OPERATORS, *DECODER, *SUMMARIES, "topk"])
def test_every_operator_of_the_engine_is_known(name):
    first, second = get_operator(name, "torch"), get_operator(name, "torch")
    assert isinstance(first, Operator) and first is not second
    assert callable(first.forward)


def test_an_unknown_name_says_what_there_is():
    with pytest.raises(ValueError, match=r"no operator 'kv_wirte' on backend 'torch'; registered: .*kv_write/torch"):
        get_operator("kv_wirte", "torch")


def test_a_backend_that_lacks_an_operator_is_refused():
    """On a GPU, writing K and V is a part of decode_prepare and prefill_prepare: there is no such operator."""
    pytest.importorskip("triton")
    assert isinstance(get_operator("sparse_decode", "triton"), Operator)
    with pytest.raises(ValueError, match="no operator 'kv_write' on backend 'triton'"):
        make_attention({1: SparseConfig(**SMALL)}, torch.float32, backend="triton")


def test_a_name_is_taken_once():
    with pytest.raises(ValueError, match="'kv_write' is already registered"):
        register("kv_write", "torch", Operator)


def test_stage_attention_uses_what_is_registered(monkeypatch):
    calls: dict[str, list[str]] = {name: [] for name in OPERATORS}

    def counting(name: str) -> type[Operator]:
        base = type(get_operator(name, "torch"))

        class Counting(base):
            def init(self, **sizes):
                calls[name].append("init")
                super().init(**sizes)

            def forward(self, *args, **kwargs):
                calls[name].append("forward")
                return base.forward(*args, **kwargs)

            def free(self):
                calls[name].append("free")
                super().free()

        return Counting

    for name in OPERATORS:
        monkeypatch.setitem(registry._OPERATORS, (name, "torch"), counting(name))
    attention = make_attention({1: SparseConfig(**SMALL)}, torch.float32)
    assert all(found == ["init"] for found in calls.values())
    attention.open(0, 1)
    run_prompt(attention, 0, Sequence.random(512, 0, torch.float32), 512, 1)
    attention.close()
    attention.close()
    for name in ("kv_write", "block_select", "sparse_prefill"):
        assert calls[name][0] == "init" and calls[name][-1] == "free"
        assert set(calls[name][1:-1]) == {"forward"}, name
    assert calls["sparse_decode"] == ["init", "free"]
