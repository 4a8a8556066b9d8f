"""A model's config read field by field: each value checked, or its absence reported.

Fields come from files that other people wrote, so nothing is assumed of them: a value of
the wrong kind is a ConfigError that names the field and the value, an absent one a
ModelFileError that names the model type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from attnplat.config.layer import MAX_SIZE
from attnplat.config.numbers import is_whole
from attnplat.errors import ConfigError, ModelFileError

# What one quantity is called across model families; the first name that is present counts.
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
HEAD_SIZE = ("head_dim", "attention_head_dim", "kv_channels", "d_kv")
HIDDEN = ("hidden_size", "n_embd", "d_model", "n_embed")

MAX_LAYERS = 10_000  # far above any model; keeps a nonsense count from filling the memory


@dataclass(frozen=True)
class Fields:
    """The values of one config, or of one part or layer of it.

    Attributes:
        values: what the file says.
        defaults: what the model type implies where the file is silent. A field that the
            file sets to null has no default: null is an answer.
        model_type: for messages; "" when the file names none.
        path: where in the file, for messages: `text_config.` or "".
        layer: the layer whose entry is taken from a field that lists one value per layer.
    """

    values: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    model_type: str = ""
    path: str = ""
    layer: int | None = None

    # Reading --------------------------------------------------------------------------

    def get(self, *names: str) -> Any:
        """The first of `names` that has a value in the file, else in the defaults, else None."""
        return self._find(names)[1]

    def has(self, name: str) -> bool:
        """Whether the file itself gives the field a value other than null."""
        return self.values.get(name) is not None

    def size(self, *names: str, least: int = 1, most: int = MAX_SIZE) -> int | None:
        """A whole number from `least` to `most`, or None where none is given.

        Raises ConfigError for any other value.
        """
        name, value = self._find(names)
        if isinstance(value, (list, tuple)) and self.layer is not None:
            if self.layer >= len(value):
                raise self.refusal(
                    name, f"one entry per layer, so more than {self.layer}", f"{len(value)} entries"
                )
            value = value[self.layer]
        if value is None:
            return None
        if not is_whole(value) or not least <= value <= most:
            raise self.refusal(name, f"an integer from {least} to {most}", value)
        return value

    def need(self, *names: str, least: int = 1, most: int = MAX_SIZE) -> int:
        """As `size`, but raises ModelFileError where no value is given."""
        value = self.size(*names, least=least, most=most)
        if value is None:
            raise self.missing(*names)
        return value

    def number(self, name: str) -> float | None:
        """A finite number above 0, or None. Raises ConfigError for any other value."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            try:
                number = float(value)
            except OverflowError:
                number = math.inf
            if math.isfinite(number) and number > 0:
                return number
        raise self.refusal(name, "a finite number above 0, or null", value)

    def flag(self, name: str) -> bool:
        """A truth value; absent and null are False. Raises ConfigError for any other value."""
        value = self.get(name)
        if value is None:
            return False
        if not isinstance(value, (bool, int)) or value not in (0, 1):
            raise self.refusal(name, "true or false", value)
        return bool(value)

    def listed(self, name: str) -> Sequence[Any] | None:
        """A list, or None. Raises ConfigError for any other value."""
        value = self.get(name)
        if value is not None and not isinstance(value, (list, tuple)):
            raise self.refusal(name, "a list", value)
        return value

    def integers(self, name: str) -> tuple[int, ...] | None:
        """A list of whole numbers, or None. Raises ConfigError for any other value."""
        values = self.listed(name)
        if values is None:
            return None
        if any(not isinstance(v, int) for v in values):
            raise self.refusal(name, "a list of integers", values)
        return tuple(int(v) for v in values)

    def text(self, name: str) -> str | None:
        """A string, or None. Raises ConfigError for any other value."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise self.refusal(name, "a string", value)
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        """A sub-config; absent and null are empty. Raises ConfigError for any other value."""
        value = self.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.refusal(name, "an object", value)
        return value

    def split(self, whole: tuple[str, ...], parts: tuple[str, ...], times: int = 1) -> int:
        """`times` * whole / parts. Raises ConfigError where it does not divide."""
        size, pieces = times * self.need(*whole), self.need(*parts)
        if size % pieces:
            takes = f"a multiple of {parts[0]} ({pieces}), as no head size is given"
            raise self.refusal(whole[0], takes, size // times)
        return size // pieces

    # Narrowing ------------------------------------------------------------------------

    def sub(self, name: str) -> Self:
        """The fields of a sub-config of the same model type, without defaults."""
        return replace(self, values=self.mapping(name), defaults={}, path=f"{self.path}{name}.")

    def at(self, layer: int) -> Self:
        """The fields as one layer sees them: `per_layer_config` and per-layer lists applied."""
        every = self.mapping("per_layer_config")
        own = next((own for key, own in every.items() if _is_index(key, layer)), None)
        if own is None:
            return replace(self, layer=layer)
        if not isinstance(own, Mapping):
            raise self.refusal(f"per_layer_config.{layer}", "an object", own)
        return replace(self, values={**self.values, **own}, layer=layer)

    # Complaints -----------------------------------------------------------------------

    def refusal(self, name: str, takes: str, value: Any) -> ConfigError:
        """The error for a value that no model can have."""
        return ConfigError(f"{self.path}{name} is {shortened(value)}; it takes {takes}")

    def missing(self, *names: str) -> ModelFileError:
        """The error for a field that is needed and neither given nor implied."""
        also = f" (nor {', '.join(names[1:])})" if len(names) > 1 else ""
        of = f"model type {self.model_type!r}" if self.model_type else "a config without model_type"
        return ModelFileError(f"{of}: {self.path}{names[0]}{also} is not given and has no default")

    def _find(self, names: tuple[str, ...]) -> tuple[str, Any]:
        given = [n for n in names if self.values.get(n) is not None]
        if given:
            return given[0], self.values[given[0]]
        if not any(n in self.values for n in names):
            for name in names:
                if self.defaults.get(name) is not None:
                    return name, self.defaults[name]
        return names[0], None


def _is_index(key: object, layer: int) -> bool:
    """Whether a key of `per_layer_config` means the layer; files pad them: `05`."""
    text = str(key)
    return text.isascii() and text.isdecimal() and len(text) < 9 and int(text) == layer


def shortened(value: Any, most: int = 80) -> str:
    """`repr(value)`, cut to about `most` characters."""
    try:
        text = repr(value)
    except ValueError:  # integers of more digits than Python prints
        return "a number of thousands of digits"
    return text if len(text) <= most else text[: most - 4] + " ..."
