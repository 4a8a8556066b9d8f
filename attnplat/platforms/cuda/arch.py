"""NVIDIA's architectures: their names, and what each can do."""

from __future__ import annotations

import re
from typing import NamedTuple

from attnplat.errors import UnknownNameError
from attnplat.platforms.device import DeviceInfo, PlatformName

Capability = tuple[int, int]


class Arch(NamedTuple):
    """What one compute capability adds to what every later one has too."""

    family: str
    own: frozenset[str] = frozenset()


def _arch(family: str, *own: str) -> Arch:
    return Arch(family, frozenset(own))


# `wgmma`, `tcgen05` and `fp4` belong to single architectures and families: code that uses them
# does not run on later ones (PTX ISA, "architecture-specific features").
ARCHES: dict[Capability, Arch] = {
    (5, 0): _arch("maxwell"),
    (5, 2): _arch("maxwell"),
    (5, 3): _arch("maxwell", "integrated"),
    (6, 0): _arch("pascal"),
    (6, 1): _arch("pascal"),
    (6, 2): _arch("pascal", "integrated"),
    (7, 0): _arch("volta"),
    (7, 2): _arch("volta", "integrated"),
    (7, 5): _arch("turing"),
    (8, 0): _arch("ampere"),
    (8, 6): _arch("ampere"),
    (8, 7): _arch("ampere", "integrated"),
    (8, 9): _arch("ada"),
    (9, 0): _arch("hopper", "wgmma"),
    (10, 0): _arch("blackwell", "tcgen05", "fp4"),
    (10, 1): _arch("blackwell", "tcgen05", "fp4", "integrated"),
    (10, 3): _arch("blackwell", "tcgen05", "fp4"),
    (11, 0): _arch("blackwell", "tcgen05", "fp4", "integrated"),
    (12, 0): _arch("blackwell", "fp4"),
    (12, 1): _arch("blackwell", "fp4", "integrated"),
}

# PTX promises these to every architecture from the given one on.
LASTING_TRAITS: tuple[tuple[Capability, str], ...] = (
    ((7, 0), "tensor_cores"),
    ((8, 0), "bf16"),
    ((8, 0), "cp_async"),
    ((8, 9), "fp8"),
    ((9, 0), "tma"),
)

UNKNOWN_ARCH = "unknown"


def simulate(arch: str) -> DeviceInfo:
    """A device of `arch` (`sm90`, `sm_90a` ...) that nobody has seen here.

    Raises UnknownNameError for what is no NVIDIA architecture; a number that is not known yet
    gets only the traits that every later architecture keeps.
    """
    capability = parse_arch(arch)
    if capability is None:
        raise UnknownNameError("NVIDIA architecture", arch, map(arch_name, ARCHES))
    return make_device(capability, simulated=True)


def parse_arch(text: str) -> Capability | None:
    """The capability that `sm90`, `sm_90` or `sm_90a` names; None if `text` names none."""
    match = re.fullmatch(r"sm_?([0-9]{1,2})([0-9])[af]?", text.strip().lower())
    if match is None or int(match.group(1)) < min(ARCHES)[0]:
        return None
    return int(match.group(1)), int(match.group(2))


def arch_name(capability: Capability) -> str:
    """`sm90` for (9, 0)."""
    return f"sm{capability[0]}{capability[1]}"


def traits_of(capability: Capability) -> frozenset[str]:
    """What a device of this capability can do, by name."""
    lasting = {trait for since, trait in LASTING_TRAITS if capability >= since}
    arch = ARCHES.get(capability)
    return frozenset(lasting if arch is None else lasting | {arch.family} | arch.own)


def make_device(
    capability: Capability | None,
    name: str = "",
    memory_bytes: int | None = None,
    simulated: bool = False,
) -> DeviceInfo:
    """A device of this capability; one that is unknown or not told gets notes that say so."""
    notes: tuple[str, ...] = ()
    if capability is None:
        notes = ("the driver does not tell the compute capability; nothing is assumed of it",)
    elif capability not in ARCHES:
        notes = (
            f"{arch_name(capability)} is not an architecture that attnplat knows; "
            "only what every later architecture keeps is assumed",
        )
    return DeviceInfo(
        platform=PlatformName.CUDA,
        arch=UNKNOWN_ARCH if capability is None else arch_name(capability),
        capability=capability,
        traits=frozenset() if capability is None else traits_of(capability),
        name=name,
        memory_bytes=memory_bytes,
        simulated=simulated,
        notes=notes,
        known=capability in ARCHES,
    )
