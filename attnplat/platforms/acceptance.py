"""Ways in which other rule sets accept what attnplat does not. None is in force by default.

A `Difference` with the subject `accepts.RULE` puts one in force, for every layer or for
those that a predicate names; `selection` asks here.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from attnplat.backends.backend import Rejection
from attnplat.platforms.device import DeviceInfo, PlatformName
from attnplat.platforms.world import World

if TYPE_CHECKING:
    from attnplat.config.layer import LayerConfig
    from attnplat.platforms.selection import Selection
    from attnplat.platforms.tables import Tables

ACCEPTANCE_RULES = {
    "foreign_platform": "a requested backend may belong to another vendor's platform",
    "shared_capability_numbers": "AMD's gfx digits are compared with NVIDIA's capabilities",
    "request_ignored": "a request is dropped before anything is asked of it",
    "request_replaced": "a request that does not fit is replaced by the automatic choice",
    "request_unvalidated": "a request that the layer's row names is used without any check",
    "row_unvalidated": "a row, and a request that it names, are used without any check",
    "packed_kv_fallback": "in a packed-KV run, a request refused for its cache alone is replaced",
    "cache_asked_of_all": "layers without a KV cache are asked for what concerns one",
    "parts_apart": "a layer's parts are chosen apart; one may be missing",
    "wish_ignored": "a wish that nothing usable reads is dropped",
}

# Refusals that `packed_kv_fallback` forgives when they stand alone.
PACKED_KV_SUBJECTS = ("kv_cache_dtype", "layout_vs_turboquant", "layout_vs_ultraquant")

_GFX_DIGITS = re.compile(r"gfx([0-9]+)([0-9a-f])[0-9a-f]")


def is_packed_kv(config: LayerConfig, world: World) -> bool:
    """Whether the run, or this layer, keeps its cache in a packed format."""
    run, own = world.run.run_kv_cache_dtype, config.kv_cache_dtype
    turboquant = any(d is not None and d.startswith("turboquant") for d in (run, own))
    return turboquant or run == "ultraquant_4bit"


def is_about_the_cache(reasons: tuple[Rejection, ...]) -> bool:
    """Whether a refusal has one subject, and that is what the cache looks like."""
    subjects = {reason.subject for reason in reasons}
    return len(subjects) == 1 and subjects <= set(PACKED_KV_SUBJECTS)


def may_replace(tables: Tables, refused: Selection) -> bool:
    """Whether a request that did not fit is replaced by the automatic choice."""
    config, world = refused.config, refused.world
    if tables.allows("request_replaced", config, world):
        return True
    if not tables.allows("packed_kv_fallback", config, world):
        return False
    (reasons,) = refused.rejections.values()
    return is_packed_kv(config, world) and is_about_the_cache(reasons)


def is_unvalidated(
    tables: Tables, config: LayerConfig, world: World, requested: str | None
) -> bool:
    """Whether the candidates are used without any check."""
    if not tables.accepts:
        return False
    unvalidated = tables.allows("row_unvalidated", config, world)
    if requested is None:
        return unvalidated
    row = tables.row_for(config, world)
    named = row is not None and requested in row.members
    return named and (unvalidated or tables.allows("request_unvalidated", config, world))


def with_shared_numbers(world: World) -> World:
    """`world` with an AMD device's gfx digits as a capability: gfx942 is (9, 4)."""
    device = world.device
    if device.platform != PlatformName.ROCM or device.capability is not None:
        return world
    return world.replace(device=replace(device, capability=_gfx_numbers(device)))


def _gfx_numbers(device: DeviceInfo) -> tuple[int, int] | None:
    match = _GFX_DIGITS.fullmatch(device.arch)
    return None if match is None else (int(match.group(1)), int(match.group(2), 16))
