"""Calibration of code summaries: the closed form on keys whose answer is known, and the whole way on a tiny model."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from tiny_models import TinyModel, make_tiny_model

from qsa.errors import ConfigError
from qsa.kernels.registry import SparseConfig
from qsa.kernels.summaries.code import load_calibration
from qsa.model import calibrate as module
from qsa.model.batch import Segment
from qsa.model.build import build_stage
from qsa.model.calibrate import calibrate, query_moment, scan_intervals, solve_layer
from qsa.model.checkpoint.load import open_checkpoint, resolve_model

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "qsa" / "data" / "alice.txt").read_text(encoding="utf-8")


def product_error(
    queries: torch.Tensor, keys: torch.Tensor, project: torch.Tensor, query: torch.Tensor, mean: torch.Tensor
) -> float:
    """Mean squared error of q.k from int8 codes, up to a constant per query, as a share of its variance."""
    num_kv_heads, head_dim = keys.shape[1:]
    codes = ((keys.flatten(1) - mean) @ project).round().clamp(-127, 127)
    grouped = queries.view(len(queries), num_kv_heads, -1, head_dim)
    exact = torch.einsum("ngmd,tgd->ngmt", grouped, keys)
    directions = torch.einsum("ngmd,gdc->ngmc", grouped, query.view(num_kv_heads, head_dim, -1))
    centred = exact - exact.mean(-1, keepdim=True)
    got = directions @ codes.T
    return float((got - got.mean(-1, keepdim=True) - centred).square().mean() / centred.square().mean())


def test_keys_of_few_directions_are_scored_to_rounding(rng):
    """Joint keys of 3 heads that lie on 6 directions: 6 numbers say everything, 4 do not."""
    mixing = torch.randn(6, 3 * 16, generator=rng)
    keys = (torch.randn(2048, 6, generator=rng) @ mixing + 3.0).view(2048, 3, 16)
    queries = torch.randn(2048, 9, 16, generator=rng)
    assert product_error(queries, keys, *solve_layer(queries, keys, 0.25, 6)) < 1e-3
    assert product_error(queries, keys, *solve_layer(queries, keys, 0.25, 4)) > 1e-2


def test_directions_that_queries_use_win_over_those_with_larger_keys(rng):
    """Keys vary most where no query looks; principal components of the keys alone would spend the code there."""
    spread = torch.ones(32)
    spread[:16] = 6.0
    keys = torch.randn(2048, 1, 32, generator=rng) * spread
    queries = torch.randn(2048, 2, 32, generator=rng)
    queries[..., :16] *= 0.01
    found = product_error(queries, keys, *solve_layer(queries, keys, 0.1, 16))
    basis = torch.eye(32)[:, :16] * 5.0
    by_keys_alone = product_error(queries, keys, basis, basis / 25.0, keys.flatten(1).mean(0))
    assert found < 0.05 < 0.9 < by_keys_alone


def test_codes_use_the_range_of_int8(rng):
    keys, queries = torch.randn(4096, 2, 16, generator=rng), torch.randn(4096, 4, 16, generator=rng)
    project, _, mean = solve_layer(queries, keys, 0.25, 8)
    codes = (keys.flatten(1) - mean) @ project
    assert (codes.abs() > 127).float().mean() < 1e-3
    assert codes.abs().amax(0).min() > 100


def test_queries_that_look_at_their_window_have_no_weight(rng):
    """Query heads 0 and 1 find the latest key, heads 2 and 3 an old one: the moment is that of heads 2 and 3."""
    num_tokens = 2048
    keys = 0.01 * torch.randn(num_tokens, 2, 8, generator=rng)
    keys[1000, 1] = 40.0  # what head 1's queries look for
    queries = 0.01 * torch.randn(num_tokens, 4, 8, generator=rng)
    near = torch.arange(num_tokens) / num_tokens * 40.0
    keys[:, 0, 0] = near  # grows with position, so the last tokens win
    queries[:, :2, 0] = 40.0
    queries[:, 2:] = 1.0 + 0.1 * torch.randn(num_tokens, 2, 8, generator=rng)
    moment = query_moment(queries, keys, 1.0)
    late = queries[1512:, 2:].reshape(-1, 8).double()
    expected = late.T @ late / len(late)
    assert moment[:8, :8].abs().max() < 1e-3 * moment[8:, 8:].abs().max()
    assert moment[:8, 8:].abs().max() == 0.0
    share = moment[8:, 8:] / moment[8:, 8:].trace() - expected / expected.trace()
    assert share.abs().max() < 0.01


def test_layers_that_matter_scan_at_every_step():
    assert scan_intervals([0.1, 3.0, 0.0, 2.0, 0.2, 0.0, 0.0]) == (16, 1, 16, 4, 16, 16, 16)
    found = scan_intervals([float(layer) for layer in range(30)])
    assert found == (16,) * 21 + (4,) * 4 + (1,) * 5
    assert scan_intervals([0.0]) == (1,)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    recipe = TinyModel("qwen3", options={"head_dim": 16, "max_position_embeddings": 2048})
    return make_tiny_model(recipe, tmp_path_factory.mktemp("calibrate") / "tiny")


def test_a_model_is_calibrated_and_served_with_its_file(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 300)  # chunks that do not divide the text
    seen: dict[str, list[tuple[int, int]]] = {}
    out = tmp_path / "tiny.safetensors"
    calibration = calibrate(tiny, TEXT, out=out, progress=lambda what, done, of: seen.setdefault(what, []).append((done, of)))
    assert calibration.project.shape == (4, 32, 8)
    assert set(calibration.scan_every) == {1, 16}
    for steps in seen.values():
        assert [done for done, _ in steps] == sorted({done for done, _ in steps})
        assert steps[-1][0] == steps[-1][1]

    loaded = load_calibration(out, 1, 2)
    assert loaded.scan_every == calibration.scan_every
    torch.testing.assert_close(loaded.project, calibration.project[1:3], rtol=1e-3, atol=1e-3)

    small = SparseConfig(window_size=64, sink_size=16, block_size_fine=16, block_size_coarse=64, top_k_fine=2)
    with closing(open_checkpoint(str(tiny))) as checkpoint:
        model = build_stage(
            checkpoint,
            first_layer=0,
            last_layer=4,
            num_chunks=64,
            max_sequences=1,
            max_model_len=512,
            sparse={1: small},
            calibration_path=out,
        )
        model.attention.open(0, 1)
        ids = torch.tensor(checkpoint.tokenizer().encode(TEXT)[:400])
        model.forward([Segment(0, 0, 400, 1, True)], ids, None, [])
        logits = model.forward([Segment(0, 400, 401, 1, False)], ids[:1], None, [0])
        assert torch.isfinite(logits).all()
        model.close()


def test_calibration_is_reproducible(tiny, tmp_path):
    first = calibrate(tiny, TEXT, out=tmp_path / "a.safetensors", max_tokens=1500)
    second = calibrate(tiny, TEXT, out=tmp_path / "b.safetensors", max_tokens=1500)
    assert first.scan_every == second.scan_every
    assert torch.equal(first.project, second.project)


def test_what_cannot_be_calibrated_is_refused(tiny, tmp_path):
    with pytest.raises(ConfigError, match="at least 1344 tokens, found"):
        calibrate(tiny, "too short " * 20, out=tmp_path / "x.safetensors")
    with pytest.raises(ConfigError, match="code_dim is 33, but a layer's keys have 32 numbers"):
        calibrate(tiny, TEXT, out=tmp_path / "x.safetensors", code_dim=33)
    assert not (tmp_path / "x.safetensors").exists()


def test_the_default_models_file_is_shipped():
    model = resolve_model("default")
    calibration = load_calibration(ROOT / "model" / "data" / f"{model.name}.code.safetensors", 0, 30)
    assert calibration.project.shape == (30, 192, 24)
    assert calibration.query.shape == (30, 192, 24)
    often = {every: {layer for layer, one in enumerate(calibration.scan_every) if one == every} for every in (1, 4, 16)}
    assert [len(layers) for layers in often.values()] == [5, 4, 21]
    assert {7, 18, 20, 23} <= often[1]
