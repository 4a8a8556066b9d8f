"""Plugins: platforms and backends out of other distributions, found by their metadata.

Importing attnplat imports no plugin. When the tables of a platform are asked for, each plugin
is tried in a process of its own (once; the outcome is kept), and then imported. One that
cannot be used is set aside with a reason: the others and attnplat's own never notice.

For the authors of plugins: `CONTRACT` and `REST`; `docs/plugins.md` has the whole story.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

from attnplat.config.backend_names import IN_TREE, is_canonical, join_plugins
from attnplat.config.entry_points import BACKENDS, PLATFORMS, Declared, EntryPoint, declared
from attnplat.config.env import read_env
from attnplat.errors import AttnplatError
from attnplat.platforms.device import PlatformName
from attnplat.platforms.distributions import installed_versions
from attnplat.platforms.inventory import Inventory
from attnplat.platforms.plugin_backend import PluginBackend, without_contents
from attnplat.platforms.plugin_contents import (
    CONTRACT,
    REST,
    Contents,
    PluginProblem,
    read_contents,
)
from attnplat.platforms.plugin_tables import Joining, platforms_of
from attnplat.platforms.plugin_trial import SLOW_S, Outcome, trial_key, try_plugin
from attnplat.storage import Store, cache_folder

__all__ = ["CONTRACT", "REST", "Plugin", "Problem", "installed_plugins", "plugin_platforms"]

_FAILURE_COUNTS_S = 3600.0
"""For so long a trial that took its time and failed is not repeated, but by `doctor`."""


class Problem(NamedTuple):
    """Why a plugin, or a part of it, is not used: the kind, a sentence, and what to do.

    Kinds: `form`, `duplicate`, `contract`, `import`, `shape`, `slow`, `ended`.
    """

    kind: str
    text: str
    fix: str


@dataclass(frozen=True, eq=False)
class Plugin:
    """One package of one distribution, and what became of it. Equal to itself alone.

    Attributes:
        distribution, version, package: where it comes from.
        backends, platforms: the names it declares.
        problem: why it is set aside; None where it is used.
        advice: what is odd about one that is used.
        contents: its declarations, where it is used.
    """

    distribution: str
    version: str
    package: str
    backends: tuple[str, ...]
    platforms: tuple[str, ...]
    problem: Problem | None = None
    advice: Problem | None = None
    contents: Contents | None = None

    @property
    def label(self) -> str:
        """What to call it: distribution and version."""
        return f"{self.distribution} {self.version}".strip()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "distribution": self.distribution,
            "version": self.version,
            "package": self.package,
            "backends": list(self.backends),
            "platforms": list(self.platforms),
            "used": self.problem is None,
            "problem": self.problem._asdict() if self.problem else None,
            "advice": self.advice._asdict() if self.advice else None,
        }


def installed_plugins(*, again: bool = False) -> tuple[Plugin, ...]:
    """Every plugin that some distribution along Python's path declares, tried and imported.

    Args:
        again: try them anew, whatever is remembered of earlier trials.

    A process imports a plugin once: one that is updated meanwhile counts from the next on.
    """
    found = declared()
    if not found.entry_points:
        return ()
    key, memory = (found, tuple(sys.path)), _memory()
    if again or key not in memory:
        memory[key] = _look_at(found, again)
    return memory[key]


def plugin_platforms() -> tuple[str, ...]:
    """The names of the platforms that usable plugins bring, in order."""
    return tuple(n for p in installed_plugins() if p.problem is None for n in p.platforms)


def owners() -> dict[str, str]:
    """Backend -> the platform it is for, of those that are not for every platform."""
    found: dict[str, str] = {}
    for plugin in installed_plugins():
        if plugin.contents is None:
            continue
        for backend in plugin.contents.catalog:
            if isinstance(backend, PluginBackend):
                own = plugin.platforms or platforms_of(backend)
                found |= dict.fromkeys([backend.name] if own else [], ", ".join(own))
    return found


def with_requirements(inventory: Inventory) -> Inventory:
    """The inventory with what plugins' backends require, where that is installed or assumed."""
    names = [name for name in requirements() if name not in inventory.packages]
    found = installed_versions(names, sys.path).versions
    if inventory.profile == "full":
        found = {**dict.fromkeys(names, "assumed"), **found}
    if inventory.profile not in (None, "full") or not found:
        return inventory
    return replace(inventory, packages={**inventory.packages, **found})


def joining() -> tuple[Joining, ...]:
    """What all plugins add to the tables of any platform but their own.

    Of one that is set aside, its names are there all the same, and refuse with the reason.
    """
    return _joining_all(installed_plugins())


@lru_cache(maxsize=4)
def _joining_all(plugins: tuple[Plugin, ...]) -> tuple[Joining, ...]:
    return tuple(j for plugin in plugins if (j := _joining(plugin)) is not None)


def requirements() -> tuple[str, ...]:
    """The distributions that plugins' backends require, whether attnplat knows them or not."""
    contents = (p.contents for p in installed_plugins() if p.contents is not None)
    own = (b for c in contents for b in c.catalog if isinstance(b, PluginBackend))
    return tuple(dict.fromkeys(r.distribution for b in own for r in b.requires))


def _joining(plugin: Plugin) -> Joining | None:
    if plugin.problem is not None:
        why = f"{plugin.problem.text}; {plugin.problem.fix}"
        usable = [n for n in plugin.backends if is_canonical(n) and n not in IN_TREE]
        stand_ins = tuple(without_contents(n, plugin.label, why) for n in usable)
        return Joining(plugin.label, stand_ins) if plugin.problem.kind != "duplicate" else None
    assert plugin.contents is not None
    if plugin.platforms:
        return None  # its backends are its own platform's
    contents = plugin.contents
    return Joining(plugin.label, contents.catalog, contents.preferences, contents.by_name)


@cache
def _memory() -> dict[Any, tuple[Plugin, ...]]:
    """What was found along a path, for as long as nothing is installed into it or removed."""
    return {}


def _look_at(found: Declared, again: bool) -> tuple[Plugin, ...]:
    join_plugins()
    plugins = []
    taken: dict[str, str] = {}
    for plugin, folder in _grouped(found):
        problem = _form_problem(plugin) or _taken_problem(plugin, taken)
        if problem is not None:
            plugins.append(replace(plugin, problem=problem))
            continue
        taken |= dict.fromkeys((*plugin.backends, *plugin.platforms), plugin.label)
        plugins.append(_tried(plugin, folder, again))
    return tuple(plugins)


def _grouped(found: Declared) -> Iterator[tuple[Plugin, str]]:
    """The entry points by distribution and package, and the folder of the metadata."""
    groups: dict[tuple[str, str], list[EntryPoint]] = {}
    for entry in found.entry_points:
        groups.setdefault((entry.distribution, entry.package), []).append(entry)
    for (distribution, package), entries in groups.items():
        backends = tuple(dict.fromkeys(e.name for e in entries if e.group == BACKENDS))
        platforms = tuple(dict.fromkeys(e.name for e in entries if e.group == PLATFORMS))
        version = entries[0].version
        yield Plugin(distribution, version, package, backends, platforms), entries[0].folder


def _form_problem(plugin: Plugin) -> Problem | None:
    fix = f"tell the authors of {plugin.distribution}; uninstall it meanwhile"
    said = f"the plugin {plugin.label} declares"
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", plugin.package):
        text = f"{said} {plugin.package!r}, which is not the name of a package"
        return Problem("form", text, fix)
    for name in plugin.backends:
        if not is_canonical(name):
            text = f"{said} the backend {name!r}; a name is like WINDOW_ATTN"
            return Problem("form", text, fix)
    for name in plugin.platforms:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            text = f"{said} the platform {name!r}; a name is like tpu"
            return Problem("form", text, fix)
    if len(plugin.platforms) > 1:
        text = f"{said} {len(plugin.platforms)} platforms in one package; each has its own"
        return Problem("form", text, fix)
    return None


def _taken_problem(plugin: Plugin, taken: dict[str, str]) -> Problem | None:
    owners = {**dict.fromkeys((*IN_TREE, *PlatformName), "attnplat"), **taken}
    for name in (*plugin.backends, *plugin.platforms):
        owner = owners.get(name)
        if owner is not None:
            fix = f"uninstall {plugin.distribution}"
            if owner != "attnplat":
                fix += f" or {owner.partition(' ')[0]}"
            text = f"the plugin {plugin.label} declares {name}, which {owner} has"
            return Problem("duplicate", text, fix)
    return None


def _tried(plugin: Plugin, folder: str, again: bool) -> Plugin:
    outcome = _outcome(plugin, folder, again)
    if outcome.kind:
        return replace(plugin, problem=Problem(*outcome[1:]))
    try:
        contents = read_contents(plugin.package, plugin.label, plugin.backends, plugin.platforms)
    except PluginProblem as problem:
        return replace(plugin, problem=Problem(problem.kind, problem.text, problem.fix))
    advice = None
    if outcome.seconds > SLOW_S:
        text = f"importing the plugin {plugin.label} takes {outcome.seconds:.1f} s at every start"
        advice = Problem("slow", text, f"update {plugin.distribution}, or tell its authors")
    return replace(plugin, contents=contents, advice=advice)


def _outcome(plugin: Plugin, folder: str, again: bool) -> Outcome:
    """How its trial went; see what is remembered below."""
    names = (*plugin.backends, *plugin.platforms)
    key = trial_key(plugin.package, plugin.label, names, folder)
    store = _store()
    if store is not None and not again and (known := _remembered(store, key)) is not None:
        return known
    outcome = try_plugin(plugin.package, plugin.label, plugin.backends, plugin.platforms)
    # Other failures come at once, and may be gone the next time.
    if store is not None and outcome.kind in ("", "slow"):
        store.keep(
            key,
            {"outcome": outcome._asdict(), "when": time.time()},
            packages={plugin.distribution: plugin.version},
            about=f"trial of the plugin {plugin.label}",
        )
    return outcome


def _remembered(store: Store, key: str) -> Outcome | None:
    known = store.read(key)
    if known is None:
        return None
    outcome = Outcome(**known["outcome"])
    return None if outcome.kind and time.time() - known["when"] > _FAILURE_COUNTS_S else outcome


def _store() -> Store | None:
    try:
        return Store(cache_folder(read_env()), "plugins")
    except AttnplatError:  # an environment that is wrong is told of where it matters
        return None
