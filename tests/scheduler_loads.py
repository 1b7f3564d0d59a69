"""Small stages and requests for the scheduler's tests: chunks are scarce, pages are small, arithmetic fits on paper."""

from __future__ import annotations

from qsa.memory.layout import KVLayout, SummaryLayout
from qsa.scheduler.growth import StageCapacity
from qsa.scheduler.request import Request, SamplingParams
from qsa.scheduler.scheduler import Scheduler
from qsa.scheduler.simulated_stages import next_token

KV = KVLayout(num_kv_heads=8, head_dim=128, element_bytes=4)  # page_size 128
SUMMARIES = {0: SummaryLayout(64, 0), 1: SummaryLayout(64, 200_000)}  # 4 slices a chunk, so 256 tokens


def make_stages(*chunks: int, layers: int = 1) -> list[StageCapacity]:
    return [StageCapacity(layers, n, KV, SUMMARIES) for n in chunks]


def make_request(
    name: str, prompt_len: int = 10, max_tokens: int = 5, *, sparse_id: int = 0, priority: int = 0, **sampling: object
) -> Request:
    seed = sum(map(ord, name))
    prompt = tuple(1 + (seed + i) % 900 for i in range(prompt_len))
    return Request(name, prompt, SamplingParams(seed=seed, max_tokens=max_tokens, **sampling), sparse_id, priority)


def solo_tokens(request: Request) -> list[int]:
    """The scripted model's text, which depends on nothing but the request."""
    first = len(request.prompt_token_ids)
    return [next_token(request.sampling, position) for position in range(first, first + request.sampling.max_tokens)]


def make_scheduler(*chunks: int, **settings: object) -> Scheduler:
    values: dict = {
        "max_sequences": 4, "max_waiting": 8, "max_model_len": 4096, "prefill_chunk": 128, "growth_horizon": 64,
        "eos_token_ids": (0,),
    }  # fmt: skip
    return Scheduler(make_stages(*(chunks or (100, 100))), **(values | settings))
