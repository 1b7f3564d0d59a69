"""`qsa calibrate MODEL TEXT`: compute the projections of the model's `code` summaries from one text, in a minute or two."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rich.progress import Progress

from qsa.commands.generate import read_text
from qsa.errors import ConfigError
from qsa.model.calibrate import calibrate
from qsa.model.checkpoint.load import resolve_model
from qsa.plan import calibration_beside
from qsa.terminal import console, notes


def writable(path: Path) -> Path:
    """The path itself, when a file can be made there.

    Raises:
        ConfigError: it cannot; told before minutes of computing.
    """
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK) or path.is_dir():
        raise ConfigError(f"cannot write {path}; choose another place with --output, and name it as model.calibration")
    return path


def run(args: argparse.Namespace) -> int:
    text = read_text(args.text)
    out = writable(Path(args.output) if args.output is not None else calibration_beside(resolve_model(args.model)))
    with Progress(console=notes, transient=True, disable=not notes.is_terminal) as bar:
        tasks: dict[str, int] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
                if not notes.is_terminal:
                    notes.print(what, markup=False)
            bar.update(tasks[what], completed=done)  # type: ignore[arg-type]

        calibration = calibrate(args.model, text, out=out, max_tokens=args.tokens, code_dim=args.code_dim, progress=report)
    often = sum(every == 1 for every in calibration.scan_every or ())
    layers = len(calibration.project)
    console.print(
        f"{out}: {calibration.code_dim} bytes a token and layer, {often} of {layers} layers scan at every step", markup=False
    )
    return 0
