"""Engines whose stages are linked in every way say what one stage says, with a real model, also after a stage was lost."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial

import pytest
from engine_helpers import actor_pid, collect, until_free, until_healthy
from tiny_models import make_tiny_model

from qsa.actors.engine import Engine
from qsa.actors.stage_steps import build_model
from qsa.config import make_config
from qsa.scheduler.request import SamplingParams

pytestmark = pytest.mark.ray

MANY = 60  # tokens of a stream: more than a burst
PROMPTS = [[(7 * i + j) % 250 + 10 for j in range(length)] for i, length in enumerate((1, 16, 70, 180))]
SAMPLINGS = [
    SamplingParams(temperature=0.0, max_tokens=MANY, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=1, max_tokens=MANY, ignore_eos=True),
    SamplingParams(temperature=0.7, top_p=0.9, seed=2, repetition_penalty=1.2, max_tokens=MANY, ignore_eos=True),
    SamplingParams(temperature=0.0, presence_penalty=1.0, frequency_penalty=0.5, max_tokens=MANY, ignore_eos=True),
]


def build_over_gloo(spec):
    """The stage's model, in a process whose transport between stages is gloo's and not sockets."""
    from qsa.actors import transport_p2p  # noqa: PLC0415

    transport_p2p.P2PTransport = partial(transport_p2p.P2PTransport, backend="gloo")
    return build_model(spec)


def start(folder, num_stages, transport, build=build_model):
    config = {
        "model": {"path": str(folder), "max_model_len": 256, "dtype": "float32"},
        "cache": {"device_bytes": 64 << 20},
        "limits": {"max_sequences": 4, "prefill_chunk": 64},
        "pipeline": {"num_stages": num_stages, "transport": transport, "cpus_per_stage": 0.2, "threads_per_stage": 1},
    }
    return Engine.start(make_config(config), name=f"test/{transport}", build=build)


async def texts(engine):
    """The tokens of all streams at once."""
    found = await asyncio.gather(*(collect(engine, *pair) for pair in zip(PROMPTS, SAMPLINGS, strict=True)))
    return [tokens for tokens, _ in found]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model("qwen2", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def of_one_stage(folder, ray_driver):
    with start(folder, 1, "auto") as engine:
        return asyncio.run(texts(engine))


@pytest.mark.parametrize(
    ("transport", "build", "link"),
    [
        ("object_store", build_model, "object_store: "),
        ("rdt", build_model, "rdt: "),
        ("p2p", build_model, "p2p over sockets: "),
        ("p2p", build_over_gloo, "p2p over gloo: "),
    ],
    ids=["object_store", "rdt", "sockets", "gloo"],
)
def test_two_stages_equal_one_before_and_after_a_loss(transport, build, link, folder, of_one_stage):
    async def scenario(engine):
        assert await texts(engine) == of_one_stage
        running = asyncio.ensure_future(texts(engine))
        await asyncio.sleep(0.05)
        os.kill(actor_pid(f"qsa/test/{transport}/stage1"), signal.SIGKILL)
        assert await running == of_one_stage
        await until_healthy(engine)
        assert await texts(engine) == of_one_stage
        await until_free(engine)

    with start(folder, 2, transport, build) as engine:
        assert str(engine.link).startswith(f"hidden states travel by {link}")
        asyncio.run(scenario(engine))
