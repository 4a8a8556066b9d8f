"""Where another engine of the same backend names decides otherwise, as data.

A platform's `catalog` and `preferences` say what attnplat does. Each `Difference` beside
them says where a rule set (`vllm-0.33`) departs: a limit, a feature, a rule, a list
position, or an acceptance rule. `tables_under(tables, differences, device)` applies them;
nothing else does, and the documentation of differences is generated from the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from attnplat.backends.backend import Backend
from attnplat.backends.composite import rule_of_half, via
from attnplat.backends.limits import Cases, Limit
from attnplat.config.frozen import FrozenMap
from attnplat.config.names import Feature
from attnplat.errors import UnknownNameError
from attnplat.platforms.acceptance import ACCEPTANCE_RULES
from attnplat.platforms.device import DeviceInfo
from attnplat.platforms.selection import Preference, Tables

RULE_SETS = ("attnplat", "vllm-0.33")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One departure of a rule set from what attnplat does.

    Attributes:
        backend: the backend concerned, or several that share a cause; None for a row of
            preferences or an acceptance rule.
        subject: what differs:
            `takes.FIELD` (theirs: a Limit or Cases, None for no limit, or a function from
            what attnplat declares to what they do),
            `feature.NAME` (theirs: bool or a predicate of the world),
            `features` (theirs: the whole set),
            `on.ATTRIBUTE` (theirs: a Limit, None for no limit),
            `requires` (theirs: a tuple of Packages),
            `rule.CODE` (theirs: a Rule, or None where they have no such rule),
            `exists` (theirs: False, or a predicate of config and world: the layers that
            the name exists for; or one of these by name),
            `order` (theirs: Preference rows that come before all others),
            `accepts.RULE` (theirs: True, or a predicate of config and world: the layers
            that it is in force for; the rules are `ACCEPTANCE_RULES`).
        theirs: their value, as above.
        ours: what attnplat does, in words.
        because: why attnplat does so.
        source: where their behaviour was read or seen.
        where: device attribute -> limit; empty is every device of the platform.
        operation: for a name that stands more than once in the catalog, which entry.
    """

    backend: str | tuple[str, ...] | None
    subject: str
    theirs: Any
    ours: str
    because: str
    source: str
    where: Mapping[str, Limit] = FrozenMap()
    operation: str | None = None

    def __post_init__(self) -> None:
        head = self.subject.partition(".")[0]
        if head not in _APPLY and head not in ("order", "accepts"):
            raise UnknownNameError(
                "difference subject", self.subject, [*_APPLY, "order", "accepts"]
            )
        object.__setattr__(self, "where", FrozenMap(self.where))

    @property
    def backends(self) -> tuple[str, ...]:
        """The names of the backends concerned; none for rows and acceptance rules."""
        if self.backend is None:
            return ()
        return (self.backend,) if isinstance(self.backend, str) else self.backend

    def applies_to(self, device: DeviceInfo) -> bool:
        """Whether this departure is one for `device`."""
        return all(limit.accepts(getattr(device, name)) for name, limit in self.where.items())


def tables_under(tables: Tables, differences: Iterable[Difference], device: DeviceInfo) -> Tables:
    """`tables` with every difference that concerns `device` applied."""
    concerned = [d for d in differences if d.applies_to(device)]
    about: dict[str, list[Difference]] = {}
    for difference in concerned:
        for name in difference.backends:
            about.setdefault(name, []).append(difference)
    catalog: list[Backend] = []
    for backend in tables.catalog:
        changed: Any = backend
        for half in backend.half_of:
            for difference in about.get(half, ()):
                changed = _apply_to_half(difference, half, changed)
        for difference in about.get(backend.name, ()):
            if changed is not None and _is_about(difference, backend):
                changed = _apply(difference, changed)
        if changed is not None:
            catalog.append(changed)
    return replace(
        tables,
        catalog=tuple(catalog),
        exists_for=_existences(concerned),
        preferences=(*_rows(concerned), *tables.preferences),
        accepts=_acceptances(concerned),
    )


def _is_about(difference: Difference, backend: Backend) -> bool:
    return difference.operation is None or difference.operation in backend.serves


def _rows(differences: Iterable[Difference]) -> tuple[Preference, ...]:
    return tuple(row for d in differences if d.subject == "order" for row in d.theirs)


def _existences(differences: Iterable[Difference]) -> FrozenMap[str, Any]:
    found = [d for d in differences if d.subject == "exists" and d.operation is None]
    return FrozenMap({n: _for_name(d.theirs, n) or _never for d in found for n in d.backends})


def _for_name(theirs: Any, name: str) -> Any:
    return theirs[name] if isinstance(theirs, Mapping) else theirs


def _acceptances(differences: Iterable[Difference]) -> FrozenMap[str, tuple[Any, ...]]:
    found: dict[str, tuple[Any, ...]] = {}
    for difference in differences:
        head, _, rule = difference.subject.partition(".")
        if head == "accepts":
            if rule not in ACCEPTANCE_RULES:
                raise UnknownNameError("acceptance rule", rule, ACCEPTANCE_RULES)
            when = difference.theirs if callable(difference.theirs) else _always
            found[rule] = (*found.get(rule, ()), when)
    return FrozenMap(found)


def _always(config: Any, world: Any) -> bool:
    return True


def _never(config: Any, world: Any) -> bool:
    return False


def _apply(difference: Difference, backend: Backend) -> Backend | None:
    head, _, name = difference.subject.partition(".")
    return _APPLY[head](backend, name, difference.theirs)


def _apply_to_half(difference: Difference, half: str, backend: Backend) -> Backend:
    """A composite asks the rules of its halves, so it follows what differs of them."""
    head, _, code = difference.subject.partition(".")
    if head != "rule":
        return backend
    theirs = difference.theirs and rule_of_half(backend, half, difference.theirs)
    return _apply_rule(backend, via(half, code), theirs)


def _apply_table(table: str) -> Callable[[Backend, str, Any], Backend]:
    def apply(backend: Backend, name: str, theirs: Any) -> Backend:
        limits = dict(getattr(backend, table))
        ours = limits.pop(name, None)
        limit = theirs(ours) if callable(theirs) else theirs
        if limit is not None:
            limits[name] = limit
        changes: dict[str, Any] = {table: FrozenMap(limits)}
        return replace(backend, **changes)

    return apply


def _apply_feature(backend: Backend, name: str, theirs: Any) -> Backend:
    feature = frozenset({Feature(name)})

    def changed(features: frozenset[Feature], takes: bool) -> frozenset[Feature]:
        return features | feature if takes else features - feature

    ours = backend.features
    if not callable(theirs) and not isinstance(ours, Cases):
        return replace(backend, features=changed(ours, theirs))
    return replace(backend, features=_FeatureCases(ours, theirs, changed))


class _FeatureCases(Cases):
    """A backend's features with one decided by the world."""

    def __init__(self, ours: Any, theirs: Any, change: Callable[..., frozenset[Feature]]) -> None:
        super().__init__(otherwise=ours)
        self._theirs, self._change = theirs, change

    def resolve(self, world: Any) -> frozenset[Feature]:
        ours = self.otherwise
        settled = ours.resolve(world) if isinstance(ours, Cases) else ours
        takes = self._theirs(world) if callable(self._theirs) else self._theirs
        return self._change(settled, takes)


def _apply_requires(backend: Backend, name: str, theirs: Any) -> Backend:
    return replace(backend, requires=tuple(theirs))


def _apply_rule(backend: Backend, code: str, theirs: Any) -> Backend:
    kept = [rule for rule in backend.forbids if rule.code != code]
    if theirs is not None:
        codes = [rule.code for rule in backend.forbids]
        kept.insert(codes.index(code) if code in codes else len(kept), theirs)
    return replace(backend, forbids=tuple(kept))


def _apply_features(backend: Backend, name: str, theirs: Any) -> Backend:
    return replace(backend, features=frozenset(theirs))


def _apply_exists(backend: Backend, name: str, theirs: Any) -> Backend | None:
    return backend if _for_name(theirs, backend.name) else None


_APPLY: dict[str, Callable[[Backend, str, Any], Backend | None]] = {
    "takes": _apply_table("takes"),
    "on": _apply_table("on"),
    "feature": _apply_feature,
    "features": _apply_features,
    "requires": _apply_requires,
    "rule": _apply_rule,
    "exists": _apply_exists,
}
