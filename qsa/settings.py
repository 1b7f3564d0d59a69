"""From command-line options to an EngineConfig: the YAML file, `--set NAME=VALUE`, and the short options."""

from __future__ import annotations

import argparse
from typing import Any

import yaml

from qsa.config import EngineConfig, load_config
from qsa.errors import ConfigError

SHORT_OPTIONS = {  # option -> the setting it stands for
    "model": "model.path",
    "host": "server.host",
    "port": "server.port",
    "stages": "pipeline.num_stages",
    "device": "pipeline.device",
    "quantization": "model.quantization",
    "sparse": "default_sparse_id",
}
ENGINE_OPTIONS = {  # option -> its name for users; --sparse is not among them: a request may have one
    "config": "--config",
    "settings": "--set",
    "model": "the model",
    "stages": "--stages",
    "device": "--device",
    "quantization": "--quantization",
}


def parse_setting(text: str) -> tuple[str, Any]:
    """Split `NAME=VALUE`; the value is YAML, so `8`, `true`, `[1, 2]` and `{window_size: 256}` have their types.

    Raises:
        ConfigError: there is no `=`, no name, or the value is not YAML.
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"--set wants NAME=VALUE, such as limits.max_sequences=4, got {text!r}")
    try:
        return name.strip(), yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(f"--set {name.strip()}: {value!r} is not a YAML value") from None


def config_unless_url(args: argparse.Namespace) -> EngineConfig:
    """`config_from` of a command that may use a running server, whose engine is what it is; then the defaults, for nobody.

    Raises:
        ConfigError: also when --url comes with options of an engine.
    """
    if args.url is None:
        return config_from(args)
    if given := [text for option, text in ENGINE_OPTIONS.items() if getattr(args, option, None)]:
        raise ConfigError(f"the server at --url has an engine of its own: drop --url, or {', '.join(given)}")
    return EngineConfig()


def config_from(args: argparse.Namespace) -> EngineConfig:
    """The configuration a command runs with; a short option wins over `--set`, and that over the file.

    Raises:
        ConfigError: naming the wrong setting.
    """
    overrides = dict(parse_setting(text) for text in args.settings)
    for option, name in SHORT_OPTIONS.items():
        value = getattr(args, option, None)
        if value is not None:
            overrides[name] = value
    return load_config(args.config, overrides)
