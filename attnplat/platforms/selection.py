"""The choice: one pure function over declared backends, with every reason kept.

`select(tables, config, world)` reads nothing but its arguments, imports no kernel and
works for devices that are not here. The same inputs always give the same Selection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from attnplat.backends.backend import Backend, Rejection, wanted_features
from attnplat.backends.limits import Limit
from attnplat.config.frozen import FrozenMap
from attnplat.config.layer import (
    IndexerConfig,
    LayerConfig,
    MhaConfig,
    MlaConfig,
    SparseMlaConfig,
)
from attnplat.config.names import AttnType, Feature, Operation
from attnplat.errors import ConfigError, UnknownNameError
from attnplat.platforms.acceptance import is_about_the_cache, is_packed_kv, with_shared_numbers
from attnplat.platforms.indexer import effective_indexer
from attnplat.platforms.world import World

if TYPE_CHECKING:
    from attnplat.platforms.nearest import Change

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
        if config.operation not in self.serves:
            return False
        for name, limit in self.on.items():
            if not limit.accepts(getattr(world.device, name)):
                return False
        return self.when is None or self.when(config, world)

    def names(self, config: LayerConfig, world: World) -> tuple[str, ...]:
        """The backends of this row for `config`, in order."""
        names = []
        for member in self.order:
            if not isinstance(member, Ranked):
                names.append(member)
            elif member.when(config, world):
                names.append(member.name)
        return tuple(names)

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
    _entries: dict[Operation, dict[str, Backend]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    _rows: dict[Operation, tuple[Preference, ...]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        for operation in Operation:
            rows = tuple(row for row in self.preferences if operation in row.serves)
            self._rows[operation] = rows
            entries = self._entries[operation] = {}
            for backend in self.catalog:
                held = entries.setdefault(backend.name, backend)
                if operation in backend.serves and operation not in held.serves:
                    entries[backend.name] = backend

    def __hash__(self) -> int:
        return hash((self.catalog, self.preferences, self.last_resort_automatic))

    def find(self, name: str, operation: Operation) -> Backend | None:
        """The entry of that name for `operation`, else any of that name, else None."""
        return self._entries[operation].get(name)

    def exists(self, name: str, config: LayerConfig, world: World) -> bool:
        """Whether these tables have a backend of that name for `config`."""
        condition = self.exists_for.get(name)
        if condition is not None and not condition(config, world):
            return False
        known = name in self._entries[config.operation]
        return known or (self.foreign_backend is not None and name in self.foreign)

    def allows(self, rule: str, config: LayerConfig, world: World) -> bool:
        """Whether an acceptance rule of another rule set is in force for this layer."""
        predicates = self.accepts.get(rule)
        return predicates is not None and any(when(config, world) for when in predicates)

    def row_for(self, config: LayerConfig, world: World) -> Preference | None:
        """The first row that is for `config` in `world`."""
        for row in self._rows[config.operation]:
            if row.matches(config, world):
                return row
        return None

    def candidates(
        self, row: Preference, config: LayerConfig, world: World, last_resorts: bool
    ) -> tuple[str, ...]:
        """The backends that `row` puts in order, last resorts only where they are let in.

        A rule set may lack a backend that stands in the row.
        """
        known = self._entries[config.operation]
        names = []
        for name in row.names(config, world):
            backend = known.get(name)
            unsure = backend is None or name in self.exists_for
            if unsure and not self.exists(name, config, world):
                continue
            if backend is None or last_resorts or not backend.last_resort:
                names.append(name)
        return tuple(names)


@dataclass(frozen=True)
class Selection:
    """What was decided for one layer in one world, and every reason.

    Attributes:
        tables, asked, world, allow_reference: what was asked: see `select`.
        config: the layer's config as judged, after the run's and the user's wishes.
        requested: the backend asked for by name, or None for automatic.
        requested_by: who asked: caller, user, environment ... ("" for automatic).
        row: the preference row that gave the order; None for a request or when none fits.
        candidates: the names judged, in rank order.
        accepted: the backends that fit, in rank order; the first is the choice.
        rejections: name -> its reasons, for the candidates that do not fit.
        parts: part -> its own Selection (an MLA layer's prefill, a sparse layer's indexer).
        unread: attention-config fields that were set and the chosen backend does not read.
        replaced: the request that an acceptance rule of another rule set dropped.
    """

    tables: Tables = field(repr=False)
    asked: LayerConfig
    world: World
    allow_reference: bool
    config: LayerConfig
    requested: str | None
    requested_by: str
    row: Preference | None
    candidates: tuple[str, ...]
    accepted: tuple[Backend, ...]
    rejections: Mapping[str, tuple[Rejection, ...]]
    parts: Mapping[str, Selection] = FrozenMap()
    unread: frozenset[str] = frozenset()
    replaced: str | None = None

    @cached_property
    def fixes(self) -> tuple[Change, ...]:
        """For a refusal, changes that would be accepted, the nearest first.

        Found when asked for: it takes many times as long as the refusal itself.
        """
        from attnplat.platforms.nearest import MOST_CHANGES, fixes

        return tuple(islice(fixes(self), MOST_CHANGES))

    @cached_property
    def advice(self) -> tuple[Change, ...]:
        """For an automatic choice, changes after which a better one would be made.

        Found when asked for, as `fixes` are.
        """
        from attnplat.platforms.advice import advice
        from attnplat.platforms.nearest import MOST_CHANGES

        return tuple(islice(advice(self), MOST_CHANGES))

    def again(
        self,
        asked: LayerConfig | None = None,
        world: World | None = None,
        *,
        allow_reference: bool | None = None,
    ) -> Selection:
        """The same question with some of it changed, decided anew."""
        return select(
            self.tables,
            self.asked if asked is None else asked,
            self.world if world is None else world,
            allow_reference=self.allow_reference if allow_reference is None else allow_reference,
        )

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
            "fixes": [change.to_dict() for change in self.fixes],
            "advice": [change.to_dict() for change in self.advice],
        }


# Attention-config fields that selection itself honours, whatever backend is chosen.
SELECTION_READS = frozenset({"backend", "backend_per_kind", "use_non_causal"})
# Those that it honours for latent layers alone.
LATENT_READS = SELECTION_READS | {"mla_prefill_backend"}


def select(
    tables: Tables, config: LayerConfig, world: World, *, allow_reference: bool = False
) -> Selection:
    """Choose backends for `config` in `world` from a platform's `tables`.

    Pure: reads nothing but its arguments. `allow_reference` lets last-resort backends be
    chosen automatically where the platform's tables do not.

    Raises:
        UnknownNameError: a requested backend that this platform's operations do not know.
        ConfigError: what is asked about is no layer config, or an attention-config field is set
            that no backend usable here reads.
    """
    if not isinstance(config, LayerConfig):
        raise ConfigError(
            f"{config!r} is no layer config; give one such as MhaConfig(head_size=128)"
        )
    return _decide(tables, config, world, allow_reference)


def _decide(tables: Tables, asked: LayerConfig, world: World, allow_reference: bool) -> Selection:
    config = effective_config(asked, world)
    requested, requested_by = _requested(config, world)
    question = _Question(tables, asked, config, world, allow_reference)
    if requested is None:
        return _rank(question)
    if tables.allows("request_ignored", config, world):
        return replace(_rank(question), replaced=requested)
    selection = _rank(question, requested, requested_by)
    if selection.accepted or not _may_replace(tables, selection):
        return selection
    wishes = replace(world.wishes, backend=None, backend_per_kind=(), mla_prefill_backend=None)
    automatic = _rank(question._replace(world=world.replace(wishes=wishes)))
    told = FrozenMap({**selection.rejections, **automatic.rejections})
    return replace(automatic, world=world, replaced=requested, rejections=told)


class _Question(NamedTuple):
    """What is to be decided: the tables, the layer as asked and as judged, the world."""

    tables: Tables
    asked: LayerConfig
    config: LayerConfig
    world: World
    allow_reference: bool


def _rank(question: _Question, requested: str | None = None, requested_by: str = "") -> Selection:
    tables, asked, config, world, allow_reference = question
    row = None
    names: tuple[str, ...] = () if requested is None else (requested,)
    if requested is None and (row := tables.row_for(config, world)) is not None:
        last_resorts = allow_reference or tables.last_resort_automatic
        names = tables.candidates(row, config, world, last_resorts)
    accepted, rejections = _judge_all(tables, names, config, world, requested)
    parts: dict[str, Selection] = {}
    if isinstance(config, MlaConfig) and not tables.allows("parts_apart", config, world):
        for part, part_config in parts_of(config):
            parts[part] = _decide(tables, part_config, world, allow_reference)
    return Selection(
        tables=tables,
        asked=asked,
        world=world,
        allow_reference=allow_reference,
        config=config,
        requested=requested,
        requested_by=requested_by,
        row=row,
        candidates=names,
        accepted=accepted,
        rejections=FrozenMap(rejections),
        parts=FrozenMap(parts),
        unread=_unread(tables, config, world, accepted[0] if accepted else None, parts.values()),
    )


def _judge_all(
    tables: Tables, names: Iterable[str], config: LayerConfig, world: World, requested: str | None
) -> tuple[tuple[Backend, ...], dict[str, tuple[Rejection, ...]]]:
    accepted: list[Backend] = []
    rejections: dict[str, tuple[Rejection, ...]] = {}
    if _is_unvalidated(tables, config, world, requested):
        declared = (_declared(tables, name, config, world) for name in names)
        return tuple(backend for backend in declared if backend is not None), rejections
    terms = _terms(tables, config, world)
    for name in names:
        backend, reasons = _judge(tables, name, config, terms)
        if reasons:
            rejections[name] = reasons
        elif backend is not None:
            accepted.append(backend)
    return tuple(accepted), rejections


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
    tables: Tables, config: LayerConfig, world: World, requested: str | None
) -> bool:
    """Whether another rule set's acceptance rules use the candidates without any check."""
    if not tables.accepts:
        return False
    unvalidated = tables.allows("row_unvalidated", config, world)
    if requested is None:
        return unvalidated
    row = tables.row_for(config, world)
    named = row is not None and requested in row.members
    return named and (unvalidated or tables.allows("request_unvalidated", config, world))


def effective_config(config: LayerConfig, world: World) -> LayerConfig:
    """`config` after what the run and the user's wishes change in it."""
    if isinstance(config, IndexerConfig):
        return effective_indexer(config, world)
    changes: dict[str, Any] = {}
    sources: list[tuple[str, str]] = []
    if config.block_size is None and world.run.user_block_size and config.has_kv_cache:
        changes["block_size"] = world.run.user_block_size
        sources.append(("block_size", "user"))
    non_causal = world.wishes.use_non_causal and isinstance(config, MhaConfig | MlaConfig)
    if non_causal and config.causal and config.attn_type == AttnType.DECODER:  # type: ignore[attr-defined]
        changes["causal"] = False
        sources.append(("causal", world.wishes.source_of("use_non_causal")))
    if not changes:
        return config
    return config.replace(**changes, provenance=(*config.provenance, *sources))


def parts_of(config: LayerConfig) -> Iterator[tuple[str, LayerConfig]]:
    """The parts of a layer that are chosen on their own: it is served only if they all are."""
    if isinstance(config, MlaConfig):
        yield "prefill", config.prefill()
    # A sparse model's layers that choose no keys of their own have no indexer.
    if isinstance(config, SparseMlaConfig) and config.index_topk is not None:
        yield "indexer", config.indexer()


class _Terms(NamedTuple):
    """What is the same for every backend that is asked about a layer.

    Attributes:
        world: with the numbers that another rule set's acceptance rules compare.
        cached: whether what concerns the KV cache is asked.
        wanted: the features that the layer and the run want together, sorted.
    """

    world: World
    cached: bool
    wanted: list[Feature]


def _terms(tables: Tables, config: LayerConfig, world: World) -> _Terms:
    cached = config.has_kv_cache
    if tables.accepts:
        cached = cached or tables.allows("cache_asked_of_all", config, world)
        if tables.allows("shared_capability_numbers", config, world):
            world = with_shared_numbers(world)
    return _Terms(world, cached, sorted(wanted_features(config, world, cached)))


def judge(
    tables: Tables, name: str, config: LayerConfig, world: World
) -> tuple[Backend | None, tuple[Rejection, ...]]:
    """The resolved backend of that name and every reason against it (none: it fits)."""
    return _judge(tables, name, config, _terms(tables, config, world))


def _judge(
    tables: Tables, name: str, config: LayerConfig, terms: _Terms
) -> tuple[Backend | None, tuple[Rejection, ...]]:
    world, cached, wanted = terms
    condition = tables.exists_for.get(name)
    if condition is not None and not condition(config, world):
        takes = "there is no such backend for this layer under the rules in force"
        return None, (Rejection(name, "absent", "backend", name, takes, "device"),)
    declared = _declared(tables, name, config, world)
    if declared is None:
        return None, (_foreign(tables, name, world),)
    backend, standing, _ = world.settle(declared)
    reasons = backend.reasons_against(config, world, cached, wanted, standing)
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
    if wishes.backend is None and not wishes.backend_per_kind:
        return None, ""
    backend, source = wishes.backend_for(config.kind)
    return (str(backend), source) if backend else (None, "")


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
    latent = config.operation in (Operation.MLA, Operation.SPARSE_MLA, Operation.MLA_PREFILL)
    unread = world.wishes.set_fields() - (LATENT_READS if latent else SELECTION_READS)
    if not unread:
        return unread
    unread -= chosen.reads if chosen else frozenset()
    for part in parts:
        unread -= part.chosen.reads if part.chosen else frozenset()
    usable = [b for b in tables.catalog if b.loads is not None or world.device.simulated]
    hopeless = unread - LATENT_READS.union(*(b.reads for b in usable))
    if hopeless and not tables.allows("wish_ignored", config, world):
        name = min(hopeless)
        raise ConfigError(
            f"attention config field {name} is set to {getattr(world.wishes, name)!r} (by the "
            f"{world.wishes.source_of(name)}), and no backend usable on {world.device} reads it; "
            "leave it out"
        )
    return frozenset(unread)
