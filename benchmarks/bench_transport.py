"""What handing over costs: a lane's step there and its answer back, and a prefill chunk, through every transport.

    python -m benchmarks.bench_transport                   CPU: all transports, stages as Ray actors
    python -m benchmarks.bench_transport --device cuda     p2p between two cards, or through the host where there is one
    python -m benchmarks.bench_transport --device cuda --transports p2p,object_store,rdt

A step's frame has a header of 200 bytes, its answer 100; nothing is computed in between. `one` has one step under way, `two` a
step of each of two lanes, where the time from answer to answer counts. A chunk counts from the call that packs it to the end
of the call that unpacks it; `streamed` is the time a chunk with two of them under way. On the CPU all stages are Ray actors,
and chunks come by Ray calls as in the engine; where only p2p is measured they are plain processes and called over pipes.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import deque
from typing import Any

from benchmarks.summary import Line, record, show
from benchmarks.timing import copied_from, timing_of, write_csv
from benchmarks.transport_stages import Case, Pair, ProcessPair, RayPair, link

CASES = [
    Case(4, 576, "float32", 512),  # the default model on the CPU
    Case(4, 3584, "bfloat16", 8192),  # 7B on cards
]
WARM = 20
WAYS = {  # as asked for -> transport, what shall carry the hidden states, whether Ray has to be there
    "object_store": ("object_store", None, True),
    "rdt": ("rdt", None, True),
    "p2p": ("p2p", None, False),
    "gloo": ("p2p", "gloo", False),
    "sockets": ("p2p", "sockets", False),
}


def measure(pair: Pair, way: str, case: Case, epoch: int, num_steps: int, num_chunks: int, device: str) -> dict[str, Any]:
    """One row: steps in microseconds, chunks in milliseconds."""
    name, wire, _ = WAYS[way]
    carrier = link(pair, name, wire, case, epoch)
    options: dict[str, Any] = {}
    if name == "rdt":
        from qsa.actors.transport_rdt import create_rdt_group, forward_options  # noqa: PLC0415 - Ray is there

        create_rdt_group(pair.handles, device)
        options = forward_options(name, device)
    row: dict[str, Any] = {
        "device": device,
        "transport": way,
        "carried_by": carrier,
        "step": case.step,
        "chunk_rows": case.chunk,
    }
    for lanes, column in ((1, "one"), (2, "two")):
        calls = [pair.submit(0, "drive", WARM + num_steps, lanes), pair.submit(1, "follow")]
        runs = timing_of([run * 1e6 for run in pair.result(calls[0])[WARM:]])
        assert pair.result(calls[1]) == WARM + num_steps
        row |= {f"{column}_us": runs.median, f"{column}_p99_us": sorted(runs.runs)[int(len(runs.runs) * 0.99)]}

    def chunk(check: bool) -> Any:
        return pair.submit(1, "take_chunk", pair.submit(0, "make_chunk", **options), check)

    assert pair.result(chunk(True)) and pair.result(chunk(True)), "other bytes came than were sent"
    single = []
    for _ in range(num_chunks):
        began = time.perf_counter()
        pair.result(chunk(False))
        single.append((time.perf_counter() - began) * 1e3)
    under_way: deque[Any] = deque()
    began = time.perf_counter()
    for _ in range(num_chunks):
        under_way.append(chunk(False))
        if len(under_way) == 2:
            pair.result(under_way.popleft())
    while under_way:
        pair.result(under_way.popleft())
    streamed = (time.perf_counter() - began) / num_chunks * 1e3
    for call in [pair.submit(stage, "close") for stage in range(2)]:
        pair.result(call)
    return row | {"chunk_ms": timing_of(single).median, "chunk_streamed_ms": streamed}


def show_rows(rows: list[dict[str, Any]]) -> None:
    columns = ["one_us", "one_p99_us", "two_us", "two_p99_us", "chunk_ms", "chunk_streamed_ms"]
    print(f"{'transport':14}{'carried by':12}{'step':20}{'chunk':>7}" + "".join(f"{column:>18}" for column in columns))
    for row in rows:
        figures = "".join(f"{row[column]:>18.4g}" for column in columns)
        print(f"{row['transport']:14}{row['carried_by']:12}{row['step']:20}{row['chunk_rows']:>7}{figures}")


def lines_of(rows: list[dict[str, Any]], device: str) -> list[Line]:
    case = CASES[device == "cuda"]
    return [
        Line(f"pipeline.transport_{device}_{row['transport']}_{what}", row[column], unit)
        for row in rows
        if row["step"] == case.step
        for what, column, unit in (("step", "one_us", "us"), ("lane_step", "two_us", "us"), ("chunk", "chunk_ms", "ms"))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--transports", help=f"some of {','.join(WAYS)}; default: all on the CPU, p2p on cards")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--chunks", type=int, default=20)
    parser.add_argument("--print-only", action="store_true", help="write neither CSV nor summary")
    parser.add_argument("--commit", help="that this tree is a copy of")
    options = parser.parse_args()
    if options.commit:
        copied_from(options.commit)
    default = "object_store,rdt,p2p,gloo" if options.device == "cpu" else "p2p"
    ways = (options.transports or default).split(",")
    unknown = [way for way in ways if way not in WAYS]
    if unknown:
        parser.error(f"--transports must be some of {', '.join(WAYS)}, got {', '.join(unknown)}")
    with_ray = any(WAYS[way][2] for way in ways)
    if with_ray:
        import ray  # noqa: PLC0415 - not where stages are plain processes

        from qsa.actors.placement import start_local_ray  # noqa: PLC0415
        from qsa.actors.transport_rdt import actor_options  # noqa: PLC0415

        os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])  # of Ray's workers
        start_local_ray()
    rows: list[dict[str, Any]] = []
    try:
        for way in ways:
            pair: Pair = RayPair(options.device, actor_options(WAYS[way][0])) if with_ray else ProcessPair(options.device)
            try:
                for epoch, case in enumerate(CASES):
                    rows.append(measure(pair, way, case, epoch, options.steps, options.chunks, options.device))
            finally:
                pair.close()
    finally:
        if with_ray:
            ray.shutdown()
    show_rows(rows)
    lines = lines_of(rows, options.device)
    if not options.print_only:
        print(write_csv("transport" if options.device == "cpu" else f"transport_{options.device}", rows))
        record(lines)
    show(lines)


if __name__ == "__main__":
    main()
