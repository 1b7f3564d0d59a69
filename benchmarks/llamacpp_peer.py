"""llama.cpp on the same file, in a process of its own: reads one request a line on standard input, answers with its times.

    {"prompt": [ids], "num_tokens": 64}  ->  {"prefill_s": 1.2, "decode_ms": 11.3, "tokens": [ids]}

Prefill is the evaluation of the prompt in batches of 512 and the choice of the first token; decode is the mean time of the
tokens after it, greedy, without turning them into text. Needs the `peer` extra (`make peer`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The library writes notes straight to the file descriptors; answers must be alone on standard output."""
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


class Peer:
    """One loaded model. State: the context that the current request fills."""

    def __init__(self, path: str, num_threads: int, context_len: int) -> None:
        import llama_cpp  # noqa: PLC0415 - an optional extra, reported by the caller when it is missing

        self._library = llama_cpp
        sizes = {"n_ctx": context_len, "n_batch": 512, "n_threads": num_threads, "n_threads_batch": num_threads}
        self._model = llama_cpp.Llama(path, **sizes, verbose=False)
        self._vocab_size = self._model.n_vocab()

    def _choose(self) -> int:
        logits = self._library.llama_get_logits_ith(self._model.ctx, -1)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())

    def run(self, prompt: list[int], num_tokens: int) -> dict[str, Any]:
        model = self._model
        model.reset()
        model._ctx.kv_cache_clear()
        begin = time.perf_counter()
        model.eval(prompt)
        tokens = [self._choose()]
        prefill_s = time.perf_counter() - begin
        begin = time.perf_counter()
        while len(tokens) < num_tokens:
            model.eval(tokens[-1:])
            tokens.append(self._choose())
        decode_ms = (time.perf_counter() - begin) * 1e3 / max(1, num_tokens - 1)
        return {"prefill_s": prefill_s, "decode_ms": decode_ms, "tokens": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=8192)
    args = parser.parse_args()
    with quiet():
        peer = Peer(args.path, args.threads, args.context)
    print("ready", flush=True)
    for line in sys.stdin:
        with quiet():
            reply = peer.run(**json.loads(line))
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
