"""What would make a better choice: a switch, the user's own choice of cache, a package.

Better is what the platform prefers: a backend that comes before the chosen one in the order
of the row. Every piece of advice has been decided again, whole, with the one thing changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

from attnplat.backends.backend import Package, missing_package
from attnplat.platforms.distributions import DISTRIBUTIONS
from attnplat.platforms.inventory import SWITCHES, Inventory, Switch
from attnplat.platforms.nearest import (
    MEANING,
    REQUESTS,
    Change,
    decided,
    declared,
    field_variant,
    wish_variant,
)

if TYPE_CHECKING:
    from attnplat.platforms.selection import Selection

# Wishes that select kernels. Those that request one are never advised against.
_NEVER_ADVISED = REQUESTS | MEANING | {"mla_prefill_backend"}
_INSTALL = {distribution.name: distribution.install for distribution in DISTRIBUTIONS}
_USUAL_BLOCKS = (16, 32, 64, 128, 256)
# Newer than whatever version a feature came with.
_NEWEST = "9999"


def advice(selection: Selection) -> Iterator[Change]:
    """Changes after which a better choice would be made; none where a backend was asked for."""
    asked_for = selection.requested is not None or selection.replaced is not None
    if asked_for or not selection.ok:
        return
    yield from _switches(selection)
    yield from _own_choices(selection)
    yield from _packages(selection)


def in_words(change: Change) -> str:
    """One line of advice: what to do, what comes of it, and what is in the way now."""
    gains = [f"{name} for the {part}" for part, name in change.parts]
    gained = f"{change.backend}, with {' and '.join(gains)}," if gains else change.backend
    by = _BY.get(change.source, f" (by the {change.source})")
    match change.kind:
        case "switch":
            why = f"it is installed, with {change.subject} switched off{by}"
        case "package":
            why = f"{change.subject} is not installed"
        case _:
            why = f"{change.subject} is {change.got}{by}, which rules that out"
    return f"{change.to_do}: {gained} is then chosen; {why}"


# Who set a thing, where the plain word would not read well.
_BY = {"caller": "", "assumed": "", "default": " (by default)"}


def _gain(change: Change, old: Selection, new: Selection | None) -> Change | None:
    """The change with who is then chosen, or None where that is no better."""
    if new is None or not new.ok:
        return None
    here, parts = _rank_gained(old, new), []
    for name, part in old.parts.items():
        gained = _rank_gained(part, new.parts[name])
        if gained < 0:
            return None
        if gained > 0:
            parts.append((name, str(new.parts[name].chosen)))
    if here < 0 or not (here or parts):
        return None
    return replace(change, backend=str(new.chosen), parts=tuple(parts))


def _rank_gained(old: Selection, new: Selection) -> int:
    """1 where the new choice ranks before the old one, 0 where it is the same, -1 otherwise."""
    before, now = str(old.chosen), str(new.chosen)
    if before == now:
        return 0
    names = new.candidates
    return 1 if before in names and names.index(now) < names.index(before) else -1


# Switches ------------------------------------------------------------------------------------


def _switches(selection: Selection) -> Iterator[Change]:
    """The fewest switches that lead to a better choice."""
    inventory = selection.world.inventory
    off = {n: _how(n) for n, s in inventory.switches.items() if not s.on and n in SWITCHES}
    off = {name: how for name, how in off.items() if how is not None}
    for count in range(1, len(off) + 1):
        found = False
        for names in combinations(off, count):
            change = Change(
                kind="switch",
                subject=" and ".join(names),
                got=False,
                value=True,
                source=inventory.switches[names[0]].source,
                how=" and ".join(str(off[name]) for name in names),
                backend="",
            )
            turned = {**inventory.switches, **dict.fromkeys(names, Switch(True, "assumed"))}
            gain = _gain_with(change, selection, replace(inventory, switches=turned))
            if gain is not None:
                found = True
                yield gain
        if found:
            return


def _how(switch: str) -> str | None:
    """What turns the switch on; None where nothing a user could type does."""
    spec = SWITCHES[switch]
    if spec.variable is not None:
        return f"set {spec.variable}=1"
    return None if spec.driver is None else f"set {spec.driver.upper()}=TRUE"


def _gain_with(change: Change, selection: Selection, inventory: Inventory) -> Change | None:
    world = selection.world.replace(inventory=inventory)
    return _gain(change, selection, decided(selection, None, world))


# The user's own choices ----------------------------------------------------------------------


def _own_choices(selection: Selection) -> Iterator[Change]:
    config, wishes = selection.config, selection.world.wishes
    if config.block_size is not None and config.source_of("block_size") != "model":
        yield from _block_size(selection)
    word = config.kv_cache_dtype
    if word not in (None, "auto") and config.source_of("kv_cache_dtype") != "model":
        yield from _cache_dtype(selection)
    for name in sorted(wishes.set_fields() - _NEVER_ADVISED):
        change, again = wish_variant(selection, name, None)
        gain = _gain(change, selection, again)
        if gain is not None:
            yield gain


def _field(selection: Selection, name: str, value: Any) -> Change | None:
    change, again = field_variant(selection, name, value)
    return _gain(change, selection, again)


def _block_size(selection: Selection) -> Iterator[Change]:
    """A block size that the backend takes which would be chosen without the user's."""
    open_size = _field(selection, "block_size", None)
    better = None if open_size is None else declared(selection, open_size.backend)
    if open_size is None or better is None:
        return
    nearest = better.limit("block_size").nearest(selection.config.block_size)
    sizes = dict.fromkeys((better.block_size, *nearest, *_USUAL_BLOCKS))
    named = (_field(selection, "block_size", size) for size in sizes if size is not None)
    same = (c for c in named if c is not None and c.backend == open_size.backend)
    yield next(same, open_size)


def _cache_dtype(selection: Selection) -> Iterator[Change]:
    """A format of the same sort that a better backend reads, else the activations' own."""
    word = str(selection.config.kv_cache_dtype)
    sort = word.partition("_")[0]
    offered: dict[str, None] = {}
    for name in selection.rejections:
        backend = declared(selection, name)
        values = () if backend is None else backend.limit("kv_cache_dtype").nearest(word)
        offered |= dict.fromkeys(str(value) for value in values)
    alike = [value for value in offered if value.partition("_")[0] == sort and value != word]
    for value in (*alike, "auto"):
        gain = _field(selection, "kv_cache_dtype", value)
        if gain is not None:
            yield gain
            return


# Packages ------------------------------------------------------------------------------------


def _packages(selection: Selection) -> Iterator[Change]:
    """Distributions that are all a better backend lacks."""
    world = selection.world
    for name, reasons in selection.rejections.items():
        backend = declared(selection, name)
        if backend is None or any(reason.kind != "package" for reason in reasons):
            continue
        lacking = [p for p in backend.requires if missing_package(p, world) is not None]
        names = tuple(dict.fromkeys(p.distribution for p in lacking))
        with_them = _installed_too(world.inventory, lacking)
        if with_them is None or not all(n in _INSTALL for n in names):
            continue
        change = Change(
            kind="package",
            subject=" and ".join(names),
            value="installed",
            how="; ".join(_INSTALL[n] for n in names),
            backend="",
        )
        gain = _gain_with(change, selection, with_them)
        if gain is not None:
            yield gain


def _installed_too(inventory: Inventory, lacking: list[Package]) -> Inventory | None:
    """`inventory` with the distributions added; None where that makes no feature usable."""
    packages = {**inventory.packages, **{p.distribution: _NEWEST for p in lacking}}
    tools = {tool: tool for tool in ("nvcc", "ninja") if inventory.usable(tool)}
    judged = Inventory.assume(packages, tools=tools).features
    if not all(p.feature is None or judged[p.feature].usable for p in lacking):
        return None
    usable = {name: found for name, found in judged.items() if found.usable}
    return replace(inventory, packages=packages, features={**inventory.features, **usable})
