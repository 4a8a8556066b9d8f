"""Questions about processors that declarations ask."""

from __future__ import annotations

from attnplat.platforms.device import PlatformName
from attnplat.platforms.world import World


def lacks_wide_vectors(world: World) -> bool:
    """The processor has no 512-bit vectors, which AMX comes with."""
    return world.device.platform == PlatformName.CPU and "avx512" not in world.device.traits
