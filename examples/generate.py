"""Generate with an engine in this program, without HTTP: start Ray, start the engine, stream tokens, stop both."""

from __future__ import annotations

import argparse
import asyncio
import sys

import ray

from qsa.actors.engine import Engine
from qsa.actors.placement import start_local_ray
from qsa.config import load_config
from qsa.errors import QSAError
from qsa.model.detokenize import IncrementalDetokenizer
from qsa.scheduler.request import SamplingParams


async def stream(engine: Engine, prompt: str, max_tokens: int) -> None:
    """Print the continuation of a prompt as it is generated."""
    token_ids = engine.tokenizer.encode(prompt)
    detokenizer = IncrementalDetokenizer(engine.tokenizer, token_ids)
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    async for output in engine.generate(token_ids, sampling):
        for token in output.tokens:
            print(detokenizer.push(token.token_id), end="", flush=True)
        if output.error:
            raise QSAError(output.error)
    print(detokenizer.flush())


def main() -> int:
    parser = argparse.ArgumentParser(description="Continue a prompt.")
    parser.add_argument("prompt", nargs="?", default="Once upon a time, in a village by the sea,")
    parser.add_argument("--model", default="default")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    start_local_ray()
    try:
        with Engine.start(
            load_config(None, {"model.path": args.model}), on_progress=lambda text: print(text, file=sys.stderr)
        ) as engine:
            asyncio.run(stream(engine, args.prompt, args.max_tokens))
    except QSAError as error:
        print(f"generate: {error}", file=sys.stderr)
        return 2
    finally:
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
