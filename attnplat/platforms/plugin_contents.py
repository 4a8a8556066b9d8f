"""What is inside a plugin's package, read and checked: the in-tree shape.

A package that brings backends has the files of a platform that say what is and what is
preferred: `catalog.py` with `CATALOG`, `preferences.py` with `PREFERENCES` and `BY_NAME`. One
that brings a platform has `detect.py` too. Its `__init__.py` says which contract it was written
for: `ATTNPLAT_CONTRACT = 1`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType
from typing import Any

from attnplat.backends.backend import Backend
from attnplat.config.backend_names import is_canonical
from attnplat.config.layer import config_class
from attnplat.config.numbers import is_whole
from attnplat.platforms.inventory import FEATURES
from attnplat.platforms.plugin_backend import PluginBackend, failed, of_plugin
from attnplat.platforms.selection import ByName, Preference, Ranked

CONTRACT = 1
"""The contract between attnplat and plugins. What it covers is in `docs/plugins.md`."""
OLDEST_CONTRACT = 1
"""The oldest that this release still reads."""

REST = "..."
"""In a row of a plugin's preferences: the platform's own order, last resorts excepted."""


class PluginProblem(Exception):
    """A plugin that cannot be used: what kind of problem, the sentence, and the fix."""

    def __init__(self, kind: str, text: str, fix: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text
        self.fix = fix


@dataclass(frozen=True)
class Contents:
    """A plugin's declarations.

    Attributes:
        catalog: its backends; of a platform, those of attnplat that it uses as well.
        preferences: its rows, with `REST` where the platform's own order goes.
        by_name: its backends that stand in no row.
        last_resort_automatic: of a platform, see `Tables`.
        detect: of a platform, the module that finds its devices.
    """

    catalog: tuple[Backend, ...]
    preferences: tuple[Preference, ...]
    by_name: tuple[ByName, ...]
    last_resort_automatic: bool = False
    detect: ModuleType | None = None


def read_contents(
    package: str, label: str, backends: Iterable[str], platforms: Iterable[str]
) -> Contents:
    """Import a plugin's package and check what it declares.

    Args:
        package: its import name.
        label: what to call it: distribution and version.
        backends, platforms: the names that its entry points declare.

    Raises PluginProblem; KeyboardInterrupt alone passes.
    """
    declared, brings_platform = frozenset(backends), bool(tuple(platforms))
    fix = f"update or uninstall {label.partition(' ')[0]}"
    try:
        _check_contract(import_module(package), label)
        catalog = import_module(f"{package}.catalog")
        preferences = import_module(f"{package}.preferences")
        detect = import_module(f"{package}.detect") if brings_platform else None
        contents = _contents(catalog, preferences, detect, label)
        wrong = next(_wrong(contents, declared, brings_platform), None)
    except (KeyboardInterrupt, PluginProblem):
        raise
    except BaseException as error:
        text = failed(label, f"importing {package}", error).partition(";")[0]
        raise PluginProblem("import", text, _import_fix(error, fix)) from error
    if wrong is not None:
        raise PluginProblem("shape", f"the plugin {label} {wrong}", f"tell its authors; {fix}")
    return contents


def _import_fix(error: BaseException, fix: str) -> str:
    name = getattr(error, "name", None)
    if isinstance(error, ModuleNotFoundError) and name:
        return f"install what provides the module {name}, or {fix}"
    return fix


def _check_contract(module: ModuleType, label: str) -> None:
    found = getattr(module, "ATTNPLAT_CONTRACT", None)
    distribution = label.partition(" ")[0]
    if not is_whole(found):
        text = f"the plugin {label} says no contract version (ATTNPLAT_CONTRACT is {found!r})"
        raise PluginProblem("contract", text, f"update {distribution}, or tell its authors")
    if found < OLDEST_CONTRACT:
        text = f"the plugin {label} is for contract {found}; attnplat reads {OLDEST_CONTRACT} on"
        raise PluginProblem("contract", text, f"pip install --upgrade {distribution}")
    if found > CONTRACT:
        text = f"the plugin {label} is for contract {found}; attnplat reads up to {CONTRACT}"
        raise PluginProblem("contract", text, "pip install --upgrade attnplat")


def _contents(
    catalog: ModuleType, preferences: ModuleType, detect: ModuleType | None, label: str
) -> Contents:
    return Contents(
        catalog=tuple(
            of_plugin(b, label) if isinstance(b, Backend) and _is_own(b) else b
            for b in catalog.CATALOG
        ),
        preferences=tuple(
            replace(row, serves=frozenset(row.serves)) if isinstance(row, Preference) else row
            for row in preferences.PREFERENCES
        ),
        by_name=tuple(getattr(preferences, "BY_NAME", ())),
        last_resort_automatic=bool(getattr(preferences, "LAST_RESORT_AUTOMATIC", False)),
        detect=detect,
    )


def _is_own(backend: Backend) -> bool:
    """Whether a backend is the plugin's, not one of attnplat's that its platform uses too."""
    from attnplat.backends.portable.catalog import PORTABLE

    return all(backend is not portable for portable in PORTABLE)


def _wrong(contents: Contents, declared: frozenset[str], platform: bool) -> Any:
    """What contradicts the shape, one clause each."""
    for kind, values in (
        (Backend, contents.catalog),
        (Preference, contents.preferences),
        (ByName, contents.by_name),
    ):
        for value in values:
            if not isinstance(value, kind):
                yield f"has {value!r} where a {kind.__name__} is expected"
                return
    own = [b for b in contents.catalog if isinstance(b, PluginBackend)]
    names = {b.name for b in own}
    for name in sorted(declared - names):
        yield f"declares the backend {name} and its catalog has {sorted(names) or 'none'}"
    for name in sorted(names - declared):
        yield f'has {name} in its catalog without the entry point {name} = "its package"'
    for backend in own:
        yield from _wrong_backend(backend)
    yield from _wrong_rows(contents, names, platform)
    if platform:
        for name in ("detect", "simulate"):
            if not callable(getattr(contents.detect, name, None)):
                yield f"has no function {name} in detect.py"


def _wrong_backend(backend: Backend) -> Any:
    if not is_canonical(backend.name):
        yield f"calls a backend {backend.name!r}; a name is like WINDOW_ATTN"
    if not backend.serves:
        yield f"has {backend.name}, which serves nothing"
    fields = {n for o in backend.serves for n in dir(config_class(o))}
    fields |= {n for o in backend.serves for n in config_class(o).__dataclass_fields__}
    for name in sorted(set(backend.takes) - fields):
        yield f"limits {backend.name} by {name}, which no layer that it serves has"
    for package in backend.requires:
        if package.feature is not None and package.feature not in FEATURES:
            yield (
                f"requires of {backend.name} the feature {package.feature!r}, which attnplat does "
                f"not judge; a plugin names the distribution ({package.distribution}) alone"
            )


def _wrong_rows(contents: Contents, own: set[str], platform: bool) -> Any:
    allowed = {b.name for b in contents.catalog} if platform else own | {REST}
    standing = {entry.name for entry in contents.by_name}
    for row in contents.preferences:
        members = [m.name if isinstance(m, Ranked) else m for m in row.order]
        for name in members:
            if name not in allowed:
                yield f"prefers {name}, which is not its own"
        if not platform and members.count(REST) != 1:
            yield f"has a row of preferences ({', '.join(members)}) without one REST"
        standing |= set(members)
    for name in sorted(own - standing):
        yield f"has {name} in no row of its preferences and not in BY_NAME"
