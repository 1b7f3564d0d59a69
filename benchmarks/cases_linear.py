"""Cases of linear layers at the reference shape: 8 rows against all weights of a layer and the head, and a prefill chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.gpu_cases import Case, relative_error
from qsa.kernels import quant_linear_triton, skinny_linear_triton
from qsa.kernels.registry import get_operator

HIDDEN, INTERMEDIATE, VOCAB, QKV = 3584, 18944, 152064, 4608
SHAPES = {  # out_features, in_features, which form of the product
    "qkv": (QKV, HIDDEN, "forward"),
    "o": (HIDDEN, HIDDEN, "forward_parts"),
    "gate_up": (2 * INTERMEDIATE, HIDDEN, "forward_gated"),
    "down": (HIDDEN, INTERMEDIATE, "forward_parts"),
    "head": (VOCAB, HIDDEN, "forward"),
}
BATCH, CHUNK = 8, 8192
L2_BYTES = 300e6  # of weights in turn


def expected(form: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = x @ weight.T
    if form != "forward_gated":
        return out
    gate, up = out.chunk(2, 1)
    return torch.nn.functional.silu(gate) * up


def groups_of_four_bits(weight: torch.Tensor, group: int = 128) -> dict[str, torch.Tensor]:
    """A weight in symmetric groups of columns, as checkpoints of four bits have it."""
    grouped = weight.float().unflatten(1, (-1, group))
    scale = grouped.abs().amax(2) / 7
    values = (grouped / scale.unsqueeze(2)).round_().clamp_(-8, 7).add_(8).to(torch.uint8)
    return {"values": values.flatten(1), "scale": scale}


def decode_case(kind: str, name: str, make: Callable[..., Any], bytes_per_weight: float) -> Case:
    out_features, in_features, form = SHAPES[name]
    sets = max(2, int(L2_BYTES // (out_features * in_features * bytes_per_weight)))
    weights = [
        torch.randn(out_features, in_features, device="cuda", dtype=torch.bfloat16) * in_features**-0.5 for _ in range(sets)
    ]
    x = torch.randn(BATCH, in_features, device="cuda", dtype=torch.bfloat16)
    first = weights[0].clone()
    made: dict[str, list[Any]] = {}

    def operators(launch: dict[str, Any]) -> list[Any]:
        key = str(launch)
        if key not in made:
            made.clear()
            made[key] = [make(weight, **({"launch": launch} if launch else {})) for weight in weights]
        return made[key]

    def call(one: int, launch: dict[str, Any]) -> torch.Tensor:
        out: torch.Tensor = getattr(operators(launch)[one], form)(x)
        return out

    def check(out: torch.Tensor) -> tuple[float, float]:
        got = out.sum(0) if form == "forward_parts" else out
        held = first
        want = expected(form, x.double(), held.double())
        own = max(relative_error(expected(form, x, held), want), 1e-3)
        return relative_error(got, want), own + {"int8": 0.01, "fp8": 0.03, "int4": 0.12}.get(
            kind, 0.0
        )  # of the rounded weight

    tune = {"bfloat16": skinny_linear_triton.TUNE, "int4": quant_linear_triton.TUNE_NIBBLES}
    size = out_features * in_features * bytes_per_weight
    return Case(
        f"linear_{kind}_{name}", call, check, tune=({}, *tune.get(kind, quant_linear_triton.TUNE_BYTES)), bytes=size, sets=sets
    )


def cases() -> Iterator[Case]:
    def make(name: str) -> Callable[..., Any]:
        def build(weight: torch.Tensor, **options: Any) -> Any:
            operator = get_operator(name, "triton")
            held = groups_of_four_bits(weight) if name == "int4_linear" else {"weight": weight}
            operator.init(**held, **options)
            return operator

        return build

    for kind, bytes_per_weight in (("bfloat16", 2.0), ("int8", 1.0), ("fp8", 1.0), ("int4", 0.53)):
        for name in SHAPES:
            yield decode_case(kind, name, make({"bfloat16": "float"}.get(kind, kind) + "_linear"), bytes_per_weight)
            torch.cuda.empty_cache()
    for name, (out_features, in_features, _) in SHAPES.items():
        weight = torch.randn(out_features, in_features, device="cuda", dtype=torch.bfloat16) * in_features**-0.5
        x = torch.randn(BATCH, in_features, device="cuda", dtype=torch.bfloat16)
        copies = [weight.clone() for _ in range(max(2, int(L2_BYTES // weight.nbytes)))]
        yield Case(
            f"cublas_bfloat16_{name}",
            lambda one, launch, x=x, copies=copies: torch.nn.functional.linear(x, copies[one]),
            bytes=weight.nbytes,
            sets=len(copies),
        )
        if name == "head":
            continue
        rows = torch.randn(CHUNK, in_features, device="cuda", dtype=torch.bfloat16)
        for kind in ("float", "int8", "fp8", "int4"):
            operator = make(f"{kind}_linear")(weight)
            yield Case(
                f"prefill_linear_{kind}_{name}",
                lambda one, launch, rows=rows, operator=operator: operator.forward_prefill(rows),
                flops=2.0 * CHUNK * out_features * in_features,
                graph=False,
                sets=1,
            )
            torch.cuda.empty_cache()
