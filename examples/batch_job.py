"""Answer an OpenAI batch file (JSONL in, JSONL out) on a Ray cluster.

As a job, whose driver runs in the cluster (paths are the cluster's):

    ray job submit --working-dir . -- python examples/batch_job.py /data/prompts.jsonl /data/answers.jsonl

As a Ray client, from a machine that only needs to reach the cluster (paths are this machine's):

    python examples/batch_job.py prompts.jsonl answers.jsonl --address ray://127.0.0.1:10001

An input line: {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import ray

from qsa.config import load_config
from qsa.errors import QSAError
from qsa.serve_app.batch import read_lines, run_batch

CONNECT_ATTEMPTS = 3


def connect(address: str | None) -> None:
    """Attach to the cluster of this machine or job, or as a Ray client to another one; never start a cluster.

    The head node starts a server of its own for each client, and may lose it while it starts (with grpcio from 1.81 on,
    unless GRPC_ENABLE_FORK_SUPPORT=0 is in the environment of `ray start`: grpc/grpc#43055). A new connection gets a new one.

    Raises:
        ConnectionAbortedError: the cluster refused CONNECT_ATTEMPTS times to serve this client.
    """
    for attempt in range(1, CONNECT_ATTEMPTS + 1):
        try:
            ray.init(address=address or "auto", log_to_driver=False)
            return
        except ConnectionAbortedError as error:
            if attempt == CONNECT_ATTEMPTS:
                raise
            reason = str(error).strip().splitlines()[-1]
            say(f"connecting again after attempt {attempt} of {CONNECT_ATTEMPTS}: {reason}")


def say(text: str) -> None:
    print(f"batch_job: {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Answer an OpenAI batch file on a Ray cluster.")
    parser.add_argument("input", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--address", help="ray://HOST:PORT for a Ray client; default: the cluster of this machine or job")
    parser.add_argument("--config", help="YAML file with the engine's settings")
    parser.add_argument("--model", help="model to use instead of the configured one")
    args = parser.parse_args()
    if args.output.resolve() == args.input.resolve():
        parser.error(f"the answers would overwrite the prompts in {args.input}; name another output file")
    try:
        config = load_config(args.config, {"model.path": args.model} if args.model else None)
        items = list(read_lines(args.input.read_text(encoding="utf-8").splitlines(), str(args.input)))
        connect(args.address)
        failed = 0
        with args.output.open("w") as output:
            for answer in run_batch(items, config, on_progress=say):
                failed += answer["response"]["status_code"] != 200
                output.write(json.dumps(answer, ensure_ascii=False) + "\n")
                output.flush()
    except (QSAError, OSError, UnicodeDecodeError) as error:
        say(str(error).strip().splitlines()[-1])  # Ray's own come with a traceback
        return 2
    print(f"{len(items) - failed} of {len(items)} requests answered, in {args.output}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
