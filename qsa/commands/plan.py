"""`qsa plan`: what fits where, from the model's headers and this machine's memory; starts nothing."""

from __future__ import annotations

import argparse

from qsa.model.checkpoint.load import open_checkpoint
from qsa.plan import find_calibration, plan_memory, sparse_configs
from qsa.settings import config_from


def run(args: argparse.Namespace) -> int:
    config = config_from(args)
    checkpoint = open_checkpoint(config.model.path)
    try:
        sparse, code_dim = sparse_configs(config, find_calibration(config))
        print(plan_memory(checkpoint, config, sparse=sparse, code_dim=code_dim).table())
    finally:
        checkpoint.close()
    return 0
