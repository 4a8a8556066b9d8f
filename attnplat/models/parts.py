"""A stack of layers of one model, read from its config: the decoder, an encoder, a tower."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from attnplat.config.layer import LayerConfig
from attnplat.config.names import AttnType, Role
from attnplat.models import fields as names
from attnplat.models.fields import Fields
from attnplat.models.patterns import CONV, HYBRID, LINEAR, WITHOUT_ATTENTION, Pattern, listed
from attnplat.models.request import Request

Attend = Callable[[Fields, str, "Part", Request], LayerConfig]
State = Callable[[Fields, Request], LayerConfig]
Extras = Callable[[Fields, str], Mapping[str, Any]]
Notes = Callable[[Fields], tuple[str, ...]]


def no_extras(fields: Fields, kind: str) -> Mapping[str, Any]:
    """Nothing beyond the shape and the window."""
    return {}


def no_notes(fields: Fields) -> tuple[str, ...]:
    """Nothing to say."""
    return ()


@dataclass(frozen=True, kw_only=True)
class Part:
    """How one stack of layers is read from a config.

    Attributes:
        name: decoder, encoder, cross, vision or audio.
        kinds: which kind of layer stands where.
        attend: makes the config of a layer with attention.
        state: makes the config of a recurrent layer; None where the family has none.
        extras: fields of the layer's config beyond its shape and window, by kind of layer;
            sizes among them are those of the whole model, before ranks share the heads.
        notes: what a reader should know that no config can say.
        heads, kv_heads, head_size, hidden, window: what the family's files call these; without
            names for kv_heads there are as many as query heads.
        attn_type, role: as for MhaConfig.
    """

    name: str = "decoder"
    kinds: Pattern = listed
    attend: Attend
    state: State | None = None
    extras: Extras = no_extras
    notes: Notes = no_notes
    heads: tuple[str, ...] = names.HEADS
    kv_heads: tuple[str, ...] = names.KV_HEADS
    head_size: tuple[str, ...] = names.HEAD_SIZE
    hidden: tuple[str, ...] = names.HIDDEN
    window: tuple[str, ...] = ("sliding_window",)
    attn_type: AttnType = AttnType.DECODER
    role: Role = Role.TEXT

    def layers(self, fields: Fields, request: Request) -> Iterator[Layer]:
        """The layers of the stack that attend or keep a state, in order."""
        for index, kind in enumerate(self.kinds(fields)):
            if kind in WITHOUT_ATTENTION:
                continue
            own = fields.at(index)
            if kind not in (LINEAR, CONV):
                config = self.attend(own, kind, self, request)
                shown = "full_attention" if kind == HYBRID else kind
                yield Layer(index, self.name, shown, config)
            if kind in (LINEAR, CONV, HYBRID):
                state = self._state(own, kind, request)
                yield Layer(index, self.name, str(state.state_kind), state)

    def _state(self, fields: Fields, kind: str, request: Request) -> Any:
        if self.state is None:
            takes = f"kinds that model type {fields.model_type!r} is known to have"
            raise fields.refusal("layer_types", takes, f"a list with {kind}")
        return self.state(fields, request)


@dataclass(frozen=True)
class Layer:
    """One layer: its index in the stack, the stack's name, its kind and its config."""

    index: int
    part: str
    kind: str
    config: LayerConfig


@dataclass(frozen=True)
class Family:
    """The model types that share one way of reading, and the stacks that such a model has."""

    types: tuple[str, ...]
    parts: tuple[Part, ...]
