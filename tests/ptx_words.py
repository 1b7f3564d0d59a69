"""Runs the packed-word assembly of a kernel's source on numpy words: so its constants are tested where no GPU is."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence

import numpy as np
import torch

Words = np.ndarray  # uint32


def snippets(function: Callable[..., object]) -> list[str]:
    """The assembly texts inside a kernel function, in their order."""
    source = inspect.getsource(getattr(function, "fn", function))
    return [re.sub(r"^\s+", "", text, flags=re.MULTILINE) for text in re.findall(r'"""\{(.*?)\}"""', source, re.DOTALL)]


def halves(words: Words, dtype: torch.dtype) -> torch.Tensor:
    """Both halves of every word as numbers, float64 [words, 2], the lower half first."""
    return torch.from_numpy(words.view(np.int16).copy()).view(dtype).double().view(-1, 2)


def _from_halves(numbers: torch.Tensor, dtype: torch.dtype) -> Words:
    narrow = numbers.to(dtype)
    assert torch.equal(narrow.double(), numbers), "every step must be exact"
    return narrow.view(torch.int16).numpy().view(np.uint32).reshape(-1)


def _lop3(a: Words, b: Words, c: Words, table: int) -> Words:
    out = np.zeros_like(a)
    for index in range(8):
        if table >> index & 1:
            terms = [value if index >> 2 - place & 1 else ~value for place, value in enumerate((a, b, c))]
            out |= terms[0] & terms[1] & terms[2]
    return out


def execute(text: str, num_outputs: int, inputs: Sequence[Words]) -> list[Words]:
    """Results $0 .. of one snippet for words of its inputs, which are numbered after the results."""
    values = {f"${num_outputs + place}": np.asarray(words, dtype=np.uint32) for place, words in enumerate(inputs)}
    zeros = np.zeros_like(values[f"${num_outputs}"])

    def value(name: str) -> Words:
        return values[name] if name in values else zeros + np.uint32(int(name, 0))

    for line in text.replace("\n", " ").split(";"):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        operation, _, rest = line.strip().partition(" ")
        target, *names = (name.strip() for name in rest.split(","))
        if operation == "lop3.b32":
            values[target] = _lop3(*(value(name) for name in names[:3]), int(names[3], 0))
            continue
        args = [value(name) for name in names]
        name, *kinds = operation.split(".")
        if kinds[-1] in ("bf16x2", "f16x2"):
            dtype = torch.bfloat16 if kinds[-1] == "bf16x2" else torch.float16
            numbers = [halves(arg, dtype) for arg in args]
            if name == "fma":
                values[target] = _from_halves(numbers[0] * numbers[1] + numbers[2], dtype)
            else:
                first, second = numbers
                results = {"add": first + second, "sub": first - second, "mul": first * second}
                values[target] = _from_halves(results[name], dtype)
        else:
            simple = {"mov": lambda a: a, "shr": lambda a, b: a >> b, "shl": lambda a, b: a << b, "and": lambda a, b: a & b}
            values[target] = simple[name](*args)
    return [values[f"${place}"] for place in range(num_outputs)]
