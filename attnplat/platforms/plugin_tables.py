"""Plugins' backends among a platform's own: facts beside facts, taste within taste."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from attnplat.backends.backend import Backend
from attnplat.notices import tell_once
from attnplat.platforms.plugin_backend import PluginBackend, failed
from attnplat.platforms.plugin_contents import REST
from attnplat.platforms.selection import ByName, Preference, Ranked, Tables

Holds = Callable[[Any, Any], bool]


@dataclass(frozen=True, eq=False)
class Joining:
    """What one plugin adds to a platform's tables; `label` is its distribution and version.

    Equal to itself alone: what a plugin declares need not have a hash.
    """

    label: str
    catalog: tuple[Backend, ...]
    preferences: tuple[Preference, ...] = ()
    by_name: tuple[ByName, ...] = ()


def joined(tables: Tables, platform: str, plugins: Iterable[Joining]) -> Tables:
    """`tables` with the plugins' backends; of several that want to be first, the first is.

    A backend joins where its limit on `device.platform` accepts the platform, if it has one.
    """
    plugins = tuple(plugins)
    if not plugins:
        return tables
    last_resorts = frozenset(b.name for b in tables.catalog if b.last_resort)
    catalog, by_name, rows = tables.catalog, tables.by_name, tables.preferences
    for plugin in reversed(plugins):
        mine = (b for b in plugin.catalog if isinstance(b, PluginBackend))
        own = tuple(b for b in mine if _is_for(b, platform))
        names = frozenset(b.name for b in own)
        catalog = (*catalog, *own)
        by_name = (*by_name, *(entry for entry in plugin.by_name if entry.name in names))
        rows = _with_rows(rows, plugin, names, last_resorts)
    return replace(tables, catalog=catalog, by_name=by_name, preferences=rows)


def without_plugins(tables: Tables) -> Tables:
    """`tables` as attnplat has them, for rule sets of engines that know no plugins."""
    out = frozenset(b.name for b in tables.catalog if isinstance(b, PluginBackend))
    if not out:
        return tables
    rows = (
        replace(row, order=tuple(m for m in row.order if _name(m) not in out))
        for row in tables.preferences
    )
    return replace(
        tables,
        catalog=tuple(b for b in tables.catalog if b.name not in out),
        by_name=tuple(entry for entry in tables.by_name if entry.name not in out),
        preferences=tuple(row for row in rows if row.order),
    )


def platforms_of(backend: Backend) -> tuple[str, ...]:
    """The platforms that the backend's limit on `device.platform` names; none: every one."""
    limit: Any = backend.on.get("platform")
    return tuple(map(str, getattr(limit, "values", ()))) if limit is not None else ()


def _is_for(backend: Backend, platform: str) -> bool:
    limit = backend.on.get("platform")
    try:
        return limit is None or bool(limit.accepts(platform))  # type: ignore[union-attr]
    except Exception:  # asked again, and explained, when the backend is judged
        return True


def _with_rows(
    rows: tuple[Preference, ...],
    plugin: Joining,
    names: frozenset[str],
    last_resorts: frozenset[str],
) -> tuple[Preference, ...]:
    """The platform's rows with the plugin's members in them, and rows for what has none."""
    for theirs in reversed(plugin.preferences):
        order = tuple(m for m in theirs.order if _name(m) in names or m == REST)
        if order == (REST,):
            continue
        theirs = replace(theirs, order=order)
        changed = [_merged(row, theirs, plugin.label, last_resorts) for row in rows]
        # Where the platform prefers nothing for such a layer, the plugin's row is its row.
        served = frozenset(o for row in rows for o in row.serves if row.when is None and not row.on)
        alone = theirs.serves - served
        if alone:
            changed.append(_standing_alone(replace(theirs, serves=alone), plugin.label))
        rows = tuple(changed)
    return rows


def _merged(
    row: Preference, theirs: Preference, label: str, last_resorts: frozenset[str]
) -> Preference:
    if not row.serves & theirs.serves:
        return row
    at = theirs.order.index(REST)
    holds = _guarded(theirs.matches, label, "a row of preferences")
    before = tuple(_ranked(m, holds, label) for m in theirs.order[:at])
    after = tuple(_ranked(m, holds, label) for m in theirs.order[at + 1 :])
    own = tuple(m for m in row.order if _name(m) not in last_resorts)
    last = tuple(m for m in row.order if _name(m) in last_resorts)
    names = ", ".join(m.name for m in (*before, *after))
    because = f"the plugin {label} has {names}: {theirs.because}"
    sentence = f"{because}; then {row.because}" if before else f"{row.because}; {because}"
    return replace(row, order=(*before, *own, *after, *last), because=sentence)


def _standing_alone(theirs: Preference, label: str) -> Preference:
    holds = _guarded(theirs.matches, label, "a row of preferences")
    order = tuple(_ranked(m, holds, label) for m in theirs.order if m != REST)
    because = f"the plugin {label} has them: {theirs.because}"
    return Preference(serves=theirs.serves, order=order, because=because)


def _ranked(member: str | Ranked, row_holds: Holds, label: str) -> Ranked:
    if not isinstance(member, Ranked):
        return Ranked(member, row_holds)
    own_holds = _guarded(member.when, label, f"the rank of {member.name}")

    def where_both_hold(config: Any, world: Any) -> bool:
        return row_holds(config, world) and own_holds(config, world)

    return Ranked(member.name, where_both_hold)


def _guarded(predicate: Holds, label: str, what: str) -> Holds:
    """The predicate, except that one that raises does not hold, and is told of once."""

    def where_the_plugin_says(config: Any, world: Any) -> bool:
        try:
            return bool(predicate(config, world))
        except Exception as error:
            tell_once(failed(label, what, error))
            return False

    return where_the_plugin_says


def _name(member: str | Ranked) -> str:
    return member.name if isinstance(member, Ranked) else member
