"""What the fields of a recorded case may hold, asked before anything is decided."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from attnplat.config.numbers import is_whole
from attnplat.errors import ConfigError


class Field(NamedTuple):
    """What one field takes, in words and as a test."""

    takes: str
    accepts: Callable[[Any], bool]


def _is_size(value: Any) -> bool:
    return is_whole(value) and value > 0


def optional(field: Field) -> Field:
    """The same, or null."""
    return Field(f"{field.takes} or null", lambda v: v is None or field.accepts(v))


TEXT = Field("a string", lambda v: isinstance(v, str))
FLAG = Field("true or false", lambda v: isinstance(v, bool))
SIZE = Field("an integer of at least 1", _is_size)
SIZE_OR_ZERO = Field("an integer of at least 0", lambda v: v == 0 or _is_size(v))
OBJECT = Field("an object", lambda v: isinstance(v, dict))
NAMES = Field(
    "an object of names",
    lambda v: isinstance(v, dict) and all(x is None or isinstance(x, str) for x in v.values()),
)

Fields = Mapping[str, Field]

# What every case has.
DEVICE: Fields = {"platform": TEXT, "arch": TEXT, "profile": TEXT}


def check_fields(
    values: Mapping[str, Any], wanted: Fields, what: str, *, required: bool = True
) -> None:
    """Raise ConfigError for the first of the fields that is not what it takes.

    `required`: whether one that is missing is refused too.
    """
    for name, field in wanted.items():
        if name not in values:
            if required:
                raise ConfigError(f"{what} lacks {name}")
        elif not field.accepts(values[name]):
            raise ConfigError(f"{what} has {name} {values[name]!r}; it takes {field.takes}")
