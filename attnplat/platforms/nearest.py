"""The nearest changes after which a refused layer would be served.

Every change is decided again, whole, before it is offered: `Selection.again` asks the same
tables with one thing changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from attnplat.backends.backend import Backend, Rejection
from attnplat.config.attention import AttentionConfig
from attnplat.config.layer import LayerConfig
from attnplat.errors import ConfigError
from attnplat.platforms.world import World

if TYPE_CHECKING:
    from attnplat.platforms.selection import Selection

MOST_CHANGES = 3

# Fields that a user can change without changing what the model computes, cheapest first.
# A head can be padded with zeros to a larger size, never cut.
CHANGEABLE = (
    "block_size",
    "indexer_kv_dtype",
    "sparse_logits",
    "kv_cache_dtype",
    "head_size",
    "dtype",
)
# Fields of the model itself: another value would be another model.
OF_THE_MODEL = frozenset(
    {
        "alibi",
        "attn_type",
        "causal",
        "chunk_size",
        "dims",
        "index_head_dim",
        "index_n_heads",
        "index_topk",
        "kv_lora_rank",
        "logits_soft_cap",
        "mm_prefix",
        "model",
        "model_type",
        "num_heads",
        "num_kv_heads",
        "o_groups",
        "per_head_quant_scales",
        "position_bias",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "role",
        "rswa",
        "scale",
        "sinks",
        "sliding_window",
        "state_kind",
        "static_sink_tokens",
        "topk",
        "topk_blocks",
        "v_head_size",
    }
)
# Fields of an indexer's config, and the user's wish that sets each where a layer makes the config.
WISHES = {"indexer_kv_dtype": "indexer_kv_dtype", "sparse_logits": "indexer_sparse_logits"}
REQUESTS = frozenset({"backend", "backend_per_kind"})
# Wishes that say what is computed, not how.
MEANING = frozenset({"use_non_causal"})


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change, and the backend that is chosen once it is made.

    Attributes:
        kind: field (of the layer), wish (of the attention config), switch, package, backend
            (requested) or reference.
        subject: what to change: a field's or switch's name, a distribution.
        got: what it is now.
        value: what to make it; None is to leave it open.
        backend: who is then chosen for the layer.
        parts: part of the layer -> who is then chosen for it, where that is another than now.
        source: who set what is to be changed.
        how: the command or variable that does it, or "".
        unasked: whether the request for a backend has to be dropped too.
    """

    kind: str
    subject: str
    backend: str
    got: Any = None
    value: Any = None
    parts: tuple[tuple[str, str], ...] = field(default=())
    source: str = "caller"
    how: str = ""
    unasked: bool = False

    @property
    def to_do(self) -> str:
        """What to do, an imperative clause."""
        if self.how:
            doing = self.how
        elif self.kind == "reference":
            doing = "allow_reference=True"
        elif self.value is None:
            doing = f"leave {'the backend' if self.kind == 'backend' else self.subject} open"
        elif self.subject == "head_size":
            doing = f"pad head_size to {self.value}"
        else:
            doing = f"{self.subject} {self.value}"
        return f"leave the backend open, and {doing}" if self.unasked else doing

    def __str__(self) -> str:
        slowly = ", slowly" if self.kind == "reference" else ""
        return f"{self.to_do}: {self.backend} takes it{slowly}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "kind": self.kind,
            "subject": self.subject,
            "got": _plain(self.got),
            "value": _plain(self.value),
            "source": self.source,
            "backend": self.backend,
            "parts": dict(self.parts),
            "to_do": self.to_do,
        }


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int) else str(value)


def fixes(selection: Selection) -> Iterator[Change]:
    """Changes after which the refused layer would be served, the nearest first."""
    if selection.ok:
        return
    automatic = selection
    if selection.requested is not None:
        automatic = selection.again(world=unasked(selection.world))
        if automatic.chosen is not None:
            yield Change(
                kind="backend",
                subject="backend",
                got=selection.requested,
                source=selection.requested_by,
                backend=automatic.chosen.name,
            )
    yield from _accepted_changes(selection, False)
    if automatic.ok:
        return
    if automatic is not selection:
        yield from _accepted_changes(automatic, True)
    with_reference = automatic.again(allow_reference=True).chosen
    if with_reference is not None and not automatic.allow_reference:
        yield Change(
            kind="reference",
            subject="allow_reference",
            got=False,
            value=True,
            backend=with_reference.name,
            unasked=automatic is not selection,
        )


def _accepted_changes(selection: Selection, dropped: bool) -> Iterator[Change]:
    """Of the changes to one thing that lead to one backend, the first, and to leave it open."""
    told = set()
    for change, again in variants(selection):
        if again is None or again.chosen is None:
            continue
        sort = (change.subject, again.chosen.name, change.value is None)
        if sort not in told:
            told.add(sort)
            yield replace(change, backend=again.chosen.name, unasked=dropped)


def variants(selection: Selection) -> Iterator[tuple[Change, Selection | None]]:
    """Single changes that a refusal suggests, and what is decided with each."""
    for subject, value in _field_values(selection):
        yield field_variant(selection, subject, value)
    for part in selection.parts.values():
        for subject, value in () if part.ok else _field_values(part):
            if subject in WISHES:
                yield wish_variant(selection, WISHES[subject], value)
    for name in sorted(selection.world.wishes.set_fields() - REQUESTS - MEANING):
        yield wish_variant(selection, name, None)


def field_variant(selection: Selection, name: str, value: Any) -> tuple[Change, Selection | None]:
    """The change of one field of the layer, and what is decided with it; None leaves it open."""
    change = _change("field", selection.config, name, value)
    return change, decided(selection, *_with_field(selection, name, value))


def wish_variant(selection: Selection, name: str, value: Any) -> tuple[Change, Selection | None]:
    """The change of one wish, and what is decided with it; None leaves it open."""
    change = _change("wish", selection.world.wishes, name, value)
    return change, decided(selection, None, _with_wish(selection.world, name, value))


def _change(kind: str, of: LayerConfig | AttentionConfig, name: str, value: Any) -> Change:
    return Change(
        kind=kind,
        subject=name,
        got=getattr(of, name),
        value=value,
        source=of.source_of(name),
        backend="",
    )


def decided(
    selection: Selection, asked: LayerConfig | None, world: World | None
) -> Selection | None:
    """The decision with a changed layer or world; None where the change makes no sense."""
    try:
        return selection.again(asked, world)
    except ConfigError:
        return None


def unasked(world: World) -> World:
    """`world` without a request for a backend."""
    wishes = replace(world.wishes, backend=None, backend_per_kind=(), mla_prefill_backend=None)
    return world.replace(wishes=wishes)


def _with_wish(world: World, name: str, value: Any) -> World:
    """`world` with one wish changed; None leaves it open."""
    made = getattr(AttentionConfig(), name) if value is None else value
    return world.replace(wishes=replace(world.wishes, **{name: made}))


def _with_field(selection: Selection, name: str, value: Any) -> tuple[LayerConfig, World]:
    """The layer as asked, and the world, with one field changed; None leaves it open."""
    asked, world = selection.asked.replace(**{name: value}), selection.world
    if name == "block_size" and value is None:
        world = world.replace(run=replace(world.run, user_block_size=None))
    return asked, world


def _field_values(selection: Selection) -> Iterator[tuple[str, Any]]:
    """Fields, and values of them that single candidates take, in rank order of those."""
    seen: set[tuple[str, Any]] = set()
    for name, reasons in selection.rejections.items():
        backend = declared(selection, name)
        if backend is None:
            continue
        for subject in _blamed(selection.config, reasons):
            for value in _values(backend, subject, getattr(selection.config, subject)):
                if (subject, value) not in seen:
                    seen.add((subject, value))
                    yield subject, value


def declared(selection: Selection, name: str) -> Backend | None:
    """The resolved backend of that name, or None where the tables have none."""
    backend = selection.tables.find(name, selection.config.operation)
    return None if backend is None else selection.world.settle(backend).backend


def _blamed(config: LayerConfig, reasons: tuple[Rejection, ...]) -> tuple[str, ...]:
    """The changeable fields that one change of may undo all reasons.

    A rule names no field: any that has been given may be what it refuses.
    """
    fields = {r.subject for r in reasons if r.kind == "field"}
    if any(r.kind not in ("field", "rule") for r in reasons) or len(fields) > 1:
        return ()
    blamed = fields or {f for f in CHANGEABLE if getattr(config, f, None) is not None}
    return tuple(f for f in CHANGEABLE if f in blamed)


def _values(backend: Backend, subject: str, value: Any) -> Iterator[Any]:
    if subject == "block_size":
        yield None
    nearest = backend.limit(subject).nearest(value)
    if subject == "dtype":  # the one that holds whatever a wider one held
        nearest = tuple(sorted(nearest, key=lambda dtype: dtype != "bfloat16"))
    for candidate in nearest:
        if candidate != value and (subject != "head_size" or value < candidate <= 2 * value):
            yield candidate
