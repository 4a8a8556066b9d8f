"""AMD's architectures: their names, and what each can do."""

from __future__ import annotations

import re

from attnplat.errors import UnknownNameError
from attnplat.platforms.device import DeviceInfo, PlatformName

_CDNA = ("cdna", "mfma", "bf16", "wave64")
_CDNA3 = (*_CDNA, "cdna3", "fp8", "fp8_fnuz")
_RDNA = ("rdna", "wave32")
_RDNA3 = (*_RDNA, "rdna3", "wmma", "bf16")
_RDNA4 = (*_RDNA, "rdna4", "wmma", "bf16", "fp8", "fp8_ocp")

# Architecture -> traits. `fp8_fnuz` and `fp8_ocp` are the two 8-bit encodings; `mxfp4` is a
# block-scaled matrix instruction; `mi3xx` are the parts that share tuned kernels.
ARCHES: dict[str, tuple[str, ...]] = {
    "gfx900": ("gcn5", "wave64"),
    "gfx906": ("gcn5", "wave64"),
    "gfx90c": ("gcn5", "wave64", "integrated"),
    "gfx908": (*_CDNA, "cdna1"),
    "gfx90a": (*_CDNA, "cdna2"),
    "gfx940": _CDNA3,
    "gfx941": _CDNA3,
    "gfx942": (*_CDNA3, "mi3xx"),
    "gfx950": (*_CDNA, "cdna4", "fp8", "fp8_ocp", "mxfp4", "mi3xx"),
    "gfx1010": (*_RDNA, "rdna1"),
    "gfx1011": (*_RDNA, "rdna1"),
    "gfx1012": (*_RDNA, "rdna1"),
    "gfx1030": (*_RDNA, "rdna2"),
    "gfx1031": (*_RDNA, "rdna2"),
    "gfx1032": (*_RDNA, "rdna2"),
    "gfx1034": (*_RDNA, "rdna2"),
    "gfx1035": (*_RDNA, "rdna2", "integrated"),
    "gfx1036": (*_RDNA, "rdna2", "integrated"),
    "gfx1100": _RDNA3,
    "gfx1101": _RDNA3,
    "gfx1102": _RDNA3,
    "gfx1103": (*_RDNA3, "integrated"),
    "gfx1150": (*_RDNA3, "integrated"),
    "gfx1151": (*_RDNA3, "integrated"),
    "gfx1152": (*_RDNA3, "integrated"),
    "gfx1153": (*_RDNA3, "integrated"),
    "gfx1200": _RDNA4,
    "gfx1201": _RDNA4,
    # The fifth CDNA generation multiplies with RDNA's wave size and instruction names.
    "gfx1250": ("cdna", "cdna5", "wmma", "bf16", "wave32", "fp8", "fp8_ocp", "mxfp4"),
}

_GFX = re.compile(r"(gfx([0-9]{1,2})[0-9a-f][0-9a-f])(?::[a-z0-9]+[+-])*")
_OLDEST_MAJOR = 9


def simulate(arch: str) -> DeviceInfo:
    """A device of `arch` (`gfx950`, `gfx942:sramecc+:xnack-` ...) that nobody has seen here.

    Raises UnknownNameError for what is no AMD architecture; a number that is not known yet
    gets only what its generation is known to have.
    """
    name = parse_arch(arch)
    if name is None:
        raise UnknownNameError("AMD architecture", arch, ARCHES)
    return make_device(name, simulated=True)


def parse_arch(text: str) -> str | None:
    """`gfx942` for `gfx942:sramecc+:xnack-`; None if `text` names no architecture."""
    match = _GFX.fullmatch(text.strip().lower())
    if match is None or int(match.group(2)) < _OLDEST_MAJOR:
        return None
    return match.group(1)


def gfx_name(target_version: int) -> str | None:
    """The architecture that KFD's `gfx_target_version` encodes: 90010 is gfx90a, 0 is none.

    Decimal major * 10000 + minor * 100 + stepping; the last two are written in hexadecimal.
    """
    major, minor, stepping = (
        target_version // 10000,
        target_version // 100 % 100,
        target_version % 100,
    )
    if not _OLDEST_MAJOR <= major < 100 or minor > 15 or stepping > 15:
        return None
    return f"gfx{major}{minor:x}{stepping:x}"


def traits_of(arch: str) -> frozenset[str]:
    """What a device of this architecture can do, by name."""
    if arch in ARCHES:
        return frozenset(ARCHES[arch])
    match = _GFX.fullmatch(arch)
    major = int(match.group(2)) if match else 0
    if major == 11:
        return frozenset(_RDNA3)
    return frozenset(_RDNA) if major in (10, 12) else frozenset()


def same_family(one: str, other: str) -> bool:
    """Whether two architectures are both CDNA, both RDNA or both older."""
    families = {"cdna", "rdna", "gcn5"}
    return traits_of(one) & families == traits_of(other) & families


def make_device(
    arch: str, name: str = "", memory_bytes: int | None = None, simulated: bool = False
) -> DeviceInfo:
    """A device of this architecture; one that is unknown gets a note that says so."""
    notes: tuple[str, ...] = ()
    if arch not in ARCHES:
        notes = (
            f"{arch} is not an architecture that attnplat knows; "
            "only what its generation is known to have is assumed",
        )
    return DeviceInfo(
        platform=PlatformName.ROCM,
        arch=arch,
        traits=traits_of(arch),
        name=name,
        memory_bytes=memory_bytes,
        simulated=simulated,
        notes=notes,
        known=arch in ARCHES,
    )
