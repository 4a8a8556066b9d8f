"""What users call a device: `rocm:gfx950`, `sm90`, `cuda:1`, `cpu`, `h100` ..."""

from __future__ import annotations

import re
from dataclasses import dataclass

from attnplat.config.entry_points import PLATFORMS, declared
from attnplat.errors import ConflictError, UnknownNameError
from attnplat.platforms.cpu import arch as cpu
from attnplat.platforms.cuda import arch as cuda
from attnplat.platforms.device import PlatformName
from attnplat.platforms.rocm import arch as rocm

PLATFORM_ALIASES: dict[str, PlatformName] = {
    **{str(name): name for name in PlatformName},
    "nvidia": PlatformName.CUDA,
    "hip": PlatformName.ROCM,
    "amd": PlatformName.ROCM,
}

# Products that people name in place of their architecture.
PRODUCTS: dict[str, tuple[PlatformName, str]] = {
    "v100": (PlatformName.CUDA, "sm70"),
    "t4": (PlatformName.CUDA, "sm75"),
    "a100": (PlatformName.CUDA, "sm80"),
    "a10": (PlatformName.CUDA, "sm86"),
    "rtx3090": (PlatformName.CUDA, "sm86"),
    "orin": (PlatformName.CUDA, "sm87"),
    "l4": (PlatformName.CUDA, "sm89"),
    "l40s": (PlatformName.CUDA, "sm89"),
    "rtx4090": (PlatformName.CUDA, "sm89"),
    "h100": (PlatformName.CUDA, "sm90"),
    "h200": (PlatformName.CUDA, "sm90"),
    "h20": (PlatformName.CUDA, "sm90"),
    "gh200": (PlatformName.CUDA, "sm90"),
    "b200": (PlatformName.CUDA, "sm100"),
    "gb200": (PlatformName.CUDA, "sm100"),
    "b300": (PlatformName.CUDA, "sm103"),
    "gb300": (PlatformName.CUDA, "sm103"),
    "thor": (PlatformName.CUDA, "sm110"),
    "rtx5090": (PlatformName.CUDA, "sm120"),
    "gb10": (PlatformName.CUDA, "sm121"),
    "mi100": (PlatformName.ROCM, "gfx908"),
    "mi210": (PlatformName.ROCM, "gfx90a"),
    "mi250x": (PlatformName.ROCM, "gfx90a"),
    "mi300a": (PlatformName.ROCM, "gfx942"),
    "mi300x": (PlatformName.ROCM, "gfx942"),
    "mi325x": (PlatformName.ROCM, "gfx942"),
    "mi350x": (PlatformName.ROCM, "gfx950"),
    "mi355x": (PlatformName.ROCM, "gfx950"),
    "rx7900xtx": (PlatformName.ROCM, "gfx1100"),
    "strixhalo": (PlatformName.ROCM, "gfx1151"),
    "rx9070xt": (PlatformName.ROCM, "gfx1201"),
}


@dataclass(frozen=True)
class DeviceName:
    """A device as a user named it.

    Attributes:
        platform: `cuda`, `rocm` or `cpu`.
        arch: the architecture to simulate, or None where a device of this machine is meant.
        index: which of the visible devices, or None where the name does not say.
    """

    platform: str
    arch: str | None = None
    index: int | None = None

    def __str__(self) -> str:
        part = self.arch if self.index is None else str(self.index)
        return self.platform if part is None else f"{self.platform}:{part}"


def parse_device_name(text: str) -> DeviceName:
    """The device that `text` names: `PLATFORM`, `PLATFORM:INDEX`, `[PLATFORM:]ARCH` or a product.

    Raises:
        UnknownNameError: nothing is called so; carries the known names and the closest.
        ConflictError: the architecture belongs to another platform than the one named.
    """
    if not isinstance(text, str):
        raise UnknownNameError("device", text, known_devices())
    folded = text.strip().lower()
    if folded in PLATFORM_ALIASES:
        return DeviceName(PLATFORM_ALIASES[folded])
    if (found := _of_plugin(folded)) is not None:
        return found
    found_arch = _arch_of(folded)  # first, since AMD's names have colons of their own
    if found_arch is not None:
        return DeviceName(*found_arch)
    head, _, rest = folded.partition(":")
    platform = PLATFORM_ALIASES.get(head)
    if platform is None or not rest:
        raise UnknownNameError("device", text, known_devices())
    if re.fullmatch(r"[0-9]{1,6}", rest):
        return DeviceName(platform, index=int(rest))
    found_arch = _arch_of(rest)
    if found_arch is None:
        raise UnknownNameError("device", text, known_devices(platform))
    if found_arch[0] != platform:
        raise ConflictError(
            f"device {text!r} names the platform {platform}, and {rest} belongs to "
            f"{found_arch[0]}; write {found_arch[0]}:{found_arch[1]}"
        )
    return DeviceName(*found_arch)


def _of_plugin(text: str) -> DeviceName | None:
    """The device that `text` names on a platform that some plugin declares; architectures are
    the plugin's to know."""
    head, colon, rest = text.partition(":")
    if head not in declared().names(PLATFORMS) or (colon and not rest):
        return None
    if re.fullmatch(r"[0-9]{1,6}", rest):
        return DeviceName(head, index=int(rest))
    return DeviceName(head, arch=rest or None)


def known_devices(platform: PlatformName | None = None) -> list[str]:
    """Every name of the kind that `parse_device_name` takes, without indices and products."""
    archs = {
        PlatformName.CUDA: [cuda.arch_name(capability) for capability in cuda.ARCHES],
        PlatformName.ROCM: list(rocm.ARCHES),
        PlatformName.CPU: list(cpu.SIMULATED),
    }
    wanted = [platform] if platform else list(PlatformName)
    own = [name for p in wanted for name in (str(p), *(f"{p}:{arch}" for arch in archs[p]))]
    return own if platform else [*own, *declared().names(PLATFORMS)]


def _arch_of(text: str) -> tuple[PlatformName, str] | None:
    """The platform and architecture that a name without a platform stands for."""
    if (capability := cuda.parse_arch(text)) is not None:
        return PlatformName.CUDA, cuda.arch_name(capability)
    if (gfx := rocm.parse_arch(text)) is not None:
        return PlatformName.ROCM, gfx
    if (isa := text.replace("-", "_")) in cpu.SIMULATED:
        return PlatformName.CPU, isa
    return PRODUCTS.get(re.sub(r"[\s_-]", "", text))
