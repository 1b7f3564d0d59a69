"""Compiles the linear operators' kernels for an architecture, without a GPU, and prints what each launch needs as JSON.

    python tests/compile_linear.py 90

Weights are small; what they are launched with is what the 7B shape's weights would be.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from offline_gpu import compile_launches, is_serialised, resources

from qsa.kernels.quant_linear_triton import Fp8Linear, Int4Linear, Int8Linear, pick_bytes, pick_nibbles
from qsa.kernels.quant_prefill_triton import quantise_rows, scale_sums
from qsa.kernels.skinny_launch_triton import LEAST_SHARED_BYTES, SHARED_BYTES, CardSize
from qsa.kernels.skinny_linear_triton import FloatLinear, pick

SHAPES = {"qkv": (4608, 3584), "o": (3584, 3584), "gate_up": (37888, 3584), "down": (3584, 18944), "head": (152064, 3584)}
ROWS, COLUMNS = 256, 1024  # of the weights that are really there
FORMS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda linear: linear.forward,
    "parts": lambda linear: linear.forward_parts,
    "gated": lambda linear: linear.forward_gated,
    "prefill": lambda linear: linear.forward_prefill,
}


def int4(zeros: str, group: int, launch: dict[str, Any], dtype: torch.dtype) -> Int4Linear:
    scale = torch.full((ROWS, COLUMNS // group), 0.5)
    minimum = {"none": -8 * scale, "integer": -3 * scale, "minimum": -3.5 * scale}[zeros]
    linear = Int4Linear()
    values = torch.zeros(ROWS, COLUMNS, dtype=torch.uint8)
    linear.init(values=values, scale=scale, minimum=minimum, dtype=dtype, launch=launch)
    return linear


def layers(card: CardSize) -> dict[str, tuple[Any, str]]:
    """Linear layers with the form of product that is compiled."""
    out: dict[str, tuple[Any, str]] = {}
    weight = torch.ones(ROWS, COLUMNS)
    forms = {"qkv": "sum", "o": "parts", "gate_up": "gated", "down": "parts", "head": "sum"}
    for name, form in forms.items():
        linear = FloatLinear()
        linear.init(weight=weight.bfloat16(), bias=torch.ones(ROWS).bfloat16(), launch=asdict(pick(*SHAPES[name], 2, card)))
        out[f"float {name}"] = linear, form
    for kind in (Int8Linear, Fp8Linear):
        for name in ("o", "gate_up"):
            byte = kind()
            byte.init(weight=weight, launch=asdict(pick_bytes(*SHAPES[name], card)), multiply_in_8_bits=False)
            out[f"{kind.kind} {name}"] = byte, forms[name]
        out[f"{kind.kind} prefill"] = byte, "prefill"
    for zeros, group, dtype in (
        *((zeros, 128, torch.bfloat16) for zeros in ("none", "integer")),
        *((zeros, 32, torch.bfloat16) for zeros in ("integer", "minimum")),
        ("integer", 64, torch.bfloat16),
        ("integer", 128, torch.float16),
    ):
        launch = asdict(pick_nibbles(*SHAPES["gate_up"], group, card))
        name = f"int4 {zeros} {group} {str(dtype).removeprefix('torch.')}"
        out[name] = int4(zeros, group, launch, dtype), "gated"
    out["int4 prefill"] = out["int4 integer 128 bfloat16"][0], "prefill"
    return out


def main() -> None:
    capability = int(sys.argv[1])
    compiled = compile_launches(capability)
    card = CardSize(132 if capability == 90 else 128, SHARED_BYTES.get(divmod(capability, 10), LEAST_SHARED_BYTES))
    needs = {}
    for name, (linear, form) in layers(card).items():
        x = torch.zeros(
            100 if form == "prefill" else 8, COLUMNS, dtype=torch.float16 if name.endswith(" float16") else torch.bfloat16
        )
        FORMS[form](linear)(x)
        (kernel,) = compiled.values()
        compiled.clear()
        needs[name] = resources(kernel)
        if capability == 90 and form != "prefill":
            needs[name]["serialised"] = is_serialised(kernel, capability)
    x = torch.zeros(100, COLUMNS, dtype=torch.bfloat16)
    quantise_rows(x, COLUMNS, "fp8")
    scale_sums(torch.zeros(100, ROWS, dtype=torch.int32), torch.ones(100), torch.ones(ROWS), None, x[:, :ROWS])
    needs.update({name: resources(kernel) for name, kernel in compiled.items()})
    print(json.dumps(needs))


if __name__ == "__main__":
    main()
