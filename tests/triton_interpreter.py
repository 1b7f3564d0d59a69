"""Triton's interpreter without what it does in vain: half of the time of a test.

It replaces the functions of `triton.language` by its own when a kernel is launched, and again at every call of a function
that is itself compiled (`tl.sum`, `tl.cdiv`, our own), looking through all members of the language. What it puts in place is
the same each time; here it stays. And it works out for every sum and product of integers whether it overflowed, for an
assertion that it only makes when debugging.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from triton.runtime import interpreter


def speed_up() -> None:
    """Of this process' interpreter; results are the same."""
    options = interpreter.interpreter_builder.options
    assert not options.debug, "its assertions would be made"
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)

    patch, keep = interpreter._patch_lang, interpreter._LangPatchScope()

    @cache
    def patch_once(fn: Callable[..., object]) -> interpreter._LangPatchScope:
        patch(fn)  # what it returns would undo it
        return keep

    interpreter._patch_lang = patch_once
