"""Files that Ray reads: cluster definitions and the Serve config pass Ray's own validation and say what they shall."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import yaml
from jsonschema import ValidationError
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import ServeDeploySchema

from qsa.config import EngineConfig
from qsa.errors import ConfigError
from qsa.serve_app.app import EngineReplica, config_from_args, make_app

ROOT = Path(__file__).resolve().parents[2]
CLUSTERS = ["cluster.yaml", "cluster.local.yaml"]


def load(name: str) -> dict:
    return yaml.safe_load((ROOT / name).read_text())


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_passes_rays_validation(name):
    validate_config(prepare_config(load(name)))


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_validation_would_notice(name):
    wrong = copy.deepcopy(load(name)) | {"idle_timeout": 5}
    with pytest.raises(ValidationError):
        validate_config(prepare_config(wrong))


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_uses_the_token_and_keeps_the_dashboard_to_itself(name):
    config = load(name)
    commands = [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]
    assert all("RAY_AUTH_MODE=token" in command for command in commands)
    assert any("--dashboard-host=127.0.0.1" in command for command in commands)
    assert "~/.ray/auth_token" in config["file_mounts"]


def test_a_replica_fits_a_node():
    config = load("cluster.yaml")
    node = config["available_node_types"][config["head_node_type"]]["resources"]
    assert node["GPU"] == 2
    deployment = make_app(EngineConfig.model_validate({"pipeline": {"device": "cuda"}}))._bound_deployment
    reserved = deployment._replica_config.placement_group_bundles
    assert sum(bundle.get("GPU", 0) for bundle in reserved) == 2
    assert sum(bundle["CPU"] for bundle in reserved) <= node["CPU"]
    assert [bundle.get("GPU", 0) for bundle in reserved] == [1, 1], "a bundle a stage"


def test_the_serve_config_is_valid_and_stays_on_loopback():
    config = ServeDeploySchema.model_validate(load("serve.yaml"))
    assert config.http_options.host == "127.0.0.1"
    (application,) = config.applications
    assert application.import_path == "qsa.serve_app.app:build_app"
    assert config_from_args(application.args) == EngineConfig()
    assert [item.name for item in application.deployments] == [EngineReplica.name]


def test_builder_arguments():
    config = config_from_args({"model": "/models/x", "limits.max_sequences": "4", "pipeline": {"num_stages": 1}})
    assert (config.model.path, config.limits.max_sequences, config.pipeline.num_stages) == ("/models/x", 4, 1)
    config = config_from_args({"sparse": {0: {"dense": True}, 3: {"top_k_fine": 8}}, "default_sparse_id": 3})
    assert config.sparse[3].top_k_fine == 8
    with pytest.raises(ConfigError, match=r"limits\.max_seqs"):
        config_from_args({"limits.max_seqs": 4})


def test_a_builder_reads_a_file(tmp_path):
    path = tmp_path / "qsa.yaml"
    path.write_text("limits: {max_sequences: 3}\n")
    config = config_from_args({"config": str(path), "server.port": "9000"})
    assert (config.limits.max_sequences, config.server.port) == (3, 9000)
