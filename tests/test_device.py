"""What `auto` means: where stages compute, how many share a card, how long a prefill step is, on which cards they would be."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest
import torch

from qsa import device
from qsa.commands import doctor
from qsa.config import EngineConfig, make_config
from qsa.device import local_cards, planned_device, prefill_chunk, settle, stage_cards, stages_per_card, why_not_cards
from qsa.errors import ConfigError

LISTED = "0, GPU-aa, NVIDIA H200, 140000, 143771\n1, GPU-bb, NVIDIA H200, 90000, 143771\n"


@pytest.fixture
def cards(monkeypatch, tmp_path):
    """A machine with so many cards, as far as this process can see."""

    def have(count: int, listed: str = LISTED, visible: str | None = None, capability: tuple[int, int] = (9, 0)) -> None:
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (7 << 20, 9 << 20))
        monkeypatch.setenv("CC", "cc")
        monkeypatch.setattr(device.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
        (tmp_path / "Python.h").touch()
        monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: SimpleNamespace(name=name))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

        def run(*args: object, **options: object) -> SimpleNamespace:
            if not listed:
                raise FileNotFoundError("nvidia-smi")
            return SimpleNamespace(stdout=listed)

        monkeypatch.setattr(subprocess, "run", run)

    return have


def test_auto_is_the_cpu_without_cards_and_nothing_else_changes(cards):
    cards(0)
    config = settle(EngineConfig())
    assert (config.pipeline.device, config.pipeline.gpus_per_stage, config.limits.prefill_chunk) == ("cpu", None, 512)
    assert planned_device(EngineConfig()) == "cpu"


def test_auto_is_cuda_where_everything_is_there(cards):
    cards(2)
    config = settle(EngineConfig())
    assert (config.pipeline.device, config.pipeline.gpus_per_stage, config.limits.prefill_chunk) == ("cuda", 1.0, 8192)
    assert settle(config) == config
    assert planned_device(make_config({"pipeline": {"device": "cpu"}})) == "cpu"


def test_what_is_missing_is_named(cards, monkeypatch, tmp_path):
    cards(1)
    (tmp_path / "Python.h").unlink()
    assert "python3-dev" in why_not_cards()
    monkeypatch.delenv("CC")
    monkeypatch.setattr(device.shutil, "which", lambda name: None)
    assert "C compiler" in why_not_cards()
    cards(1, capability=(7, 5))
    assert "7.5" in why_not_cards() and settle(EngineConfig()).pipeline.device == "cpu"
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: None)
    assert "triton" in why_not_cards() and settle(EngineConfig()).pipeline.device == "cpu"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "without CUDA" in why_not_cards()
    with pytest.raises(
        ConfigError, match=r"pipeline\.device is cuda, but this PyTorch is built without CUDA .*; set pipeline\.d"
    ):
        local_cards()


def test_stages_share_where_they_outnumber_the_cards(cards):
    for count, num_stages, share, each in ((1, 2, 0.5, 2), (2, 3, 0.5, 2), (1, 3, 0.3333, 3), (4, 2, 1.0, 1), (0, 2, 1.0, 1)):
        config = settle(make_config({"pipeline": {"num_stages": num_stages, "device": "cuda"}}), count)
        assert (config.pipeline.gpus_per_stage, stages_per_card(config)) == (share, each), (count, num_stages)


def test_what_is_configured_stays(cards):
    cards(2)
    config = settle(make_config({"limits": {"prefill_chunk": 1024}, "pipeline": {"gpus_per_stage": 0.5, "num_stages": 2}}))
    assert (prefill_chunk(config), config.pipeline.gpus_per_stage) == (1024, 0.5)
    thirds = settle(make_config({"pipeline": {"gpus_per_stage": 0.333333, "num_stages": 3}}))
    assert thirds.pipeline.gpus_per_stage == 0.3333 and settle(thirds) == thirds  # Ray refuses more places


def test_a_cluster_decides_for_its_stages(cards):
    cards(0)
    assert settle(EngineConfig(), num_cards=2).pipeline.device == "cuda"
    cards(2)
    assert settle(EngineConfig(), num_cards=0).pipeline.device == "cpu"


def test_the_driver_tells_what_is_free_on_the_visible_cards(cards):
    cards(2)
    assert [(card.free_bytes >> 20, card.total_bytes >> 20) for card in local_cards()] == [(140000, 143771), (90000, 143771)]
    cards(1, visible="1")
    assert [card.free_bytes >> 20 for card in local_cards()] == [90000]
    cards(1, visible="GPU-bb")
    assert [card.free_bytes >> 20 for card in local_cards()] == [90000]


@pytest.mark.parametrize("listed", ["", "no devices", LISTED], ids=["no tool", "nonsense", "another number"])
def test_without_the_drivers_list_the_cards_are_asked_themselves(cards, listed):
    cards(1, listed=listed)
    assert [card.free_bytes for card in local_cards()] == [7 << 20]


def test_every_stage_gets_a_card(cards):
    cards(2)
    assert [card.free_bytes >> 20 for card in stage_cards(EngineConfig())] == [140000, 90000]
    shared = stage_cards(make_config({"pipeline": {"num_stages": 4}}))
    assert [card.card for card in shared] == ["0", "0", "1", "1"]
    with pytest.raises(ConfigError, match=r"num_stages is 3 with 1 on a card, but this machine has 2"):
        stage_cards(make_config({"pipeline": {"num_stages": 3, "gpus_per_stage": 1}}))


@pytest.mark.parametrize(
    ("count", "settings", "found"),
    [
        (2, {}, [("gpu", "ok", "137 of 140 GiB free"), ("stages", "ok", "2 on 2 cards")]),
        (1, {}, [("gpu", "ok", "NVIDIA H200"), ("stages", "note", "2 on 1 card; --stages 1 is faster")]),
        (2, {"device": "cpu"}, [("gpu", "note", "not used, pipeline.device is cpu")]),
        (1, {"num_stages": 2, "gpus_per_stage": 1}, [("gpu", "ok", ""), ("stages", "fail", "this machine has 1")]),
        (0, {}, [("gpu", "note", "PyTorch finds no NVIDIA GPU: the engine computes on the CPU")]),
        (0, {"device": "cuda"}, [("gpu", "fail", "PyTorch finds no NVIDIA GPU: set pipeline.device to cpu")]),
    ],
)
def test_the_doctor_looks_at_the_cards(cards, count, settings, found):
    cards(count, listed="".join(LISTED.splitlines(True)[:count]))
    said = list(doctor.check_gpu(make_config({"pipeline": settings})))
    assert [(one.subject, one.state) for one in said] == [(subject, state) for subject, state, _ in found]
    assert all(words in one.text for one, (_, _, words) in zip(said, found, strict=True)), said


def test_a_busy_chunk_above_the_default_chunk_is_refused():
    config = make_config({"limits": {"busy_chunk": 4096}, "pipeline": {"device": "cpu"}})
    with pytest.raises(ConfigError, match=r"limits\.busy_chunk is 4096, but limits\.prefill_chunk is 512, its default on cpu"):
        settle(config)
    assert settle(make_config({"limits": {"busy_chunk": 256}, "pipeline": {"device": "cpu"}})).limits.busy_chunk == 256
