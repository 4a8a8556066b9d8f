"""The choice: one pure function over declared backends, with every reason kept.

`select(tables, config, world)` reads nothing but its arguments, imports no kernel and
works for devices that are not here. The same inputs always give the same Selection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

from attnplat.backends.backend import Backend, Rejection
from attnplat.backends.limits import Limit
from attnplat.config.frozen import FrozenMap
from attnplat.config.layer import (
    IndexerConfig,
    LayerConfig,
    MhaConfig,
    MlaConfig,
    SparseMlaConfig,
)
from attnplat.config.names import AttnType, Operation
from attnplat.errors import ConfigError, UnknownNameError
from attnplat.platforms.acceptance import is_about_the_cache, is_packed_kv, with_shared_numbers
from attnplat.platforms.indexer import effective_indexer
from attnplat.platforms.nearest import fixes
from attnplat.platforms.world import World

LayerPredicate = Callable[[Any, World], bool]


@dataclass(frozen=True)
class Ranked:
    """A member of a preference's order that counts only when `when(config, world)` holds."""

    name: str
    when: LayerPredicate


@dataclass(frozen=True, kw_only=True)
class Preference:
    """One row of a platform's taste: which backends to try, in which order, and why.

    Attributes:
        serves: the operations the row is for.
        order: backend names, the most preferred first; `Ranked` where a condition applies.
        because: why in this order, a clause that completes "... because".
        on: device attribute -> limit; the row is for devices within all of them.
        when: predicate of config and world; None is always.
        never_first: name -> why it stands in the order though it is first for nothing.
    """

    serves: frozenset[Operation]
    order: tuple[str | Ranked, ...]
    because: str
    on: Mapping[str, Limit] = FrozenMap()
    when: LayerPredicate | None = None
    never_first: Mapping[str, str] = FrozenMap()

    def matches(self, config: LayerConfig, world: World) -> bool:
        """Whether this row is for `config` in `world`."""
        return (
            config.operation in self.serves
            and all(limit.accepts(getattr(world.device, name)) for name, limit in self.on.items())
            and (self.when is None or self.when(config, world))
        )

    def names(self, config: LayerConfig, world: World) -> tuple[str, ...]:
        """The backends of this row for `config`, in order."""
        return tuple(
            m.name if isinstance(m, Ranked) else m
            for m in self.order
            if not isinstance(m, Ranked) or m.when(config, world)
        )

    @property
    def members(self) -> frozenset[str]:
        """Every backend that the row names, under whatever condition."""
        return frozenset(m.name if isinstance(m, Ranked) else m for m in self.order)


@dataclass(frozen=True)
class ByName:
    """A backend that stands in no row: chosen by name or by a model's own code only."""

    name: str
    because: str


@dataclass(frozen=True)
class Tables:
    """A platform's facts and taste.

    Attributes:
        catalog: every backend the platform knows. A name may stand more than once, for
            operations that do not overlap.
        preferences: the rows of taste; the first that matches decides.
        by_name: backends in no row, each with why.
        last_resort_automatic: whether last-resort backends are chosen without being asked for.
        exists_for: name -> the layers (predicate of config and world) that it exists for, in
            a rule set where it does not exist for all.
        foreign: name -> platform of the backends that belong to other platforms only.
        foreign_backend: (name, operation) -> such a backend, for rule sets that accept them.
        accepts: acceptance rules of another rule set that are in force (`ACCEPTANCE_RULES`),
            each with predicates of which one must hold.
    """

    catalog: tuple[Backend, ...]
    preferences: tuple[Preference, ...]
    by_name: tuple[ByName, ...] = ()
    last_resort_automatic: bool = False
    exists_for: Mapping[str, LayerPredicate] = FrozenMap()
    foreign: Mapping[str, str] = FrozenMap()
    foreign_backend: Callable[[str, Operation], Backend | None] | None = None
    accepts: Mapping[str, tuple[LayerPredicate, ...]] = FrozenMap()
    _index: dict[str, tuple[Backend, ...]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        for backend in self.catalog:
            self._index[backend.name] = (*self._index.get(backend.name, ()), backend)

    def __hash__(self) -> int:
        return hash((self.catalog, self.preferences, self.last_resort_automatic))

    def find(self, name: str, operation: Operation) -> Backend | None:
        """The entry of that name for `operation`, else any of that name, else None."""
        entries = self._index.get(name, ())
        for backend in entries:
            if operation in backend.serves:
                return backend
        return entries[0] if entries else None

    def exists(self, name: str, config: LayerConfig, world: World) -> bool:
        """Whether these tables have a backend of that name for `config`."""
        condition = self.exists_for.get(name)
        if condition is not None and not condition(config, world):
            return False
        return name in self._index or (self.foreign_backend is not None and name in self.foreign)

    def allows(self, rule: str, config: LayerConfig, world: World) -> bool:
        """Whether an acceptance rule of another rule set is in force for this layer."""
        predicates = self.accepts.get(rule)
        return predicates is not None and any(when(config, world) for when in predicates)

    def row_for(self, config: LayerConfig, world: World) -> Preference | None:
        """The first row that is for `config` in `world`."""
        for row in self.preferences:
            if row.matches(config, world):
                return row
        return None


@dataclass(frozen=True)
class Selection:
    """What was decided for one layer in one world, and every reason.

    Attributes:
        config: the layer's config as judged, after the run's and the user's wishes.
        world: all that the choice depended on.
        requested: the backend asked for by name, or None for automatic.
        requested_by: who asked: caller, user, environment ... ("" for automatic).
        row: the preference row that gave the order; None for a request or when none fits.
        candidates: the names judged, in rank order.
        accepted: the backends that fit, in rank order; the first is the choice.
        rejections: name -> its reasons, for the candidates that do not fit.
        parts: part -> its own Selection (an MLA layer's prefill, a sparse layer's indexer).
        unread: attention-config fields that were set and the chosen backend does not read.
        replaced: the request that an acceptance rule of another rule set dropped.
        offers: judges changes again and yields those that would be accepted; see `fixes`.
    """

    config: LayerConfig
    world: World
    requested: str | None
    requested_by: str
    row: Preference | None
    candidates: tuple[str, ...]
    accepted: tuple[Backend, ...]
    rejections: Mapping[str, tuple[Rejection, ...]]
    parts: Mapping[str, Selection] = FrozenMap()
    unread: frozenset[str] = frozenset()
    replaced: str | None = None
    offers: Callable[[], Iterable[str]] = field(default=tuple, compare=False, repr=False)

    @cached_property
    def fixes(self) -> tuple[str, ...]:
        """For a refusal, changes that would be accepted, the nearest first.

        Found when asked for: it takes many times as long as the refusal itself.
        """
        return tuple(islice(self.offers(), MOST_FIXES))

    @property
    def chosen(self) -> Backend | None:
        """The first accepted backend, unless a part of the layer has none."""
        complete = all(part.chosen is not None for part in self.parts.values())
        return self.accepted[0] if self.accepted and complete else None

    @property
    def ok(self) -> bool:
        """Whether the layer and every part of it can be served."""
        return self.chosen is not None

    def explain(self) -> str:
        """The decision and every reason, as text."""
        from attnplat.platforms.explain import explain

        return explain(self)

    def failure(self) -> str:
        """Why no backend fits, the constraint that rules out all first, and the nearest fix."""
        from attnplat.platforms.explain import failure

        return failure(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; equal inputs give equal dicts, so two can be compared."""
        return {
            "layer": self.config.to_dict(),
            "device": self.world.device.to_dict(),
            "requested": self.requested,
            "requested_by": self.requested_by,
            "chosen": self.chosen.name if self.chosen else None,
            "mark": str(self.chosen.mark) if self.chosen else None,
            "because": self.row.because if self.row else None,
            "accepted": [b.name for b in self.accepted],
            "rejected": {
                name: [r.to_dict() for r in reasons] for name, reasons in self.rejections.items()
            },
            "parts": {name: part.to_dict() for name, part in self.parts.items()},
            "unread": sorted(self.unread),
            "fixes": list(self.fixes),
        }


MOST_FIXES = 3
NO_REASONS: tuple[Rejection, ...] = ()

# Attention-config fields that selection itself honours, whatever backend is chosen.
SELECTION_READS = frozenset(
    {"backend", "backend_per_kind", "mla_prefill_backend", "use_non_causal"}
)


def select(
    tables: Tables, config: LayerConfig, world: World, *, allow_reference: bool = False
) -> Selection:
    """Choose backends for `config` in `world` from a platform's `tables`.

    Pure: reads nothing but its arguments. `allow_reference` lets last-resort backends be
    chosen automatically where the platform's tables do not.

    Raises:
        UnknownNameError: a requested backend that this platform's operations do not know.
        ConfigError: an attention-config field is set that no backend usable here reads.
    """
    selection = _decide(tables, config, world, allow_reference)
    if selection.ok:
        return selection

    def offers() -> Iterable[str]:
        return fixes(
            selection,
            lambda config, world, allow: _decide(tables, config, world, allow),
            lambda name, config, world: judge(tables, name, config, world),
        )

    return replace(selection, offers=offers)


def _decide(tables: Tables, config: LayerConfig, world: World, allow_reference: bool) -> Selection:
    config = effective_config(config, world)
    requested, requested_by = _requested(config, world)
    if requested is not None and tables.allows("request_ignored", config, world):
        automatic = _rank(tables, config, world, None, "", allow_reference)
        return replace(automatic, replaced=requested)
    selection = _rank(tables, config, world, requested, requested_by, allow_reference)
    if requested is None or selection.accepted or not _may_replace(tables, selection):
        return selection
    wishes = replace(world.wishes, backend=None, backend_per_kind=(), mla_prefill_backend=None)
    automatic = _rank(tables, config, world.replace(wishes=wishes), None, "", allow_reference)
    told = FrozenMap({**selection.rejections, **automatic.rejections})
    return replace(automatic, world=world, replaced=requested, rejections=told)


def _rank(
    tables: Tables,
    config: LayerConfig,
    world: World,
    requested: str | None,
    requested_by: str,
    allow_reference: bool,
) -> Selection:
    row = None if requested else tables.row_for(config, world)
    names = _candidates(tables, config, world, requested, row, allow_reference)
    accepted: list[Backend] = []
    rejections: dict[str, tuple[Rejection, ...]] = {}
    compared = _as_compared(tables, config, world)
    for name in names:
        if _is_unvalidated(tables, name, config, world, requested):
            backend, reasons = _declared(tables, name, config, world), NO_REASONS
        else:
            backend, reasons = _judge(tables, name, config, compared)
        if reasons:
            rejections[name] = reasons
        elif backend is not None:
            accepted.append(backend)
    apart = tables.allows("parts_apart", config, world)
    parts = {
        part: _decide(tables, part_config, world, allow_reference)
        for part, part_config in (() if apart else parts_of(config))
    }
    return Selection(
        config=config,
        world=world,
        requested=requested,
        requested_by=requested_by,
        row=row,
        candidates=tuple(names),
        accepted=tuple(accepted),
        rejections=FrozenMap(rejections),
        parts=FrozenMap(parts),
        unread=_unread(tables, config, world, accepted[0] if accepted else None, parts.values()),
    )


def _may_replace(tables: Tables, refused: Selection) -> bool:
    """Whether another rule set's acceptance rules replace a request that did not fit."""
    config, world = refused.config, refused.world
    if tables.allows("request_replaced", config, world):
        return True
    if not tables.allows("packed_kv_fallback", config, world):
        return False
    (reasons,) = refused.rejections.values()
    return is_packed_kv(config, world) and is_about_the_cache(reasons)


def _is_unvalidated(
    tables: Tables, name: str, config: LayerConfig, world: World, requested: str | None
) -> bool:
    """Whether another rule set's acceptance rules use the name without any check."""
    if not tables.accepts:
        return False
    unvalidated = tables.allows("row_unvalidated", config, world)
    if requested is None:
        return unvalidated
    row = tables.row_for(config, world)
    named = row is not None and name in row.members
    return named and (unvalidated or tables.allows("request_unvalidated", config, world))


def effective_config(config: LayerConfig, world: World) -> LayerConfig:
    """`config` after what the run and the user's wishes change in it."""
    if isinstance(config, IndexerConfig):
        return effective_indexer(config, world)
    changes: dict[str, Any] = {}
    provenance = list(config.provenance)
    if config.block_size is None and world.run.user_block_size and config.has_kv_cache:
        changes["block_size"] = world.run.user_block_size
        provenance.append(("block_size", "user"))
    non_causal = world.wishes.use_non_causal and isinstance(config, MhaConfig | MlaConfig)
    if non_causal and config.causal and config.attn_type == AttnType.DECODER:  # type: ignore[attr-defined]
        changes["causal"] = False
        provenance.append(("causal", world.wishes.source_of("use_non_causal")))
    if not changes:
        return config
    return config.replace(**changes, provenance=tuple(provenance))


def parts_of(config: LayerConfig) -> Iterator[tuple[str, LayerConfig]]:
    """The parts of a layer that are chosen on their own: it is served only if they all are."""
    if isinstance(config, MlaConfig):
        yield "prefill", config.prefill()
    # A sparse model's layers that choose no keys of their own have no indexer.
    if isinstance(config, SparseMlaConfig) and config.index_topk is not None:
        yield "indexer", config.indexer()


def judge(
    tables: Tables, name: str, config: LayerConfig, world: World
) -> tuple[Backend | None, tuple[Rejection, ...]]:
    """The resolved backend of that name and every reason against it (none: it fits)."""
    return _judge(tables, name, config, _as_compared(tables, config, world))


def _as_compared(tables: Tables, config: LayerConfig, world: World) -> World:
    """`world` with the numbers that another rule set's acceptance rules compare."""
    shared = tables.allows("shared_capability_numbers", config, world)
    return with_shared_numbers(world) if shared else world


def _judge(
    tables: Tables, name: str, config: LayerConfig, world: World
) -> tuple[Backend | None, tuple[Rejection, ...]]:
    condition = tables.exists_for.get(name)
    if condition is not None and not condition(config, world):
        takes = "there is no such backend for this layer under the rules in force"
        return None, (Rejection(name, "absent", "backend", name, takes, "device"),)
    backend = _declared(tables, name, config, world)
    if backend is None:
        return None, (_foreign(tables, name, world),)
    backend = world.resolve(backend)
    asked_of_all = tables.allows("cache_asked_of_all", config, world)
    reasons = backend.refuse(config, world, cached=True if asked_of_all else None)
    if backend.loads is None and not world.device.simulated:
        takes = "its facts are known and attnplat has no adapter for it yet"
        reasons = (*reasons, Rejection(name, "adapter", "adapter", None, takes, "device"))
    return backend, reasons


def _declared(tables: Tables, name: str, config: LayerConfig, world: World) -> Backend | None:
    """The platform's backend of that name; another's where an acceptance rule admits it."""
    backend = tables.find(name, config.operation)
    if backend is not None or tables.foreign_backend is None:
        return backend
    if not tables.allows("foreign_platform", config, world):
        return None
    return tables.foreign_backend(name, config.operation)


def _foreign(tables: Tables, name: str, world: World) -> Rejection:
    platform = tables.foreign.get(name)
    if platform is None:
        raise UnknownNameError("backend", name, {b.name for b in tables.catalog})
    takes = f"it belongs to the platform {platform}; this device is {world.device}"
    return Rejection(name, "platform", "platform", world.device.platform, takes, "device")


def _requested(config: LayerConfig, world: World) -> tuple[str | None, str]:
    wishes = world.wishes
    if config.operation == Operation.MLA_PREFILL:
        name: str | None = wishes.mla_prefill_backend
        return name, wishes.source_of("mla_prefill_backend") if name else ""
    if config.operation in (Operation.INDEXER, Operation.STATE):
        return None, ""  # no wish names their kernels; their dtype fields act instead
    backend, source = wishes.backend_for(config.kind)
    return (str(backend), source) if backend else (None, "")


def _candidates(
    tables: Tables,
    config: LayerConfig,
    world: World,
    requested: str | None,
    row: Preference | None,
    allow_reference: bool,
) -> Iterable[str]:
    if requested is not None:
        return (requested,)
    if row is None:
        return ()
    # A rule set may lack a backend that stands in the row.
    names = tuple(n for n in row.names(config, world) if tables.exists(n, config, world))
    if allow_reference or tables.last_resort_automatic:
        return names
    return tuple(n for n in names if not _is_last_resort(tables, n, config.operation))


def _is_last_resort(tables: Tables, name: str, operation: Operation) -> bool:
    backend = tables.find(name, operation)
    return backend is not None and backend.last_resort


def _unread(
    tables: Tables,
    config: LayerConfig,
    world: World,
    chosen: Backend | None,
    parts: Iterable[Selection],
) -> frozenset[str]:
    """Wishes that were set and nothing chosen honours.

    One that nothing usable on this device could ever honour is refused, never swallowed.
    """
    unread = world.wishes.set_fields() - SELECTION_READS
    if not unread:
        return frozenset()
    unread -= chosen.reads if chosen else frozenset()
    for part in parts:
        unread -= part.chosen.reads if part.chosen else frozenset()
    usable = [b for b in tables.catalog if b.loads is not None or world.device.simulated]
    hopeless = unread - frozenset().union(*(b.reads for b in usable))
    if hopeless and not tables.allows("wish_ignored", config, world):
        name = min(hopeless)
        raise ConfigError(
            f"attention config field {name} is set to {getattr(world.wishes, name)!r} (by the "
            f"{world.wishes.source_of(name)}), and no backend usable on {world.device} reads it; "
            "leave it out"
        )
    return frozenset(unread)
