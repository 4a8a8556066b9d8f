"""One device, as selection sees it: a frozen value, real or simulated."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class PlatformName(StrEnum):
    """The vendors' platforms that attnplat knows."""

    CUDA = "cuda"
    ROCM = "rocm"
    CPU = "cpu"


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """What is known of one device.

    Attributes:
        platform: `cuda`, `rocm`, `cpu`, or the name of a plugin's platform.
        arch: the architecture name users type: `sm90`, `gfx950`, `amx`, `avx2`, `neon` ...
        capability: (major, minor) of an NVIDIA device; None elsewhere. AMD's gfx numbers
            are never compared with NVIDIA's.
        traits: what the architecture can do, by name (`cdna4`, `mi3xx`, `amx_bf16` ...).
        name: the marketing name the driver gives, or "".
        index: ordinal among the visible devices of its platform.
        memory_bytes: total memory, or None when unknown.
        cores: processors this process may run on (CPU only), or None.
        simulated: True when nobody has seen such a device here.
        notes: what detection found odd, one sentence each.
        known: False for an architecture that attnplat has no facts of; only backends that are
            compiled for the device when they are used are chosen on it.
    """

    platform: str
    arch: str
    capability: tuple[int, int] | None = None
    traits: frozenset[str] = frozenset()
    name: str = ""
    index: int = 0
    memory_bytes: int | None = None
    cores: int | None = None
    simulated: bool = False
    notes: tuple[str, ...] = ()
    known: bool = True

    @property
    def major(self) -> int | None:
        """The capability's major number, or None."""
        return None if self.capability is None else self.capability[0]

    def __str__(self) -> str:
        return f"{self.platform}:{self.arch}" + (" (simulated)" if self.simulated else "")

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values, traits sorted."""
        return {
            "platform": str(self.platform),
            "arch": self.arch,
            "capability": list(self.capability) if self.capability else None,
            "traits": sorted(self.traits),
            "name": self.name,
            "index": self.index,
            "memory_bytes": self.memory_bytes,
            "cores": self.cores,
            "simulated": self.simulated,
            "notes": list(self.notes),
            "known": self.known,
        }
