"""`qsa plan`: what fits where, from the model's headers and this machine's memory; starts nothing."""

from __future__ import annotations

import argparse

from qsa.device import settle
from qsa.model.checkpoint.open import open_model
from qsa.plan import find_calibration, plan_memory, sparse_configs
from qsa.settings import config_from


def run(args: argparse.Namespace) -> int:
    config = settle(config_from(args))
    checkpoint = open_model(config.model.path, config.model.load_format)
    try:
        sparse, code_dim = sparse_configs(config, find_calibration(config), checkpoint.spec)
        print(plan_memory(checkpoint, config, sparse=sparse, code_dim=code_dim).table())
    finally:
        checkpoint.close()
    return 0
