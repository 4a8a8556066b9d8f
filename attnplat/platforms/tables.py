"""What a platform knows and what it prefers: the two tables that a choice is made from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from attnplat.backends.backend import Backend
from attnplat.backends.limits import Limit
from attnplat.config.frozen import FrozenMap
from attnplat.config.layer import LayerConfig
from attnplat.config.names import Operation
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
        if config.operation not in self.serves:
            return False
        for name, limit in self.on.items():
            if not limit.accepts(getattr(world.device, name)):
                return False
        return self.when is None or self.when(config, world)

    def names(self, config: LayerConfig, world: World) -> Iterator[str]:
        """The backends of this row for `config`, in order."""
        for member in self.order:
            if not isinstance(member, Ranked):
                yield member
            elif member.when(config, world):
                yield member.name

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
