"""No field that holds an integer takes what only equals one: 3.0 and true are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from attnplat.config.attention import AttentionConfig, HiSparseConfig
from attnplat.config.layer import LayerConfig, config_class
from attnplat.config.names import Operation
from attnplat.config.options import from_json, from_toml, split_options
from attnplat.config.run import RunContext
from attnplat.config.serial import layer_from_dict
from attnplat.errors import ConfigError

LAYERS = [config_class(operation) for operation in Operation]
CONFIGS: list[type[Any]] = [AttentionConfig, HiSparseConfig, RunContext, *LAYERS]

INTEGERS = [
    (config, each.name, "None" in str(each.type))
    for config in CONFIGS
    for each in fields(config)
    if str(each.type) in ("int", "int | None")
]

# A float of the field's own range, one outside every range's steps, a truth, a text.
WRONG = (1.0, 2.0, 3.0, 16.0, 64.0, 2.5, True, False, "3", float("nan"), [3])


def given(config: type[Any], name: str, value: Any) -> dict[str, Any]:
    """Arguments that are right but for `name`."""
    return {"head_size": 64, name: value} if issubclass(config, LayerConfig) else {name: value}


def test_the_table_has_the_integers_of_every_config() -> None:
    assert {config for config, *_ in INTEGERS} == set(CONFIGS)
    names = {name for _, name, _ in INTEGERS}
    assert {"flash_attn_version", "device_buffer_size", "tp_size", "head_size", "topk"} <= names


@pytest.mark.parametrize(("config", "name", "optional"), INTEGERS)
def test_what_only_equals_an_integer_is_refused_by_name(
    config: type[Any], name: str, optional: bool
) -> None:
    for value in WRONG if optional else (*WRONG, None):
        with pytest.raises(ConfigError) as caught:
            config(**given(config, name, value))
        assert f"{name} is {value!r}; it takes" in str(caught.value)
    if optional:
        config(**given(config, name, None))


WAYS: dict[str, Callable[[Path], Any]] = {
    "JSON": lambda _: from_json('{"flash_attn_version": 3.0}'),
    "TOML": lambda folder: from_toml(folder / "attention.toml"),
    "an option": lambda _: split_options(["-ac.flash_attn_version", "3.0"]),
    "an option with JSON": lambda _: split_options(
        ["-ac", json.dumps({"flash_attn_version": 3.0})]
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_float_for_a_version_is_refused_however_it_arrives(way: str, tmp_path: Path) -> None:
    (tmp_path / "attention.toml").write_text("[attention]\nflash_attn_version = 3.0\n")
    with pytest.raises(ConfigError, match=r"flash_attn_version is 3\.0; it takes 2, 3, 4 or None"):
        WAYS[way](tmp_path)


def test_a_layer_in_json_is_no_exception() -> None:
    with pytest.raises(ConfigError, match=r"block_size is 16\.0; it takes an integer from 1"):
        layer_from_dict({"head_size": 64, "block_size": 16.0})
