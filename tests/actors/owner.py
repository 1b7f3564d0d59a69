"""Run by a test as a process of its own: starts an engine, prints its actors' process ids, generates until it is killed."""

from __future__ import annotations

import asyncio
import json

import ray
from scripted_stage import build_scripted

from qsa.actors.engine import Engine
from qsa.config import make_config
from qsa.scheduler.request import SamplingParams


async def main() -> None:
    ray.init(namespace="qsa", log_to_driver=False)
    values = {"model": {"max_model_len": 4096}, "cache": {"device_bytes": 128 << 20}, "pipeline": {"cpus_per_stage": 0.2}}
    engine = Engine.start(make_config(values), name="test/owner", build=build_scripted)
    pids = [stage.pid for stage in (await engine.stats()).stages]
    print(json.dumps(pids), flush=True)
    while True:
        async for _ in engine.generate([7], SamplingParams(max_tokens=100, ignore_eos=True)):
            pass


if __name__ == "__main__":
    asyncio.run(main())
