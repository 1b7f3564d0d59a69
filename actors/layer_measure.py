"""What layers, head and embedding cost, measured at an engine's start where its stages run; never a reason not to start."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import ray

from qsa.actors.ray_errors import engine_error
from qsa.actors.stage_spec import StageSpec
from qsa.config import EngineConfig
from qsa.model.checkpoint.open import open_model
from qsa.model.layer_times import LayerTimes, measure_layer_times
from qsa.model.spec import ModelSpec
from qsa.split import has_choice

START_SHARE = 0.5  # of pipeline.start_timeout_s, for measuring

logger = logging.getLogger(__name__)


def measure_layers(spec: StageSpec, sparse_id: int) -> LayerTimes:
    """Measure in the process of a stage that has not loaded yet. sparse_id: the configuration that most requests have.

    Raises:
        QSAError: as `measure_layer_times`.
    """
    checkpoint = open_model(spec.model_path, spec.load_format, spec.device)
    try:
        return measure_layer_times(
            checkpoint,
            batch=-(-spec.max_sequences // spec.lanes),
            sparse=spec.sparse[sparse_id],
            max_model_len=spec.max_model_len,
            calibration_path=spec.calibration_path,
            dtype=spec.dtype,
            kv_dtype=spec.kv_dtype,
            quantization=spec.quantization,
            device=spec.device,
            num_threads=spec.num_threads,
        )
    finally:
        checkpoint.close()


def ask_for_times(stages: Sequence[Any], config: EngineConfig, model: ModelSpec) -> LayerTimes | None:
    """Have the last stage measure, while the others get ready to load; blocks.

    Args:
        stages: handles of all stages' actors, none of which has loaded.

    Returns:
        None where nothing can change with it, and where it did not work, which is logged.
    """
    if not has_choice(model, config):
        return None
    calls = [stage.measure_layers.remote(config.default_sparse_id) for stage in stages]
    try:
        times: LayerTimes | None = ray.get(calls, timeout=START_SHARE * config.pipeline.start_timeout_s)[-1]
    except Exception as error:
        logger.warning("layers could not be measured, and are divided as estimated: %s", engine_error(error, "a stage"))
        return None
    return times
