"""A platform under a rule set: attnplat's own, or another engine's for comparison."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib import import_module

from attnplat.errors import UnknownNameError
from attnplat.platforms import simulate, tables_for
from attnplat.platforms.differences import RULE_SETS, Difference, tables_under
from attnplat.platforms.inventory import Inventory
from attnplat.platforms.platform import Platform


def differences_of(platform: str) -> tuple[Difference, ...]:
    """Every declared difference of a platform."""
    module = import_module(f"attnplat.platforms.{platform}.differences")
    differences: tuple[Difference, ...] = module.DIFFERENCES
    return differences


def under(rules: str, platform: Platform) -> Platform:
    """`platform` deciding by the given rule set."""
    if rules not in RULE_SETS:
        raise UnknownNameError("rule set", rules, RULE_SETS)
    if rules == "attnplat":
        return platform
    differences = differences_of(platform.name)
    return replace(platform, tables=tables_under(platform.tables, differences, platform.device))


@cache
def platform_under(rules: str, platform: str, arch: str, profile: str) -> Platform:
    """A simulated device with a named package profile, deciding by a rule set."""
    device = simulate(platform, arch)
    simulated = Platform(device, Inventory.assumed(profile, device), tables_for(platform))
    return under(rules, simulated)
