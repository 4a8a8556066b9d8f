"""Which kind of layer stands at which index: functions from a config to one name per layer.

The names are Hugging Face's `layer_types`, with older spellings translated:
`full_attention`, `sliding_attention`, `chunked_attention`, `linear_attention` and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attnplat.errors import ConfigError, UnknownNameError
from attnplat.models.fields import LAYERS, MAX_LAYERS, Fields

Kinds = tuple[str, ...]
Pattern = Callable[[Fields], Kinds]

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LINEAR, CONV, WINDOWS = "linear_attention", "conv", "window_attention"
INDEXED, MINIMAX = "indexed_attention", "minimax_m3_sparse"
COMPRESSED, HEAVILY_COMPRESSED = "compressed_sparse_attention", "heavily_compressed_attention"
HYBRID = "hybrid"  # attention and a recurrent state in one layer
WITHOUT_ATTENTION = ("mlp", "moe")
KINDS = (FULL, SLIDING, CHUNKED, LINEAR, CONV, WINDOWS, INDEXED, MINIMAX, COMPRESSED,
         HEAVILY_COMPRESSED, HYBRID, *WITHOUT_ATTENTION)  # fmt: skip
DRAFT_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")
OLDER_NAMES = {
    "attention": FULL,
    "mamba": LINEAR,
    "global": FULL,
    "local": SLIDING,
    "deepseek_sparse_attention": INDEXED,
    "window": SLIDING,
}


def count(fields: Fields, *names: str) -> int:
    """The number of layers. Raises ModelFileError where none is given."""
    return fields.need(*(names or LAYERS), most=MAX_LAYERS)


def uniform(fields: Fields) -> Kinds:
    """Every layer sees all keys."""
    return (FULL,) * count(fields)


def listed(fields: Fields) -> Kinds:
    """As `layer_types` says; without it, all layers slide if the config has a window."""
    given = explicit(fields)
    if given is not None:
        return given
    return ((SLIDING if has_window(fields) else FULL),) * count(fields)


def listed_or(fallback: Pattern) -> Pattern:
    """As `layer_types` says; without it, as `fallback` does."""

    def pattern(fields: Fields) -> Kinds:
        given = explicit(fields)
        return fallback(fields) if given is None else given

    return pattern


def every(
    period: int, *, field: str | None = None, kind: str = FULL, others: str = SLIDING
) -> Pattern:
    """Layers `period`, 2 `period` ... counted from 1 are `kind`; `field` overrides the period.

    Like `every_from_first`, for files that do not list their `layer_types`.
    """

    def pattern(fields: Fields) -> Kinds:
        step = (fields.size(field) if field else None) or period
        return tuple(kind if (i + 1) % step == 0 else others for i in range(count(fields)))

    return listed_or(pattern)


def every_from_first(
    period: int, *, field: str | None = None, kind: str = FULL, others: str = SLIDING
) -> Pattern:
    """Layers 0, `period`, 2 `period` ... are `kind`; `field` overrides the period."""

    def pattern(fields: Fields) -> Kinds:
        step = (fields.size(field) if field else None) or period
        return tuple(others if i % step else kind for i in range(count(fields)))

    return listed_or(pattern)


def window_after(fields: Fields) -> Kinds:
    """Layers from `max_window_layers` on slide, if there is a window."""
    first = fields.size("max_window_layers", least=0) or 0
    slides = has_window(fields)
    return tuple(SLIDING if slides and i >= first else FULL for i in range(count(fields)))


def window_after_if_used(fields: Fields) -> Kinds:
    """Qwen2: as `window_after`, but only with `use_sliding_window`."""
    if not fields.flag("use_sliding_window"):
        return uniform(fields)
    return window_after(fields)


def window_if_used(fields: Fields) -> Kinds:
    """Every layer slides, if `use_sliding_window` is set and there is a window."""
    used = fields.flag("use_sliding_window") and has_window(fields)
    return ((SLIDING if used else FULL),) * count(fields)


def explicit(fields: Fields) -> Kinds | None:
    """The kinds that the file lists, with today's names; None where it lists none.

    Raises ConfigError for a list of the wrong length, UnknownNameError for an unknown kind.
    """
    for name in ("layer_types", "layers_block_type", "mixer_types"):
        given = fields.listed(name)
        if given is not None:
            layers = fields.size(*LAYERS, most=MAX_LAYERS) or len(given)
            return named(fields, name, given, layers)
    return None


def named(fields: Fields, name: str, given: Sequence[object], layers: int) -> Kinds:
    """The first `layers` of the kinds in `given`, checked and with today's names."""
    check_length(fields, name, given, layers)
    kinds = tuple(OLDER_NAMES.get(str(k), str(k)) for k in given[:layers])
    for index, kind in enumerate(kinds):
        if kind not in KINDS:
            where = f"{fields.path}{name}[{index}]"
            raise UnknownNameError("layer type", kind, KINDS, hint=f"found in {where}")
    return kinds


def letters(field: str, meaning: dict[str, str], fallback: Pattern) -> Pattern:
    """A string with one letter per layer (`M-M*`), or `fallback` where the file has none."""

    def pattern(fields: Fields) -> Kinds:
        text = fields.text(field)
        if text is None:
            return fallback(fields)
        unknown = sorted(set(text) - set(meaning))
        if unknown or not text:
            known = ", ".join(f"{letter} ({kind})" for letter, kind in meaning.items())
            raise fields.refusal(field, f"letters among {known}", text)
        check_length(fields, field, text, fields.size(*LAYERS, most=MAX_LAYERS) or len(text))
        return tuple(meaning[letter] for letter in text)

    return pattern


def has_window(fields: Fields) -> bool:
    """Whether the config gives a window and does not switch it off."""
    if fields.get("sliding_window") is None:
        return False
    return fields.get("use_sliding_window") is None or fields.flag("use_sliding_window")


def indices(fields: Fields, name: str, first: int = 0) -> frozenset[int]:
    """A list of layer indices that count from `first`; empty where the file has none.

    Raises ConfigError for an index that the file gives and no layer has.
    """
    given = fields.integers(name) or ()
    last = first + count(fields) - 1
    for index in given:
        if fields.has(name) and not first <= index <= last:
            raise fields.refusal(name, f"layer indices from {first} to {last}", index)
    return frozenset(index - first for index in given)


def marked(fields: Fields, name: str, layers: int, yes: str, no: str) -> Kinds | None:
    """Kinds from a list of 0 and 1; None where the file has no such list or an empty one."""
    marks = fields.integers(name)
    if not marks:
        return None
    check_length(fields, name, marks, layers)
    return tuple(yes if mark else no for mark in marks[:layers])


def check_length(fields: Fields, name: str, given: Sequence[object], layers: int) -> None:
    """Raise ConfigError unless a per-layer list fits: one entry a layer, then the draft layers'."""
    draft = fields.size(*DRAFT_LAYERS, least=0, most=MAX_LAYERS) or 0
    if not layers <= len(given) <= layers + draft:
        raise ConfigError(
            f"{fields.path}{name} has {len(given)} entries; it takes one for each of the {layers} "
            f"layers" + (f", and up to {draft} more for the draft layers" if draft else "")
        )
