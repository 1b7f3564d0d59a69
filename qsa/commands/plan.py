"""`qsa plan`: what fits where, from the model's headers and this machine's memory; starts nothing.

With `--measure` a few layers are loaded and timed here, in this process, as the last stage of an engine does when it starts.
"""

from __future__ import annotations

import argparse

from qsa.config import EngineConfig
from qsa.device import settle, stage_threads
from qsa.kernels.registry import SparseConfig
from qsa.model.checkpoint.load import Checkpoint
from qsa.model.checkpoint.open import open_model
from qsa.model.layer_times import LayerTimes, measure_layer_times
from qsa.plan import find_calibration, model_len, plan_memory, sparse_configs
from qsa.settings import config_from
from qsa.split import lane_batch


def run(args: argparse.Namespace) -> int:
    config = settle(config_from(args))
    checkpoint = open_model(config.model.path, config.model.load_format, config.pipeline.device)
    try:
        sparse, code_dim = sparse_configs(config, find_calibration(config), checkpoint.spec)
        plan = plan_memory(checkpoint, config, sparse=sparse, code_dim=code_dim)  # what does not fit is not measured
        if args.measure:
            times = _measure(checkpoint, config, sparse[config.default_sparse_id])
            plan = plan_memory(
                checkpoint, config, sparse=sparse, code_dim=code_dim, times=times,
                available=plan.available_bytes, cards=plan.cards or None,
            )  # fmt: skip
        print(plan.table())
        if not args.measure and plan.split.source == "estimated" and len(plan.stages) > 1:
            print("times are estimated; an engine's start measures them, and so does `qsa plan --measure`")
    finally:
        checkpoint.close()
    return 0


def _measure(checkpoint: Checkpoint, config: EngineConfig, sparse: SparseConfig) -> LayerTimes:
    model = config.model
    return measure_layer_times(
        checkpoint,
        batch=lane_batch(config),
        sparse=sparse,
        max_model_len=model_len(checkpoint.spec, config),
        calibration_path=find_calibration(config),
        dtype=model.dtype,
        kv_dtype=model.kv_dtype,
        quantization=model.quantization,
        device=config.pipeline.device,
        num_threads=stage_threads(config),
    )
