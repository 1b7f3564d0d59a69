"""The results that stand for the project: one row a figure in results/summary.json, with its bar and whether it is met.

    record([Line("model.prefill_4k", 830.2, "tokens/s", bar=">= 800")])

A row keeps its place until a benchmark measures it again, so figures of several benchmarks and machines stand side by side.
`python -m benchmarks.summary` prints them.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.timing import RESULTS, commit, machine

SUMMARY = RESULTS / "summary.json"


@dataclass(frozen=True)
class Line:
    """One figure. `bar` is `>= number`, `<= number`, or None where nothing was promised."""

    name: str
    value: float
    unit: str
    bar: str | None = None

    @property
    def met(self) -> bool | None:
        """Whether the value keeps to its bar; None without one."""
        if self.bar is None:
            return None
        sign, number = self.bar.split()
        if sign not in (">=", "<="):
            raise ValueError(f"the bar of {self.name} must be `>= number` or `<= number`, got {self.bar!r}")
        return self.value >= float(number) if sign == ">=" else self.value <= float(number)


def this_command() -> str:
    """How the running benchmark was called, from the root of the checkout."""
    module = Path(sys.argv[0]).stem
    return shlex.join(["python", "-m", f"benchmarks.{module}", *sys.argv[1:]])


def read_summary(path: Path = SUMMARY) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return rows


def record(lines: Sequence[Line], command: str | None = None, path: Path = SUMMARY) -> None:
    """Write or replace the rows of these figures; the others stay as they are. Sorted by name."""
    common = {"machine": machine(), "commit": commit(), "command": command or this_command()}
    rows = {row["name"]: row for row in read_summary(path)}
    for line in lines:
        value = float(f"{line.value:.5g}")
        rows[line.name] = {"name": line.name, "value": value, "unit": line.unit, "bar": line.bar, "met": line.met, **common}
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    scratch.write_text(json.dumps([rows[name] for name in sorted(rows)], indent=1, ensure_ascii=False) + "\n")
    scratch.replace(path)


def as_text(name: str, value: float, unit: str, bar: str | None, met: bool | None) -> str:
    """One figure as a line of a table."""
    verdict = {True: "met", False: "MISSED", None: ""}[met]
    return f"{name:36} {value:>10.5g} {unit:10} {bar or '':10} {verdict}".rstrip()


def show(lines: Sequence[Line]) -> None:
    """Print figures that were just measured."""
    for line in lines:
        print(as_text(line.name, line.value, line.unit, line.bar, line.met))


def main() -> None:
    for row in read_summary():
        print(as_text(row["name"], row["value"], row["unit"], row["bar"], row["met"]), f"  {row['commit']}")


if __name__ == "__main__":
    main()
