"""The command line: parses arguments, finds the command, turns errors into one line and an exit code.

Exit codes: 0 done; 1 the engine or a request failed; 2 a wrong argument, setting or model, or too little
memory for them; 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qsa import __version__
from qsa.errors import BudgetError, CheckpointError, ConfigError, QSAError, RequestError

Arguments = argparse.Namespace


def _engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument("--config", metavar="FILE", help="YAML file with any of the settings")
    group.add_argument(
        "--set",
        dest="settings",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="one setting over the file's, such as limits.max_sequences=4; may be repeated",
    )
    group.add_argument("--stages", type=int, metavar="N", help="stage actors (pipeline.num_stages)")
    group.add_argument("--device", metavar="DEVICE", help="where stages compute: auto, cpu or cuda (pipeline.device)")
    group.add_argument("--quantization", metavar="KIND", help="weights: auto, none, int8, int4 or fp8 (model.quantization)")
    group.add_argument("--sparse", type=int, metavar="ID", help="sparse-attention configuration of the requests; 0 is dense")


def _model_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="MODEL", help="`default`, a GGUF file, a model folder, or a Hugging Face id")


def _model_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="`default`, a GGUF file, a model folder, or a Hugging Face id"
    )


def _server_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", metavar="URL", help="use a running server instead of starting an engine")
    parser.add_argument("--api-key", metavar="KEY", default=os.environ.get("QSA_API_KEY"), help="its key ($QSA_API_KEY)")


def _sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=256, metavar="N", help="generated tokens at most (256)")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    group.add_argument("--top-p", type=float, metavar="P")
    group.add_argument("--top-k", type=int, metavar="K")
    group.add_argument("--seed", type=int, metavar="N")


def _serve(parser: argparse.ArgumentParser) -> None:
    _model_argument(parser)
    parser.add_argument("--host", metavar="HOST", help="address to listen on (server.host; loopback unless told otherwise)")
    parser.add_argument("--port", type=int, metavar="PORT", help="port to listen on (server.port; 8000)")
    _engine_options(parser)


def _generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="the prompt; `-` reads standard input")
    parser.add_argument("--file", metavar="FILE", help="a document that goes before the prompt")
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    _model_option(parser)
    _server_option(parser)
    _sampling_options(parser)
    _engine_options(parser)


def _chat(parser: argparse.ArgumentParser) -> None:
    _model_argument(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--file", metavar="FILE", help="a document to talk about")
    _server_option(parser)
    _sampling_options(parser)
    _engine_options(parser)


def _batch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="INPUT", help="JSONL file, one OpenAI batch request a line")
    parser.add_argument("output", metavar="OUTPUT", help="JSONL file for the answers, in the input's order")
    parser.add_argument("--concurrency", type=int, default=8, metavar="N", help="requests in flight (8)")
    _model_option(parser)
    _server_option(parser)
    _engine_options(parser)


def _plan(parser: argparse.ArgumentParser) -> None:
    _model_argument(parser)
    parser.add_argument(
        "--measure", action="store_true", help="measure what layers and head take here, as a start does, and divide by that"
    )
    _engine_options(parser)


def _calibrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="`default`, a GGUF file, a model folder, or a Hugging Face id")
    parser.add_argument("text", metavar="TEXT", help="a text file of some thousand tokens, of the kind that will be served")
    parser.add_argument("--output", metavar="FILE", help="where to write (beside the model, where it is found by itself)")
    parser.add_argument("--code-dim", type=int, metavar="N", help="bytes a token and layer (an eighth of the key width)")
    parser.add_argument("--tokens", type=int, default=8192, metavar="N", help="tokens of the text to use (8192)")


def _bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        metavar="WHAT",
        nargs="?",
        choices=("stack", "pipeline"),
        default="stack",
        help="stack: how fast it reads and writes, through HTTP; pipeline: where the time of every stage goes (stack)",
    )
    parser.add_argument("--context", metavar="N,N", help="prompt lengths in tokens (128,4096,8000; of pipeline one: 4000)")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="tokens to generate after each prompt (64)")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="stack: runs of each; the median counts (3)")
    parser.add_argument("--streams", type=int, default=4, metavar="N", help="pipeline: sequences that decode together (4)")
    parser.add_argument("--trace", metavar="FILE", help="pipeline: write what every stage did when, for chrome://tracing")
    _model_option(parser)
    _server_option(parser)
    _engine_options(parser)


def _doctor(parser: argparse.ArgumentParser) -> None:
    _model_argument(parser)
    parser.add_argument("--port", type=int, metavar="PORT", help="the port that shall be free (server.port)")
    _engine_options(parser)


def _demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--question", metavar="TEXT", help="ask something else about the document")
    parser.add_argument("--file", metavar="FILE", help="ask about another document")
    parser.add_argument("--max-tokens", type=int, default=96, metavar="N", help="length of the answer at most (96)")
    _model_option(parser)
    _engine_options(parser)


@dataclass(frozen=True)
class Command:
    """A command's name is its module in `qsa.commands`, loaded when it is called: torch and ray take seconds to import."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]


COMMANDS = {
    "serve": Command("start the engine and answer HTTP until stopped", _serve),
    "generate": Command("answer one prompt", _generate),
    "chat": Command("talk to the model in the terminal", _chat),
    "batch": Command("answer a file of OpenAI batch requests", _batch),
    "plan": Command("print what fits where, without starting anything", _plan),
    "calibrate": Command("compute a model's `code` summaries from a text", _calibrate),
    "bench": Command("measure prefill and decode through the whole stack, or stage by stage", _bench),
    "doctor": Command("check this machine: versions, GPU, memory, ports, model", _doctor),
    "demo": Command("ask the default model about a document, and stop", _demo),
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="qsa", description="Long-context language models with hierarchical sparse attention.")
    parser.add_argument("--version", action="version", version=f"qsa {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        command.add_arguments(commands.add_parser(name, help=command.help, description=command.help))
    return parser


def _terminate(signum: int, frame: object) -> None:
    raise SystemExit(128 + signum)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code.
    """
    args = build_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _terminate)  # so that what a command started is stopped on the way out
    try:
        return int(importlib.import_module(f"qsa.commands.{args.command}").run(args))
    except QSAError as error:
        if args.traceback:
            raise
        print(f"qsa {args.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, BudgetError | CheckpointError | ConfigError | RequestError) else 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left; nothing more can be said
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
