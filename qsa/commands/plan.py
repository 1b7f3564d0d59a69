"""`qsa plan`: what fits where, from the model's headers and this machine's memory; starts nothing."""

from __future__ import annotations

import argparse


def run(args: argparse.Namespace) -> int:
    raise NotImplementedError
