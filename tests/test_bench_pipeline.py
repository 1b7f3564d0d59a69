"""`qsa bench pipeline`: arguments, phases on an engine of a test's own, the table and the file."""

import asyncio
import time
from types import SimpleNamespace

import pytest
from engine_helpers import scripted_config
from scripted_stage import build_scripted

from qsa import cli
from qsa.actors.engine import Engine
from qsa.actors.stage_clock import Span, StageClock
from qsa.commands import bench_pipeline
from qsa.engine_pace import Arrivals
from qsa.errors import ConfigError, EngineDeadError
from qsa.scheduler.request import FinishReason
from qsa.trace import read_trace, stage_share

STEP_S, CHUNK_S = 0.002, 0.01


class FakeEngine:
    """Two stages that note a chunk for every 100 tokens of a prompt and a step for every token."""

    max_model_len = longest_sequence = 4096
    tokenizer = SimpleNamespace(encode=lambda text: list(range(500)))

    def __init__(self, finish=FinishReason.LENGTH):
        self.clocks = [StageClock(), StageClock()]
        self.finish = finish

    async def generate(self, prompt, sampling, *, sparse_id=None):
        for step in range(-(-len(prompt) // 100)):
            await self._step("chunk", step, CHUNK_S)
        for number in range(sampling.max_tokens):
            await self._step("compute", number, STEP_S)
            is_last = number + 1 == sampling.max_tokens
            yield SimpleNamespace(tokens=(number,), finish_reason=self.finish if is_last else None, error=None)

    async def _step(self, kind, step, seconds):
        now = time.time()
        for stage, clock in enumerate(self.clocks):
            clock.add(kind, 0, step, now + stage * seconds, now + (stage + 1) * seconds)
        await asyncio.sleep(seconds)

    async def start_trace(self):
        for clock in self.clocks:
            clock.start_trace()

    async def take_trace(self) -> list[list[Span]]:
        return [clock.take_trace() for clock in self.clocks]


def test_phases_have_their_windows_and_all_spans_are_kept():
    found = asyncio.run(bench_pipeline.measure(FakeEngine(), 1000, 3, 20, None))

    assert [name for name, _ in found.phases] == ["prefill", "decode", "both"]
    (_, prefill), (_, decode), (_, both) = found.phases
    assert prefill[1] <= decode[0] < decode[1] <= both[0] < both[1]
    assert prefill[1] - prefill[0] == pytest.approx(11 * CHUNK_S, rel=0.5)
    chunks = [sum(span.kind == "chunk" for span in spans) for spans in found.stages]
    assert chunks == [10 + 3 * 2 + 3 * 2 + 10] * 2
    assert [prompt[:2] for prompt in (found.prompt(0, 600), found.prompt(1, 600))] == [[0, 1], [37, 38]]
    assert len(found.prompt(3, 1700)) == 1700


def test_a_stream_that_does_not_reach_its_length_ends_the_measurement():
    with pytest.raises(EngineDeadError, match="ended by error"):
        asyncio.run(bench_pipeline.measure(FakeEngine(FinishReason.ERROR), 100, 1, 2, None))


def test_a_stream_that_ends_before_the_measurement_is_an_error(monkeypatch):
    monkeypatch.setattr(bench_pipeline, "STREAM_TOKENS", 3)
    with pytest.raises(EngineDeadError, match="let it generate more"):
        asyncio.run(bench_pipeline.measure(FakeEngine(), 100, 2, 4, None))


def test_gaps_are_those_of_a_time():
    arrivals = Arrivals(1.0, [2.0, 2.5, 4.0, 4.25])
    assert arrivals.first_token_s == 1.0
    assert arrivals.gaps_ms() == [500, 1500, 250]
    assert arrivals.gaps_ms(2.5, 4.0) == [500]


def test_the_command_prints_a_table_and_writes_the_trace(monkeypatch, tmp_path, capsys):
    def measured(config, args, length):
        return asyncio.run(bench_pipeline.measure(FakeEngine(), length, args.streams, args.tokens, None)), [
            "layers 0 to 1",
            "layers 2 to 3",
        ]

    monkeypatch.setattr(bench_pipeline, "measure_engine", measured)
    path = tmp_path / "out.json"
    assert cli.main(["bench", "pipeline", "--context", "300", "--streams", "2", "--tokens", "4", "--trace", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["phase", "stage", "time", "busy", "transfer", "wait", "idle"]
    assert [line.split()[:2] for line in lines[1:7]] == [[p, s] for p in ("prefill", "decode", "both") for s in "01"]
    assert "perfetto" in lines[7]
    assert len(read_trace(path)) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--context", "12,34"], "reads one prompt"),
        (["--url", "http://127.0.0.1:1"], "drop --url"),
        (["--tokens", "1"], "--tokens must be"),
        (["--streams", "0"], "--streams"),
        (["--trace", "/nowhere/out.json"], "no such folder"),
    ],
)
def test_options_that_do_not_go_together(options, words):
    args = cli.build_parser().parse_args(["bench", "pipeline", *options])
    with pytest.raises(ConfigError, match=words):
        bench_pipeline.check(args)


def test_a_trace_is_for_the_pipeline(capsys):
    assert cli.main(["bench", "--trace", "out.json"]) == 2
    assert "qsa bench pipeline" in capsys.readouterr().err


@pytest.mark.ray
def test_stages_of_an_engine_tell_what_they_did(ray_driver, monkeypatch):
    monkeypatch.setattr(bench_pipeline, "QUIET_S", 0.05)
    with Engine.start(scripted_config(cache={"device_bytes": 1 << 30}), name="test/traced", build=build_scripted) as engine:
        found = asyncio.run(bench_pipeline.measure(engine, 500, 3, 400, None))

    assert [name for name, _ in found.phases] == ["prefill", "decode", "both"]
    assert len(found.stages) == 2
    for spans in found.stages:
        assert {span.kind for span in spans} >= {"chunk", "compute", "wait", "send"}
        assert {span.lane for span in spans if span.kind == "compute"} == {0, 1}
        assert all(span.begin_s <= span.end_s for span in spans)
    for number, (phase, window) in enumerate(found.phases):
        shares = [stage_share(spans, window) for spans in found.stages]
        assert all(share.busy > 0 for share in shares), (number, phase, shares)
