"""Questions about processors that declarations ask."""

from __future__ import annotations

from attnplat.platforms.world import World


def has_wide_vectors(world: World) -> bool:
    """The processor has 512-bit vectors, which AMX comes with."""
    return "avx512" in world.device.traits
