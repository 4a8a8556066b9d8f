"""Layer configs as plain dicts, the inverse of `LayerConfig.to_dict`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from attnplat.config.layer import LayerConfig, config_class
from attnplat.config.names import Operation, parse_name
from attnplat.errors import ConfigError, UnknownNameError


def layer_from_dict(values: Mapping[str, Any]) -> LayerConfig:
    """The config that a dict describes; `operation` tells the class, `mha` when left out.

    Raises UnknownNameError for an unknown operation or field, ConfigError for a bad value.
    """
    given = dict(values)
    operation = parse_name(Operation, given.pop("operation", Operation.MHA), "operation")
    cls = config_class(operation)
    known = [f.name for f in fields(cls) if f.name != "provenance"]
    for name in given:
        if name not in known:
            raise UnknownNameError(f"{operation} field", name, known)
    if "head_size" not in given:
        raise ConfigError(f"{cls.__name__} needs head_size")
    return cls(**given)
