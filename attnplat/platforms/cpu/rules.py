"""Questions about processors that declarations ask."""

from __future__ import annotations

from typing import Any

from attnplat.platforms.cpu.impls.features import ZENTORCH_TORCH, ZENTORCH_VERSION
from attnplat.platforms.device import PlatformName
from attnplat.platforms.world import World


def lacks_wide_vectors(world: World) -> bool:
    """The processor has no 512-bit vectors, which AMX comes with."""
    return world.device.platform == PlatformName.CPU and "avx512" not in world.device.traits


def has_another_zentorch(config: Any, world: World) -> bool:
    """zentorch or torch is installed in another version than ZENTORCH was written for."""
    packages = world.inventory.packages
    torch = packages.get("torch", ZENTORCH_TORCH)
    mine = torch == ZENTORCH_TORCH or torch.startswith(f"{ZENTORCH_TORCH}.")
    return packages.get("zentorch", ZENTORCH_VERSION) != ZENTORCH_VERSION or not mine
