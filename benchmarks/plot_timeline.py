"""The figure of a pipeline's timeline: what two stages compute and wait for, from a trace of `qsa bench pipeline`.

    qsa bench pipeline --trace trace.json && python -m benchmarks.plot_timeline trace.json

Without --at the figure is cut out around a chunk of a prompt that is computed while two lanes decode.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.drawing import load_pyplot
from qsa.actors.stage_clock import BUSY, Span
from qsa.trace import Interval, Trace, name_waits, read_trace

FIGURES = Path(__file__).resolve().parent / "figures"
LANES = ("#0b5fa5", "#5aa9e6")
CHUNK, TRANSFER, WAIT = "#c77700", "#6b4ba3", "#d9d9d9"
LEAST_LABEL = 0.022  # share of the figure's width that a bar with a number in it must have


def choose_window(trace: Trace, num_rounds: int) -> Interval:
    """Around a chunk on the last stage, late among those that are computed beside decode steps; so many rounds of each side.

    Raises:
        ValueError: the trace has no chunk beside decode steps of the first stage.
    """
    steps = sorted((span for span in trace[0] if span.kind == "compute"), key=lambda span: span.begin_s)
    chunks = [span for span in trace[-1] if span.kind == "chunk"]
    beside = [c for c in chunks if any(s.end_s <= c.begin_s for s in steps) and any(s.begin_s >= c.end_s for s in steps)]
    if not beside:
        raise ValueError("the trace has no chunk of a prompt between decode steps; trace a run of both")
    chunk = beside[len(beside) * 3 // 4]
    lanes = len({span.lane for span in steps})
    before = [span for span in steps if span.begin_s < chunk.begin_s][-num_rounds * lanes :]
    after = [span for span in steps if span.begin_s >= chunk.end_s][: num_rounds * lanes]
    return before[0].begin_s, after[-1].end_s


def plot_timeline(trace: Trace, window: Interval, path: Path = FIGURES / "timeline.png") -> Path:
    """Two rows a stage: computing, a colour a lane, and beneath it transfers and waits."""
    plt = load_pyplot()
    from matplotlib.patches import Patch  # noqa: PLC0415  only this figure needs it

    begin, end = window
    width_ms = (end - begin) * 1e3
    figure, axes = plt.subplots(figsize=(11, 1.1 + 1.1 * len(trace)), layout="constrained")
    for stage, spans in enumerate(trace):
        top = -1.5 * stage
        for span in name_waits(spans):
            if span.end_s <= begin or span.begin_s >= end:
                continue
            left = max(0.0, (span.begin_s - begin) * 1e3)
            length = min(width_ms, (span.end_s - begin) * 1e3) - left
            if span.kind in BUSY:
                axes.barh(top, length, left=left, height=0.62, color=_colour(span), edgecolor="white", linewidth=0.6)
                _label(axes, span, left, length, top, width_ms)
            else:
                axes.barh(top - 0.47, length, left=left, height=0.2, color=_colour(span), linewidth=0)
    lanes = sorted({span.lane for spans in trace for span in spans if span.kind == "compute"})
    legend = [Patch(color=LANES[lane % len(LANES)], label=f"decode, lane {lane}") for lane in lanes]
    legend += [
        Patch(color=CHUNK, label="chunk of a prompt"),
        Patch(color=TRANSFER, label="transfer"),
        Patch(color=WAIT, label="wait"),
    ]
    axes.set_yticks([-1.5 * stage for stage in range(len(trace))], [f"stage {stage}" for stage in range(len(trace))])
    axes.set_xlim(0, width_ms)
    axes.set_xlabel("milliseconds")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.legend(handles=legend, fontsize=8, ncols=len(legend), loc="outside upper center", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _colour(span: Span) -> str:
    if span.kind == "chunk":
        return CHUNK
    if span.kind in BUSY:
        return LANES[span.lane % len(LANES)]
    return WAIT if span.kind == "wait" else TRANSFER


def _label(axes: Any, span: Span, left: float, length: float, top: float, width_ms: float) -> None:
    if length < LEAST_LABEL * width_ms:
        return
    text = f"chunk {span.step}" if span.kind == "chunk" and length > 3 * LEAST_LABEL * width_ms else str(span.step)
    axes.text(left + length / 2, top, text, ha="center", va="center", color="white", fontsize=7)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", help="a file of `qsa bench pipeline --trace`")
    parser.add_argument("--at", type=float, nargs=2, metavar=("BEGIN", "END"), help="milliseconds since the trace's begin")
    parser.add_argument("--rounds", type=int, default=4, help="of decoding on either side of the chunk")
    parser.add_argument("--output", type=Path, default=FIGURES / "timeline.png")
    args = parser.parse_args(arguments)
    trace = read_trace(args.trace)
    window = (args.at[0] / 1e3, args.at[1] / 1e3) if args.at else choose_window(trace, args.rounds)
    print("written:", plot_timeline(trace, window, args.output))


if __name__ == "__main__":
    main()
