"""Every GPU operator at the shape of a 7B model, each checked against its reference first, then timed inside CUDA graphs.

    python -m benchmarks.bench_kernels                     # table, results/kernels.csv, rows of results/summary.json
    python -m benchmarks.bench_kernels --tune              # tries launch parameters first and measures with the fastest
    python -m benchmarks.bench_kernels --only decode --names rerank

The shape: 28 query heads, 4 KV heads, head_dim 128, 8 sequences of 262144 tokens, slices of 64. The cases are in `cases_*.py`.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

from benchmarks import timing
from benchmarks.gpu_cases import Found, copy_rate, run_case
from benchmarks.gpu_cases import show as show_case
from benchmarks.summary import Line, record, show

MODULES = ("decode", "select", "linear", "prefill")
TFLOP_BARS = {f"sparse_prefill_{tokens}_{dtype}": ">= 400" for tokens in (4096, 8192) for dtype in ("float16", "bfloat16")}
COPY_BARS = {"dense_decode": ">= 0.9"}


def lines_of(found: Found, copy_gb_s: float) -> list[Line]:
    """The figures of one case: microseconds, and what the bars speak of."""
    name, row = found.case.name, found.row(copy_gb_s)
    lines = [Line(f"operators.kernel_{name}", found.us, "us")]
    if isinstance(row["tflop_per_s"], float) and name in TFLOP_BARS:
        lines.append(Line(f"operators.{name}_rate", row["tflop_per_s"], "TFLOP/s useful", TFLOP_BARS[name]))
    if isinstance(row["of_copy"], float) and name in COPY_BARS:
        lines.append(Line(f"operators.{name}_of_copy", row["of_copy"], "share", COPY_BARS[name]))
    return lines


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="try launch parameters first")
    parser.add_argument("--only", nargs="*", choices=MODULES, default=MODULES, help="groups of cases")
    parser.add_argument("--names", nargs="*", default=(), help="parts of the names of the cases to run")
    parser.add_argument("--commit", help="of this checkout, where it was copied without its git folder")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    if options.commit:
        timing.copied_from(options.commit)
    rate = copy_rate()
    rows: list[dict[str, object]] = [{"operator": "device_copy", "gb_per_s": rate}]
    lines = [Line("operators.copy", rate, "GB/s")]
    checked = wrong = 0
    for module in options.only:
        for case in importlib.import_module(f"benchmarks.cases_{module}").cases():
            if options.names and not any(part in case.name for part in options.names):
                continue
            found = run_case(case, options.tune)
            print(show_case(found, rate), flush=True)
            rows.append(found.row(rate))
            checked += case.check is not None
            wrong += bool(found.failure) or not found.is_right
            if not found.failure:
                lines += lines_of(found, rate)
    if not options.names and tuple(options.only) == MODULES:
        lines.append(Line("operators.kernels_checked", checked, "cases"))
        lines.append(Line("operators.kernels_beyond_twice_the_reference_error", wrong, "cases", "<= 0"))
        print(timing.write_csv("kernels", rows))
        record(lines)
    show(lines)


if __name__ == "__main__":
    main()
