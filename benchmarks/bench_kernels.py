"""The Triton operators of the decode path at the reference shape, each checked first and timed inside CUDA graphs.

    python -m benchmarks.bench_kernels                 # table, results/kernels.csv, rows of results/summary.json
    python -m benchmarks.bench_kernels --tune          # tries launch parameters first and measures with the fastest

Reference shape: 28 query heads, 4 KV heads, head_dim 128, 8 sequences of 262144 tokens, K and V in float16, slices of 64,
4096 attended tokens a head. Four sets of queries, lists and codes take turns, so that nothing is timed out of the L2 cache.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import timing
from benchmarks.summary import Line, record, show
from qsa.kernels.block_select_ref import block_select_ref
from qsa.kernels.dense_attention_ref import dense_attention_ref
from qsa.kernels.kv_write_triton import CodeWrite
from qsa.kernels.registry import get_operator
from qsa.kernels.sparse_decode_ref import sparse_decode_ref
from qsa.kernels.summaries.code_ref import code_scan_ref, token_codes_ref
from qsa.kernels.summaries.code_triton import quantise_queries, scan_codes

BATCH, SEQ_LEN, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 262144, 28, 4, 128
SLICE, SINK, WINDOW, CODE_DIM = 64, 64, 512, 64
PAGE_SIZE = 512  # what a 1 MiB chunk holds
NUM_PAGES = SEQ_LEN // PAGE_SIZE
NUM_SLICES = SEQ_LEN // SLICE
SM_SCALE = HEAD_DIM**-0.5
SETS = 4
CHUNK_BYTES = 1 << 20
FAR_SLICES = {4096: (4096 - SINK - WINDOW) // SLICE, 8192: (8192 - SINK - WINDOW) // SLICE}  # by attended tokens
SIZES = dict(slice_size=SLICE, window_size=WINDOW)
PAGED = dict(kv_dtype=torch.float16, page_size=PAGE_SIZE)


@dataclass
class Inputs:
    """Random K and V in pages in random order, and `SETS` sets of everything else."""

    pool: torch.Tensor  # [chunks, num_kv_heads, 2, page_size, head_dim]
    pages: torch.Tensor  # [batch, num_pages], places in the pool
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    codes: list[torch.Tensor]  # int8 [batch * chunks a sequence, chunk bytes]
    code_tables: list[torch.Tensor]
    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    lists: dict[int, list[torch.Tensor]]  # by attended tokens
    project: torch.Tensor
    query: torch.Tensor

    def keys(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a sequence, [num_kv_heads, seq_len, head_dim]."""
        both = self.pool[self.pages[row]].permute(2, 1, 0, 3, 4).flatten(2, 3)
        return both[0], both[1]


def make_inputs() -> Inputs:
    torch.manual_seed(0)
    cuda: dict[str, Any] = dict(device="cuda")
    pool = torch.empty(BATCH * NUM_PAGES, NUM_KV_HEADS, 2, PAGE_SIZE, HEAD_DIM, dtype=torch.float16, **cuda)
    for part in pool.split(256):
        part.normal_()
    pages = torch.randperm(len(pool), **cuda).view(BATCH, NUM_PAGES)
    num_chunks = SEQ_LEN * CODE_DIM // CHUNK_BYTES
    codes, tables = [], []
    for _ in range(SETS):
        codes.append(torch.randint(-127, 128, (BATCH * num_chunks, CHUNK_BYTES), dtype=torch.int8, **cuda))
        order = torch.randperm(len(codes[-1]), **cuda).view(BATCH, num_chunks)
        tables.append(codes[-1].data_ptr() + order * CHUNK_BYTES)
    last = (SEQ_LEN - WINDOW) // SLICE
    lists = {}
    for tokens, count in FAR_SLICES.items():
        chosen = [torch.rand(BATCH, NUM_KV_HEADS, last - 1, **cuda).argsort(-1)[..., :count] + 1 for _ in range(SETS)]
        lists[tokens] = [one.sort(-1).values.int() for one in chosen]
    heads = [torch.randn(BATCH, NUM_Q_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM, **cuda).half() for _ in range(SETS)]
    q, k, v = zip(*(one.split((NUM_Q_HEADS, NUM_KV_HEADS, NUM_KV_HEADS), 1) for one in heads))
    return Inputs(
        pool,
        pages,
        pool.data_ptr() + pages * pool[0].nbytes,
        torch.full((BATCH,), SEQ_LEN, dtype=torch.int32, **cuda),
        codes,
        tables,
        list(q),
        list(k),
        list(v),
        lists,
        torch.randn(NUM_KV_HEADS * HEAD_DIM, CODE_DIM, **cuda) * 2,
        torch.randn(NUM_KV_HEADS, HEAD_DIM, CODE_DIM, **cuda) * 0.004,  # scores of a few nats
    )


class Operators:
    """The operators under their names, called on one of the sets."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self._kv_write = get_operator("kv_write", "triton").forward
        self._block_select = get_operator("block_select", "triton").forward
        self._sparse_decode = get_operator("sparse_decode", "triton").forward
        self._dense_decode = get_operator("dense_attention", "triton").forward
        self._bias = torch.zeros(CODE_DIM, device="cuda")
        self.launch: dict[str, dict[str, int]] = {name: {} for name in LAUNCHES}  # parameters in place of the defaults
        self.numbers = [quantise_queries(q, inputs.query) for q in inputs.q]
        self.scores = [self.scan(one) for one in range(SETS)]

    def kv_write(self, one: int) -> None:
        code = CodeWrite(self.inputs.project, self._bias, self.inputs.code_tables[one], SLICE)
        self._kv_write(self.inputs.k[one], self.inputs.v[one], self.inputs.page_table, self.inputs.seq_lens, code=code, **PAGED)

    def quantise(self, one: int) -> tuple[torch.Tensor, torch.Tensor]:
        return quantise_queries(self.inputs.q[one], self.inputs.query)

    def scan(self, one: int, numbers: tuple[torch.Tensor, torch.Tensor] | None = None) -> torch.Tensor:
        return scan_codes(
            *(numbers or self.numbers[one]),
            self.inputs.code_tables[one],
            self.inputs.seq_lens,
            max_slices=NUM_SLICES,
            sink_size=SINK,
            sm_scale=SM_SCALE,
            **SIZES,
            **self.launch["scan"],
        )

    def select(self, one: int, count: int = FAR_SLICES[4096], scores: torch.Tensor | None = None) -> torch.Tensor:
        scores = self.scores[one] if scores is None else scores
        sizes: dict[str, Any] = dict(num_kv_heads=NUM_KV_HEADS, **SIZES, **self.launch["select"])
        indices: torch.Tensor = self._block_select(scores, self.inputs.seq_lens, count, **sizes)[0]
        return indices

    def sparse(self, one: int, tokens: int = 4096, lists: torch.Tensor | None = None) -> torch.Tensor:
        lists = self.inputs.lists[tokens][one] if lists is None else lists
        sizes: dict[str, Any] = dict(num_kv_heads=NUM_KV_HEADS, sink_size=SINK, sm_scale=SM_SCALE, **SIZES, **PAGED)
        sizes.update(self.launch["sparse"])
        out: torch.Tensor = self._sparse_decode(
            self.inputs.q[one], self.inputs.page_table, self.inputs.seq_lens, lists, **sizes
        )
        return out

    def dense(self, one: int) -> torch.Tensor:
        sizes: dict[str, Any] = dict(num_kv_heads=NUM_KV_HEADS, sm_scale=SM_SCALE, **PAGED, **self.launch["dense"])
        out: torch.Tensor = self._dense_decode(self.inputs.q[one], self.inputs.page_table, self.inputs.seq_lens, **sizes)
        return out

    def layer(self, one: int, tokens: int = 4096, scans: bool = True) -> torch.Tensor:
        """What a decode step does in one layer, without an exact second choice."""
        self.kv_write(one)
        if not scans:
            return self.sparse(one, tokens)
        return self.sparse(one, lists=self.select(one, FAR_SLICES[tokens], self.scan(one, self.quantise(one))))


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert torch.isfinite(got).all()
    return float((got.double() - want).norm() / want.norm())


def check(ops: Operators) -> Iterator[str]:
    """Compare every operator at the full shape with its reference in float64, on two sequences."""
    inputs = ops.inputs
    ops.kv_write(0)
    dense, sparse = ops.dense(0), {tokens: ops.sparse(0, tokens) for tokens in FAR_SLICES}
    for row in (0, BATCH - 1):
        k, v = inputs.keys(row)
        assert torch.equal(k[:, -1], inputs.k[0][row]) and torch.equal(v[:, -1], inputs.v[0][row])
        k, v, q = k.double(), v.double(), inputs.q[0][row].double()
        with torch.device("cuda"):
            want = torch.cat([
                dense_attention_ref(q[None, 7 * h : 7 * h + 7], k[h : h + 1], v[h : h + 1], SM_SCALE, SEQ_LEN - 1)[0]
                for h in range(NUM_KV_HEADS)
            ])  # fmt: skip
        errors = {"dense": relative_error(dense[row], want)}
        for tokens in FAR_SLICES:
            pool = inputs.lists[tokens][0][row].long()
            sizes = dict(slice_size=SLICE, sink_size=SINK, window_size=WINDOW)
            want = sparse_decode_ref(q, k, v, pool.cpu(), top_k=pool.shape[1], sm_scale=SM_SCALE, **sizes)[0]
            errors[f"sparse {tokens}"] = relative_error(sparse[tokens][row], want)
        assert max(errors.values()) < 2e-3, errors
        del k, v
        yield f"row {row}: relative error " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
        places = (inputs.code_tables[0][row] - inputs.codes[0].data_ptr()) // CHUNK_BYTES
        codes = inputs.codes[0][places].view(SEQ_LEN, CODE_DIM)
        exact = token_codes_ref(
            inputs.k[0][row].double().flatten()[None], torch.zeros((), device="cuda"), inputs.project.double()
        )
        assert (codes[-1].double() - exact[0]).abs().max() <= 0.501
        numbers, scales = (part[row] for part in ops.numbers[0])
        last = SEQ_LEN - WINDOW
        scores = code_scan_ref(numbers.double(), scales.double() * SM_SCALE, codes.double(), SLICE, SINK, last)
        seen = scores > -torch.inf
        torch.testing.assert_close(ops.scores[0][row, :, : last // SLICE].double()[seen], scores[seen], rtol=1e-6, atol=0)
        want_lists = block_select_ref(scores.cpu().view(1, NUM_KV_HEADS, -1, last // SLICE), FAR_SLICES[4096])[0]
        same = float((ops.select(0)[row].cpu() == want_lists).float().mean())
        assert same == 1, f"{1 - same:.4f} of the list differs from the reference"
    yield "codes, scan and selection equal the reference"


def time_graph(call: Callable[[int], object], repeat: int = 2, replays: int = 30) -> timing.Timing:
    """Microseconds a call, in a CUDA graph that calls every set `repeat` times."""
    for one in range(SETS):
        call(one)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeat):
            for one in range(SETS):
                call(one)
    runs = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        runs.append(begin.elapsed_time(end) * 1e3 / (repeat * SETS))
    return timing.timing_of(runs[replays // 5 :])


def copy_rate() -> float:
    """GB/s of a device copy, read and write counted."""
    source, target = torch.randn(2, 1 << 28, device="cuda").unbind()
    runs = []
    for _ in range(10):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        runs.append(begin.elapsed_time(end))
    return 2 * source.nbytes / statistics.median(runs) / 1e6


LAUNCHES: dict[str, list[dict[str, int]]] = {
    "dense": [
        dict(num_splits=splits, block_n=block, num_stages=3, num_warps=4) for block in (64, 128) for splits in (16, 32, 64)
    ],
    "sparse": [
        dict(num_splits=splits, num_stages=stages, num_warps=warps)
        for stages, warps in ((1, 4), (2, 4), (3, 4), (2, 2))
        for splits in (8, 13, 16, 22, 33)
    ],
    "scan": [
        dict(block_s=block, tiles=tiles, num_stages=stages, num_warps=4)
        for block, tiles, stages in ((2, 4, 3), (2, 16, 4), (4, 4, 3), (4, 1, 1), (1, 16, 4), (4, 16, 3))
    ],
    "select": [dict(num_warps=warps) for warps in (8, 16)],
}


def tune(ops: Operators) -> None:
    """Try launch parameters in turn and keep the fastest of each operator."""
    for name, launches in LAUNCHES.items():
        found: list[tuple[float, dict[str, int]]] = []
        for launch in launches:
            ops.launch[name] = launch
            try:
                time = time_graph(lambda one, name=name: getattr(ops, name)(one), repeat=1, replays=15).median
            except Exception as error:  # too much shared memory, say: the next one may fit
                print(name, launch, f"{type(error).__name__}: {str(error)[:100]}", flush=True)
                continue
            found.append((time, launch))
            print(f"{name:8} {time:8.1f} us  {launch}", flush=True)
        ops.launch[name] = min(found, key=lambda pair: pair[0])[1]
    print(f"fastest: {ops.launch}", flush=True)


def measure(ops: Operators) -> tuple[list[dict[str, object]], list[Line]]:
    kv_bytes = 2 * NUM_KV_HEADS * HEAD_DIM * 2 * BATCH
    cases: list[tuple[str, str, Callable[[int], object], int]] = [  # name, whose launch parameters, call, bytes read
        ("dense_decode", "dense", ops.dense, kv_bytes * SEQ_LEN),
        ("sparse_decode_4096", "sparse", lambda one: ops.sparse(one, 4096), kv_bytes * 4096),
        ("sparse_decode_8192", "sparse", lambda one: ops.sparse(one, 8192), kv_bytes * 8192),
        ("code_query", "", ops.quantise, 0),
        ("code_scan_64", "scan", ops.scan, BATCH * (SEQ_LEN - WINDOW) * CODE_DIM),
        ("block_select", "select", ops.select, BATCH * NUM_Q_HEADS * NUM_SLICES * 4),
        ("kv_write", "", ops.kv_write, 0),
        ("layer_scan_4096", "", lambda one: ops.layer(one, 4096), 0),
        ("layer_kept_list_4096", "", lambda one: ops.layer(one, 4096, scans=False), 0),
        ("layer_scan_8192", "", lambda one: ops.layer(one, 8192), 0),
        ("layer_kept_list_8192", "", lambda one: ops.layer(one, 8192, scans=False), 0),
    ]
    rate = copy_rate()
    rows: list[dict[str, object]] = [{"operator": "device_copy", "gb_per_s": rate}]
    us: dict[str, float] = {}
    for name, kind, call, read in cases:
        time = time_graph(call)
        us[name] = time.median
        gb_per_s = read / time.median / 1e3 if read else ""
        launch = ops.launch.get(kind, {})
        row = {"operator": name, "median_us": time.median, "spread": time.spread, "gb_per_s": gb_per_s}
        rows.append({**row, "launch": " ".join(f"{key}={value}" for key, value in launch.items())})
        print(f"{name:24} {time.median:9.2f} us  spread {time.spread:5.1%}  {gb_per_s and f'{gb_per_s:7.0f} GB/s'}", flush=True)
    lines = [
        Line("operators.copy_gb_per_s", rate, "GB/s"),
        Line("operators.dense_decode", us["dense_decode"], "us"),
        Line("operators.dense_decode_of_copy", kv_bytes * SEQ_LEN / us["dense_decode"] / 1e3 / rate, "share", ">= 0.9"),
        Line("operators.sparse_decode_4096", us["sparse_decode_4096"], "us"),
        Line("operators.sparse_decode_8192", us["sparse_decode_8192"], "us"),
        Line("operators.code_scan_64_bytes", us["code_query"] + us["code_scan_64"], "us"),
        Line("operators.block_select_decode", us["block_select"], "us"),
        Line("operators.kv_write_with_code", us["kv_write"], "us"),
    ]
    for tokens in FAR_SLICES:
        scan, kept = us[f"layer_scan_{tokens}"], us[f"layer_kept_list_{tokens}"]
        lines += [
            Line(f"operators.layer_no_rerank_{tokens}_scan_every_step", scan, "us"),
            Line(f"operators.layer_no_rerank_{tokens}_kept_list", kept, "us"),
            Line(f"operators.layer_no_rerank_{tokens}_dense_over_scan_every_step", us["dense_decode"] / scan, "x"),
        ]
    return rows, lines


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="try launch parameters first")
    parser.add_argument("--commit", help="of this checkout, where it was copied without its git folder")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    if options.commit:
        timing.copied_from(options.commit)
    ops = Operators(make_inputs())
    for line in check(ops):
        print(line, flush=True)
    if options.tune:
        tune(ops)
        for line in check(ops):
            print(line, flush=True)
    rows, lines = measure(ops)
    print(timing.write_csv("kernels", rows))
    record(lines)
    show(lines)


if __name__ == "__main__":
    main()
