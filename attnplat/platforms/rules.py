"""A platform under a rule set: attnplat's own, or another engine's for comparison."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib import import_module

from attnplat.errors import UnknownNameError
from attnplat.platforms import PLATFORMS, ForeignBackends, plugins_here, simulate, tables_for
from attnplat.platforms.differences import RULE_SETS, Difference, tables_under
from attnplat.platforms.inventory import Inventory
from attnplat.platforms.platform import Platform
from attnplat.platforms.selection import Tables


def differences_of(platform: str) -> tuple[Difference, ...]:
    """Every declared difference of a platform."""
    module = import_module(f"attnplat.platforms.{platform}.differences")
    differences: tuple[Difference, ...] = module.DIFFERENCES
    return differences


def under(rules: str, platform: Platform, *, without: Difference | None = None) -> Platform:
    """`platform` deciding by the given rule set.

    `without`: one of its differences that is left out, to see what it is for.
    """
    if rules not in RULE_SETS:
        raise UnknownNameError("rule set", rules, RULE_SETS)
    if rules == "attnplat":
        return platform

    def all_but_one(name: str) -> tuple[Difference, ...]:
        return tuple(d for d in differences_of(name) if d is not without)

    def departures(owner: str, tables: Tables) -> Tables:
        # A platform may differ on another's backends too: after what differs at home.
        theirs = all_but_one(owner) if owner in PLATFORMS else ()
        return tables_under(tables, (*theirs, *own), platform.device)

    own = all_but_one(platform.name)
    tables = platform.tables
    if plugins_here():
        from attnplat.platforms.plugin_tables import without_plugins

        tables = without_plugins(tables)  # that engine knows nothing of them
    tables = tables_under(tables, own, platform.device)
    if isinstance(tables.foreign, ForeignBackends):
        foreign = tables.foreign.under(departures)
        tables = replace(tables, foreign=foreign, foreign_backend=foreign.find)
    return replace(platform, tables=tables)


@cache
def platform_under(rules: str, platform: str, arch: str, profile: str) -> Platform:
    """A simulated device with a named package profile, deciding by a rule set."""
    device = simulate(platform, arch)
    simulated = Platform(device, Inventory.assumed(profile, device), tables_for(platform))
    return under(rules, simulated)
