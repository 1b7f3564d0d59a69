"""Compilation of Triton kernels for a card that is not there, and what the compiled ones need of it."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
CUOBJDUMP, PTXAS = TOOLS / "cuobjdump", TOOLS / "ptxas"
_compiled: dict[str, Any] = {}  # in a child of compile_cases: the last kernel of each name


class Architecture:
    """Stands in for a GPU's driver: says what to compile for."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def resources(kernel: Any) -> dict[str, Any]:
    """Shared memory of a compiled kernel in bytes, its warps, registers and spilled bytes a thread, and global loads."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    loads = sorted(set(re.findall(r"ld\.global[\w.]*|cp\.async\.c[ag]", kernel.asm["ptx"])))
    needs = {"shared": kernel.metadata.shared, "warps": kernel.metadata.num_warps, "registers": int(registers)}
    return {**needs, "spilled": int(stack), "loads": loads}


def is_serialised(kernel: Any, capability: int) -> bool:
    """Whether ptxas makes every Hopper product wait for the one before, as it does when something else may write its sum."""
    with tempfile.NamedTemporaryFile(suffix=".ptx", mode="w") as file:
        file.write(kernel.asm["ptx"])
        file.flush()
        command = [PTXAS, "-v", f"--gpu-name=sm_{capability}a", file.name, "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return "wgmma.mma_async instructions are serialized" in said


def compile_launches(capability: int) -> dict[str, Any]:
    """From now on launches compile for that capability and run nothing. Returns the compiled kernels, the last of each name."""
    driver.set_active(Architecture(capability))
    compiled: dict[str, Any] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> None:
        compiled[self.__name__] = run(self, *args, **{**kwargs, "warmup": True})

    JITFunction.run = compile_only
    return compiled


def compile_cases(compiled: dict[str, Any], cases: Mapping[str, Callable[[], object]]) -> dict[str, Any]:
    """Run launches on all cores, each case in a child of this process; what their kernels need, as `kernel case`.

    compiled: of `compile_launches`.
    """
    with get_context("fork").Pool(initializer=_in_child, initargs=(compiled,)) as pool:
        return {name: needs for part in pool.imap(_compile_case, cases.items()) for name, needs in part.items()}


def _in_child(compiled: dict[str, Any]) -> None:
    global _compiled
    _compiled = compiled


def _compile_case(case: tuple[str, Callable[[], object]]) -> dict[str, Any]:
    name, launch = case
    launch()
    needs = {f"{kernel} {name}": resources(_compiled[kernel]) for kernel in _compiled}
    _compiled.clear()
    return needs
