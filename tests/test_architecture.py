"""Imports point down, heavy packages stay where they belong, and every file says what it is for."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ["kernels", "memory", "model", "scheduler", "actors", "serve_app"]  # bottom to top
FILES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))
ONLY_IN = {  # package -> folders that may import it
    "ray": {"actors", "serve_app"},
    "triton": {"kernels"},
    "torch": {"kernels", "memory", "model", "actors"},
}


def imported_names(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_down(path):
    own = LAYERS.index(layer_of(path))
    up = []
    for name, line in imported_names(path):
        root, layer, *_ = (*name.split("."), "", "")
        if root == "qsa" and layer in LAYERS and LAYERS.index(layer) > own:
            up.append(f"line {line} imports qsa.{layer}")
        if root in LAYERS:
            up.append(f"line {line} imports {name} without the qsa prefix")
    assert not up, "\n".join(up)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_heavy_packages_stay_where_they_belong(path):
    found = [
        f"line {line} imports {name}"
        for name, line in imported_names(path)
        if (package := name.split(".")[0]) in ONLY_IN and layer_of(path) not in ONLY_IN[package]
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("layer", ["kernels", "memory", "model", "scheduler"])
def test_configuration_stops_at_actors(layer):
    found = [
        f"{name_of(path)}:{line}"
        for path in FILES
        if layer_of(path) == layer
        for name, line in imported_names(path)
        if name.startswith("qsa.config")
    ]
    assert not found, "configuration objects stop at actors: " + ", ".join(found)


PYTHON = sorted(
    {
        *FILES,
        *(ROOT / "qsa").glob("*.py"),
        *(ROOT / "qsa/commands").glob("*.py"),
        *(ROOT / "benchmarks").glob("*.py"),
        *(ROOT / "examples").glob("*.py"),
    }
)


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_first_line_states_the_subject_and_files_stay_short(path):
    text = path.read_text()
    assert text.startswith('"""') and len(text.splitlines()[0]) > 20, "the first line must say what the file is for"
    assert len(text.splitlines()) <= 420, "a file this long has two subjects: split it"


def test_engine_folders_are_links_without_init():
    for layer in LAYERS:
        link = ROOT / "qsa" / layer
        assert link.is_symlink() and link.resolve() == ROOT / layer
        assert not list((ROOT / layer).rglob("__init__.py"))
