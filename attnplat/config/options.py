"""An AttentionConfig from what people write: options, JSON, TOML, environment.

Each way keeps who set a value, so that a refusal can say where it came from. Command-line
forms are those of vLLM: `--attention-config JSON`, `--attention-config.FIELD VALUE`, the
short `-ac` of both, and `--attention-backend NAME`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnplat.config.attention import AttentionConfig, HiSparseConfig
from attnplat.config.env import Environment
from attnplat.errors import ConfigError, ConflictError

_PREFIXES = ("--attention-config", "-ac")
_BACKEND_OPTION = "--attention-backend"
_TEXT_FIELDS = frozenset(
    {"backend", "minimax_m3_msa_decode_backend", "mla_prefill_backend", "indexer_kv_dtype"}
)
_NESTED = {"backend_per_kind": None, "hisparse_config": HiSparseConfig}


def from_json(text: str, *, source: str = "user") -> AttentionConfig:
    """The config of a JSON object. Raises ConfigError for anything else."""
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"attention config is not JSON: {error} in {_shortened(text)!r}"
        ) from None
    return AttentionConfig.from_dict(_mapping(values, "attention config"), source=source)


def from_toml(path: str | Path, *, source: str | None = None) -> AttentionConfig:
    """The config of a TOML file's `[attention]` table.

    Raises ConfigError for a file that is missing, unreadable or not TOML.
    """
    import tomllib  # 10 ms of start-up that only a file's reader should pay

    try:
        text = Path(path).read_text(encoding="utf-8")
        tables = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"attention config file {str(path)!r}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"attention config file {str(path)!r} is not TOML: {error}") from None
    if "attention" not in tables:
        raise ConfigError(f"attention config file {str(path)!r} has no [attention] table")
    values = _mapping(tables["attention"], "[attention]")
    return AttentionConfig.from_dict(values, source=source or str(path))


def from_environment(environment: Environment) -> AttentionConfig:
    """The config that the ATTNPLAT_* variables ask for."""
    values = {} if environment.backend is None else {"backend": environment.backend}
    return AttentionConfig.from_dict(values, source="environment")


def split_options(arguments: Sequence[str]) -> tuple[AttentionConfig, list[str]]:
    """The config that command-line arguments ask for, and the arguments that are left.

    Raises:
        ConflictError: a field given twice, or the backend named in two ways.
        ConfigError: an option without a value, or JSON that is not an object.
    """
    values: dict[str, Any] = {}
    given_by: dict[str, str] = {}
    rest: list[str] = []
    queue = list(arguments)
    while queue:
        option, equals, inline = queue.pop(0).partition("=")
        path = _option_path(option)
        if path is None:
            rest.append(option + equals + inline)
            if option == "--":
                rest += queue
                break
            continue
        if not equals and not queue:
            raise ConfigError(f"option {option} needs a value")
        text = inline if equals else queue.pop(0)
        for name, value in _fields_of(path, text, option).items():
            _merge(values, given_by, name, value, option)
    return AttentionConfig.from_dict(values, source="command line"), rest


def _option_path(option: str) -> tuple[str, ...] | None:
    """`()` for the whole config, the dotted path for a field, None for another option."""
    if option == _BACKEND_OPTION:
        return ("backend",)
    for prefix in _PREFIXES:
        if option == prefix:
            return ()
        if option.startswith(prefix + "."):
            return tuple(p.replace("-", "_") for p in option[len(prefix) + 1 :].split("."))
    return None


def _fields_of(path: tuple[str, ...], text: str, option: str) -> dict[str, Any]:
    if not path:
        try:
            return dict(_mapping(json.loads(text), option))
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"{option} takes a JSON object: {error} in {_shortened(text)!r}"
            ) from None
    name, *inner = path
    if not inner:
        return {name: text if name in _TEXT_FIELDS else _scalar(text)}
    if name not in _NESTED or len(inner) != 1:
        raise ConfigError(f"option {option} names no field; {name} has no field {'.'.join(inner)}")
    value = text if name == "backend_per_kind" else _scalar(text)
    return {name: {inner[0]: value}}


def _merge(
    values: dict[str, Any], given_by: dict[str, str], name: str, value: Any, option: str
) -> None:
    if name in values and isinstance(values[name], dict) and isinstance(value, dict):
        for key, inner in value.items():
            if key in values[name]:
                raise ConflictError(f"{name}.{key} is given twice")
            values[name][key] = inner
        return
    if name in values:
        raise ConflictError(
            f"{name} is given by {given_by[name]} ({values[name]!r}) and by {option} ({value!r}); "
            "give one of the two"
        )
    values[name], given_by[name] = value, option


def _scalar(text: str) -> Any:
    """A JSON literal where it is one (`true`, `3`, `null`), else the text itself."""
    folded = {"True": "true", "False": "false", "None": "null"}.get(text, text)
    try:
        return json.loads(folded)
    except json.JSONDecodeError:
        return text


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{what} is {_shortened(json.dumps(value))}; it takes an object of fields"
        )
    return value


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
