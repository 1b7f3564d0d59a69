"""The configuration tree: what is refused and how it says so, what lies over what, and that every field is read somewhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from qsa.config import CacheConfig, EngineConfig, FrozenModel, LimitsConfig, SparseSettings, load_config, make_config
from qsa.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
READERS = ["kernels", "memory", "model", "scheduler", "actors", "serve_app", "qsa/commands"]


def fields_of(model: type[BaseModel], section: str = "") -> Iterator[tuple[str, str]]:
    """(section, field) of every leaf; the section is the attribute that holds it."""
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, FrozenModel):
            yield from fields_of(inner, name)
        elif name != "sparse":
            yield section, name


def reads() -> set[tuple[str, str]]:
    """Every `a.b` in the code as (last part of a, b)."""
    found = set()
    files = [path for folder in READERS for path in (ROOT / folder).rglob("*.py")] + [*(ROOT / "qsa").glob("*.py")]
    for path in files:
        if path.name == "config.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                holder = node.value
                name = holder.attr if isinstance(holder, ast.Attribute) else holder.id if isinstance(holder, ast.Name) else ""
                found.add((name.lstrip("_"), node.attr))
    return found


def test_every_field_is_read_somewhere():
    found = reads()
    unread = [f"{section}.{name}" for section, name in fields_of(EngineConfig) if section and (section, name) not in found]
    unread += [name for section, name in fields_of(EngineConfig) if not section and not any(read == name for _, read in found)]
    names = {name for _, name in found}
    names |= {"preset", "candidate_factor_rare"}  # they become other fields, see below
    unread += [f"sparse.{name}" for name in SparseSettings.model_fields if name not in names]
    assert not unread, f"nobody reads {', '.join(unread)}: take the field away, or use it as section.field"


def test_every_field_says_what_it_is():
    models = [EngineConfig, SparseSettings, *(f.annotation for f in EngineConfig.model_fields.values())]
    silent = [
        f"{model.__name__}.{name}"
        for model in models
        if isinstance(model, type) and issubclass(model, FrozenModel)
        for name, field in model.model_fields.items()
        if not field.description and not (isinstance(field.annotation, type) and issubclass(field.annotation, FrozenModel))
    ]
    assert not silent, f"no description: {', '.join(silent)}"


def test_built_in_configurations_are_valid_operators():
    for settings in EngineConfig().sparse.values():
        for calibrated in (False, True):
            resolved = settings.resolve(calibrated, scan_every=None)
            assert resolved.summary == ("code" if calibrated else "sketch")


def test_code_without_a_calibration_is_refused_by_name():
    with pytest.raises(ConfigError, match="qsa calibrate"):
        SparseSettings(summary="code").resolve(calibrated=False, scan_every=None)


def test_scan_intervals_come_from_the_calibration_when_auto():
    settings = SparseSettings(reselect_every="auto")
    assert settings.resolve(True, (1, 16)).reselect_every == (1, 16)
    assert settings.resolve(False, None).reselect_every == 1


def test_a_preset_fills_in_what_is_not_given():
    fast = SparseSettings(preset="fast")
    assert (fast.candidate_factor, fast.candidate_factor_rare) == (3, 1)
    assert SparseSettings(preset="fast", candidate_factor=5).resolve(True, (1, 16, 4)).candidate_factor == (5, 1, 5)
    assert SparseSettings(preset="quality").resolve(True, (1, 16)) == SparseSettings().resolve(True, (1, 16))
    config = make_config({"sparse": {2: {"preset": "balanced", "top_k_fine": 55}}})
    resolved = config.sparse[2].resolve(True, (16, 1))
    assert (resolved.candidate_factor, resolved.top_k_fine) == ((2, 4), 55)
    assert [resolved.pool_size(layer) for layer in (0, 1)] == [110, 220]
    assert make_config(yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json")))) == config
    with pytest.raises(ConfigError, match="preset"):
        make_config({"sparse": {2: {"preset": "faster"}}})


@pytest.mark.parametrize("scan_every", [None, (1, 1, 1)])
def test_layers_that_scan_alike_propose_alike(scan_every):
    """Without a calibration, or where all layers scan at every step, none is one that scans rarely."""
    resolved = SparseSettings(preset="balanced").resolve(scan_every is not None, scan_every)
    assert {resolved.pool_size(layer) for layer in range(3)} == {64}


def test_one_factor_a_layer_leaves_nothing_of_the_presets():
    settings = make_config({"sparse": {1: {"preset": "fast", "candidate_factor": [2, 3]}}}).sparse[1]
    assert settings.candidate_factor == (2, 3) and settings.candidate_factor_rare is None


def test_sparse_entries_lie_over_the_built_in_ones():
    config = make_config({"sparse": {"7": {"window_size": 256}}, "default_sparse_id": 7})
    assert sorted(config.sparse) == [0, 1, 7]
    assert config.sparse[7].window_size == 256 and config.sparse[0].dense


def test_a_configuration_survives_its_own_yaml():
    config = make_config({"sparse": {3: {"reselect_every": [1, 2]}}, "pipeline": {"split": [10, 20]}})
    assert make_config(yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json")))) == config


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"limits": {"max_sequence": 4}}, ["limits.max_sequence", "did you mean max_sequences"]),  # misspelt
        ({"limits": {"max_sequences": 0}}, ["limits.max_sequences", "0"]),
        ({"limits": {"prefill_chunk": 100}}, ["prefill_chunk", "multiple of 64", "100"]),
        ({"cache": {"device_bytes": 1000}}, ["device_bytes", "multiple of 1 MiB, such as 1048576", "1000"]),
        ({"cache": {"device_bytes": "2GB"}}, ["cache.device_bytes: wants", "bytes, such as 1073741824 for 1 GiB", "'2GB'"]),
        ({"server": {"port": 70000}}, ["server.port", "70000"]),
        ({"sparse": {0: {"dense": False}}}, ["sparse.0"]),
        ({"default_sparse_id": 9}, ["default_sparse_id is 9", "[0, 1]"]),
        ({"pipeline": {"split": [30], "num_stages": 2}}, ["pipeline.split has 1", "num_stages is 2"]),
        ({"model": 3}, ["model", "3"]),
        ({"sparse": [1]}, ["sparse"]),
        ({"sparse": {1: {"candidate_factor": "x"}}}, ["sparse.1.candidate_factor: wants a whole number or a list", "'x'"]),
        ({"sparse": {1: {"reselect_every": "x"}}}, ["sparse.1.reselect_every: wants", "or auto, got 'x'"]),
        (
            {"sparse": {1: {"candidate_factor": [2], "candidate_factor_rare": 1}}},
            ["sparse.1: candidate_factor has", "drop one"],
        ),
        ({"pipeline": {"gpus_per_stage": 1e-5}}, ["pipeline.gpus_per_stage", "1e-05"]),
    ],
)
def test_wrong_settings_are_named_in_one_line(values, words):
    with pytest.raises(ConfigError) as caught:
        make_config(values)
    message = str(caught.value)
    assert "\n" not in message
    assert not [word for word in words if word not in message], message


def test_two_wrong_settings_are_both_named():
    with pytest.raises(ConfigError, match=r"server.port.*; limits.max_waiting|limits.max_waiting.*; server.port"):
        make_config({"server": {"port": 0}, "limits": {"max_waiting": -1}})


def test_nothing_changes_after_validation():
    config = EngineConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.limits.max_sequences = 3
    assert LimitsConfig().max_sequences == 8 and CacheConfig().device_bytes is None


def test_overrides_lie_over_the_file(tmp_path):
    path = tmp_path / "qsa.yaml"
    path.write_text("limits:\n  max_sequences: 4\n  max_waiting: 2\nmodel:\n")
    overrides = {"limits.max_sequences": 6, "sparse.1.window_size": 256, "sparse.5.dense": True}
    config = load_config(path, overrides)
    assert (config.limits.max_sequences, config.limits.max_waiting) == (6, 2)
    assert config.sparse[1].window_size == 256 and config.sparse[5].dense
    assert load_config(None).limits.max_sequences == 8


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["cannot read", "No such file"]),
        ("limits: [", ["not YAML"]),
        ("- 1\n- 2\n", ["must hold a mapping", "list"]),
    ],
)
def test_a_bad_file_is_named(tmp_path, content, words):
    path = tmp_path / "bad.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert not [word for word in [*words, "bad.yaml"] if word not in str(caught.value)], str(caught.value)


def test_an_override_below_a_single_value_is_refused():
    with pytest.raises(ConfigError, match="port is a single value"):
        load_config(None, {"server.port": 1, "server.port.x": 2})


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"pipeline": {"start_timeout_s": float("inf")}}, "pipeline.start_timeout_s"),
        ({"pipeline": {"cpus_per_stage": float("inf")}}, "pipeline.cpus_per_stage"),
        ({"server": {"api_keys": ["good", ""]}}, "server.api_keys"),
        ({"model": {"max_model_len": 1}}, "model.max_model_len"),
    ],
)
def test_values_that_would_fail_later_are_refused(values, name):
    with pytest.raises(ConfigError, match=name):
        make_config(values)


def test_a_file_that_is_not_text_is_named(tmp_path):
    path = tmp_path / "qsa.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"qsa\.yaml is not UTF-8 text"):
        load_config(path)


@pytest.mark.parametrize(
    "setting",
    [{"block_size_fine": 7}, {"reselect_every": 0}, {"sink_size": 100}, {"candidate_factor": []}, {"reselect_every": []}],
)
def test_a_sparse_configuration_that_cannot_be_is_a_configuration_error(setting):
    name = next(iter(setting))
    with pytest.raises(ConfigError, match=f"sparse.{name}"):
        make_config({"sparse": {1: setting}}).sparse[1].resolve(calibrated=False, scan_every=None)
