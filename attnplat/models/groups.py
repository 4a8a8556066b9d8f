"""A model's layers in groups of equal ones: what a plan is made for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from attnplat.config.layer import LayerConfig, MhaConfig
from attnplat.config.names import AttnType, Dtype
from attnplat.errors import ConfigError, ModelFileError, closest_name
from attnplat.models.decoders import PLAIN
from attnplat.models.defaults import DEFAULTS
from attnplat.models.families import FAMILIES, REFUSED, UNREAD, generic, known_types
from attnplat.models.fields import HEAD_SIZE, HEADS, HIDDEN, KV_HEADS, LAYERS, Fields, shortened
from attnplat.models.parts import Family, Layer
from attnplat.models.request import FALLBACK_DTYPE, Request
from attnplat.models.towers import GENERIC_VISION

TEXT_KEYS = ("text_config", "llm_config", "language_config")
TOWER_KEYS = ("vision_config", "audio_config")
# Models whose image tokens attend to each other in both directions (transformers,
# create_masks_for_vision_model of gemma3, paligemma, molmo2).
MM_PREFIX = ("gemma3", "paligemma", "molmo2")
SHAPE = (LAYERS, HEADS, KV_HEADS, HEAD_SIZE, HIDDEN)


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Layers of one model that ask for the same thing.

    Attributes:
        label: the stack and the kind of layer, unique in the model: `decoder full_attention`.
        config: what each of them asks for, per rank.
        layers: their indices in the stack. A layer with attention and a recurrent state side
            by side stands in two groups.
        part: decoder, encoder, cross, vision or audio. Draft (MTP) layers are left out.
        notes: what was assumed, and what a config cannot say, one sentence each.
    """

    label: str
    config: LayerConfig
    layers: tuple[int, ...]
    part: str
    notes: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """How many layers the group has."""
        return len(self.layers)


def layer_groups(
    config: Mapping[str, Any],
    *,
    dtype: Dtype | str | None = None,
    kv_cache_dtype: str = "auto",
    block_size: int | None = None,
    tensor_parallel: int = 1,
) -> tuple[LayerGroup, ...]:
    """One entry for every distinct kind of layer, in the order of the model.

    Args:
        config: a Hugging Face config as `load_config` returns it; it is not changed.
        dtype: activation dtype; default the file's, else bfloat16.
        kv_cache_dtype: the user's word for the cache format, given to layers with a KV cache.
        block_size: tokens per KV-cache block, only when the user asked for one.
        tensor_parallel: ranks that share the heads; the configs are those of one rank.

    Raises:
        ModelFileError: a needed field is missing, or the model type is known not to fit.
        ConfigError: a value that no model can have, naming field, value and what it takes.
        UnknownNameError: an unknown dtype or kind of layer.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"a model's config is a mapping of its fields, not {shortened(config)}")
    notes: list[str] = []
    top = _unwrapped(Fields(config, model_type=_type_of(config, "")), notes)
    text, family = _text(top, notes)
    request = Request(
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        tensor_parallel=tensor_parallel,
    ).with_dtype_of(top, text)
    if request.dtype_source == "default":
        notes.append(f"the file names no dtype; {FALLBACK_DTYPE} is assumed")
    layers = _stack(text, family, request, notes)
    if _mm_prefix(top, text):
        layers = [_with_mm_prefix(layer) for layer in layers]
        notes.append("tokens of one image attend to each other in both directions (mm_prefix)")
    said: dict[str, list[str]] = {}
    for key in TOWER_KEYS:
        if top.mapping(key):
            layers += _tower(top, key, request, notes, said)
    return _grouped(layers, notes, said)


# Finding the parts ------------------------------------------------------------------------


def _unwrapped(top: Fields, notes: list[str]) -> Fields:
    """The thinker of an omni model, else the config itself."""
    if not top.mapping("thinker_config"):
        return top
    notes.append("only the thinker is planned, not the talker")
    inner = top.sub("thinker_config")
    return replace(inner, model_type=_type_of(inner.values, inner.path) or top.model_type)


def _text(top: Fields, notes: list[str]) -> tuple[Fields, Family]:
    """The fields of the text model and the family that reads them."""
    text = top
    for key in TEXT_KEYS:
        if top.mapping(key):
            sub = top.sub(key)
            implied = (f"{top.model_type}_text", top.model_type)
            found = next((t for t in implied if t in FAMILIES), "")
            text = replace(sub, model_type=_type_of(sub.values, sub.path) or found)
            break
    for name in (text.model_type, f"{text.model_type}_text"):
        if name in REFUSED:
            raise ModelFileError(f"model type {text.model_type!r}: {REFUSED[name]}")
    _check_agreement(text)
    text = replace(text, defaults=DEFAULTS.get(text.model_type, {}))
    family = _family(text)
    if family is not None:
        notes.extend(_implied(text))
        return text, family
    notes.append(f"{_unknown(text)}: read as a plain {_manner(text)}")
    unread = [name for name in UNREAD if text.has(name)]
    if unread:
        notes.append(f"fields that the plain rule does not read: {', '.join(unread)}")
    return text, generic(text)


def _family(text: Fields) -> Family | None:
    """The family of a text model, or None. Block-sparse attention is never read as dense.

    MiniMax-M3's text part is also published under the type of its dense predecessor.
    """
    plain = text.model_type in PLAIN or text.model_type not in FAMILIES
    if plain and text.has("sparse_attention_config"):
        return FAMILIES["minimax_m3"]
    return FAMILIES.get(text.model_type)


def _check_agreement(text: Fields) -> None:
    """Raise ConfigError where a file gives one quantity under two names and two values."""
    for names in (LAYERS, HEADS, KV_HEADS):
        given = {n: text.values[n] for n in names if isinstance(text.values.get(n), int)}
        if len(set(given.values())) > 1:
            (first, value), *others = given.items()
            also = ", ".join(f"{name} {other}" for name, other in others)
            raise text.refusal(
                first, f"the same value under every name (also given: {also})", value
            )


def _type_of(values: Mapping[str, Any], path: str) -> str:
    return Fields(values, path=path).text("model_type") or ""


def _unknown(text: Fields) -> str:
    if not text.model_type:
        return f"{text.path}model_type is not given"
    closest = closest_name(text.model_type, known_types())
    near = f" (closest: {closest!r})" if closest else ""
    return f"model type {text.model_type!r} is not known{near}"


def _manner(text: Fields) -> str:
    return "encoder and decoder" if text.flag("is_encoder_decoder") else "decoder"


def _implied(fields: Fields) -> Iterable[str]:
    """What of the shape the file leaves to the defaults of its model type."""
    told = {n for names in SHAPE if any(fields.has(n) for n in names) for n in names}
    silent = [n for names in SHAPE for n in names if n in fields.defaults and n not in told]
    if silent:
        values = ", ".join(f"{name} {shortened(fields.defaults[name], 24)}" for name in silent)
        yield f"not in the file, so the defaults of {fields.model_type} apply: {values}"


def _stack(text: Fields, family: Family, request: Request, notes: list[str]) -> list[Layer]:
    try:
        layers = [layer for part in family.parts for layer in part.layers(text, request)]
    except ModelFileError as error:
        if text.model_type in FAMILIES:
            raise
        raise ModelFileError(f"{error}; {_unknown(text)}") from None
    for part in family.parts:
        notes.extend(part.notes(text))
    if not layers:
        raise ModelFileError(f"model type {text.model_type!r}: no layer attends or keeps a state")
    return layers


# Towers -----------------------------------------------------------------------------------


def _tower(
    top: Fields, key: str, request: Request, notes: list[str], said: dict[str, list[str]]
) -> list[Layer]:
    """The layers of a vision or audio encoder; a note where its file does not tell them."""
    sub = top.sub(key)
    name = key.removesuffix("_config")
    model_type = _type_of(sub.values, sub.path)
    found = _tower_type(model_type, top.model_type, name)
    fields = replace(sub, model_type=model_type or found, defaults=DEFAULTS.get(found, {}))
    family = FAMILIES.get(found) or (GENERIC_VISION if name == "vision" else None)
    shown = model_type or "its type is not given"
    if family is None or any(isinstance(fields.get(*n), (list, tuple)) for n in (HEADS, HIDDEN)):
        notes.append(f"the {name} tower ({shown}) is not planned: no rule for such a tower")
        return []
    part = family.parts[0]
    own = said.setdefault(name, list(_implied(fields)))
    heads = fields.size(*part.heads)
    if heads is not None and heads % request.tensor_parallel:
        ranks = request.tensor_parallel
        own.append(f"its {heads} heads do not divide by {ranks}: whole on each rank")
        request = request.whole()
    try:
        layers = list(part.layers(fields, request))
    except ModelFileError as error:
        notes.append(f"the {name} tower ({shown}) is not planned: {error}")
        return []
    own.extend(part.notes(fields))
    if not found:
        own.append(f"vision type {model_type!r} is not known: read as a plain vision encoder")
    return layers


def _tower_type(own: str, whole: str, name: str) -> str:
    """The type under which a tower's family is found, or "".

    Files differ in what they call a tower: by its own type, by the whole model's, or not.
    """
    suffixes = (f"_{name}", f"_{name}_model", f"_{name}_encoder")
    for candidate in (own, f"{own}_{name}", *(whole + suffix for suffix in suffixes)):
        family = FAMILIES.get(candidate)
        if family is not None and family.parts[0].name == name:
            return candidate
    return ""


def _mm_prefix(top: Fields, text: Fields) -> bool:
    """Whether image tokens attend in both directions; only in a model that has images."""
    if not top.mapping("vision_config"):
        return False
    return top.model_type in MM_PREFIX or text.get("use_bidirectional_attention") == "vision"


def _with_mm_prefix(layer: Layer) -> Layer:
    config = layer.config
    if not isinstance(config, MhaConfig) or config.attn_type != AttnType.DECODER:
        return layer
    sources = (*config.provenance, ("mm_prefix", "model"))
    return replace(layer, config=config.replace(mm_prefix=True, provenance=sources))


# Grouping ---------------------------------------------------------------------------------


def _grouped(
    layers: Iterable[Layer], notes: Iterable[str], said: Mapping[str, list[str]]
) -> tuple[LayerGroup, ...]:
    together: dict[tuple[str, str, LayerConfig], list[int]] = {}
    for layer in layers:
        together.setdefault((layer.part, layer.kind, layer.config), []).append(layer.index)
    names = [f"{part} {kind}" for part, kind, _ in together]
    groups = []
    for (part, kind, config), indices in together.items():
        label = f"{part} {kind}"
        if names.count(label) > 1:
            label += f" ({_ranges(indices)})"
        own = said.get(part, notes)
        groups.append(
            LayerGroup(
                label=label,
                config=config.replace(label=label),
                layers=tuple(indices),
                part=part,
                notes=tuple(own),
            )
        )
    return tuple(groups)


def _ranges(indices: list[int]) -> str:
    """`0-3, 7` for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][-1] == index - 1:
            runs[-1] = [runs[-1][0], index]
        else:
            runs.append([index])
    return ", ".join("-".join(map(str, run)) for run in runs)
