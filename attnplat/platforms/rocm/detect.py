"""AMD devices: what the kernel's KFD topology says, as `DeviceInfo` values.

The topology is text under sysfs; reading it loads no library and creates no context.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

from attnplat.config.env import DriverEnvironment, read_driver_env
from attnplat.platforms.detection import (
    NOT_ASKED,
    Detection,
    TorchReading,
    ask_torch_once,
    read_text,
)
from attnplat.platforms.device import DeviceInfo, PlatformName
from attnplat.platforms.rocm.arch import gfx_name, make_device, parse_arch, same_family
from attnplat.platforms.rocm.arch import simulate as simulate
from attnplat.platforms.rocm.visible import visible_to_hip, visible_to_rocr

AMD_VENDOR_ID = 0x1002
KFD_NODES = "sys/class/kfd/kfd/topology/nodes"
DRM = "sys/class/drm"


class KfdNode(NamedTuple):
    """The texts of one node of the KFD topology; None where a file may not be read."""

    number: int
    properties: str | None
    memory_banks: tuple[str, ...] = ()
    product_name: str | None = None


class Probes(Protocol):
    """The system accesses that detection needs; tests pass recorded values."""

    @property
    def environment(self) -> DriverEnvironment: ...

    def kfd_nodes(self) -> tuple[KfdNode, ...]: ...

    def kfd_opens(self) -> bool: ...

    def wsl_device(self) -> bool: ...

    def torch(self) -> TorchReading: ...


class SystemProbes:
    """This machine. Nothing is read before it is asked for; files are those under `root`."""

    def __init__(self, root: str | Path = "/") -> None:
        self._root = Path(root)

    @cached_property
    def environment(self) -> DriverEnvironment:
        return read_driver_env()

    def kfd_nodes(self) -> tuple[KfdNode, ...]:
        return read_kfd_nodes(self._root / KFD_NODES, self._root / DRM)

    def kfd_opens(self) -> bool:
        return os.access(self._root / "dev/kfd", os.R_OK | os.W_OK)

    def wsl_device(self) -> bool:
        return (self._root / "dev/dxg").exists() and (self._root / "opt/rocm").exists()

    def torch(self) -> TorchReading:
        return ask_torch_once(self.environment)


def detect_devices(probes: Probes | None = None) -> tuple[DeviceInfo, ...]:
    """The AMD devices that this process may use, in its order."""
    return detect(probes).devices


def detect(probes: Probes | None = None, *, may_ask_torch: bool = False) -> Detection:
    """The devices, and what was odd about finding them.

    Args:
        probes: the system accesses; this machine's when left out.
        may_ask_torch: under Windows' Linux subsystem, which has no KFD, start a process that
            asks torch (seconds of time). Otherwise a note says what would help.
    """
    probes = SystemProbes() if probes is None else probes
    nodes = probes.kfd_nodes()
    found = [device for node in nodes if (device := parse_node(node)) is not None]
    too_old = tuple(note for node in nodes if (note := _unknown_note(node)) is not None)
    if not found:
        closed = [str(node.number) for node in nodes if node.properties is None]
        if closed:
            return Detection(notes=(f"KFD nodes {', '.join(closed)} may not be read", *too_old))
        if too_old or not probes.wsl_device():
            return Detection(notes=too_old)
        return _from_wsl(probes, may_ask_torch)
    if not probes.kfd_opens():
        note = (
            f"{len(found)} AMD devices are here, but /dev/kfd cannot be opened: pass the device "
            "to the container, or add the user to the groups render and video"
        )
        return Detection(notes=(note, *too_old))
    seen = _visible(found, probes.environment)
    return seen._replace(notes=(*seen.notes, *too_old))


def parse_properties(text: str) -> dict[str, int]:
    """The `name value` lines of a KFD properties file; other lines are skipped."""
    values = {}
    for line in text.splitlines():
        parts = line.split()
        if len(parts) == 2 and parts[1].isascii() and parts[1].isdigit():
            values[parts[0]] = int(parts[1])
    return values


class KfdDevice(NamedTuple):
    """What one GPU node says."""

    arch: str
    uuid: str
    name: str
    memory_bytes: int | None


def _gpu_properties(node: KfdNode) -> dict[str, int] | None:
    """The properties of an AMD GPU's node, or None for any other's."""
    values = parse_properties(node.properties or "")
    amds = values.get("vendor_id", AMD_VENDOR_ID) == AMD_VENDOR_ID
    return values if values.get("simd_count") and amds else None


def parse_node(node: KfdNode) -> KfdDevice | None:
    """The GPU that a node describes, or None for a processor or another vendor's device."""
    values = _gpu_properties(node)
    arch = gfx_name(values.get("gfx_target_version", 0)) if values else None
    if values is None or arch is None:
        return None
    banks = [parse_properties(bank) for bank in node.memory_banks]
    # Heap types 1 and 2 are the device's own memory, visible to the host or not.
    sizes = [
        b["size_in_bytes"] for b in banks if b.get("heap_type") in (1, 2) and "size_in_bytes" in b
    ]
    unique = values.get("unique_id", 0)
    return KfdDevice(
        arch=arch,
        uuid=f"GPU-{unique:016x}" if unique else "",
        name=(node.product_name or "").strip(),
        memory_bytes=sum(sizes) or None,
    )


def _unknown_note(node: KfdNode) -> str | None:
    """What to say of an AMD GPU that parse_node leaves out."""
    values = _gpu_properties(node)
    if values is None or parse_node(node) is not None:
        return None
    version = values.get("gfx_target_version", 0)
    return (
        f"KFD node {node.number} is an AMD device with gfx_target_version {version}, "
        "no architecture from gfx900 on; it is passed over"
    )


def read_kfd_nodes(nodes: Path, drm: Path) -> tuple[KfdNode, ...]:
    """The nodes under `nodes`, by number, with product names from `drm`; none without a KFD."""
    try:
        folders = [p for p in nodes.iterdir() if p.name.isdigit()]
    except OSError:
        return ()
    return tuple(_read_node(folder, drm) for folder in sorted(folders, key=lambda p: int(p.name)))


def _read_node(folder: Path, drm: Path) -> KfdNode:
    properties = read_text(folder / "properties")
    if properties is None:
        return KfdNode(int(folder.name), None)
    banks = sorted(folder.glob("mem_banks/*/properties"))
    minor = parse_properties(properties).get("drm_render_minor", 0)
    product = read_text(drm / f"renderD{minor}" / "device" / "product_name") if minor else None
    texts = tuple(text for bank in banks if (text := read_text(bank)) is not None)
    return KfdNode(int(folder.name), properties, texts, product)


def _visible(found: Sequence[KfdDevice], environment: DriverEnvironment) -> Detection:
    """ROCr hides devices first; HIP's list then counts what is left."""
    uuids = [device.uuid for device in found]
    by_rocr = visible_to_rocr(environment.rocr_visible_devices, uuids)
    left = [found[i] for i in by_rocr.ordinals]
    variable, listed = "HIP_VISIBLE_DEVICES", environment.hip_visible_devices
    if listed is None:  # HIP takes NVIDIA's spelling where its own is unset
        variable, listed = "CUDA_VISIBLE_DEVICES", environment.cuda_visible_devices
    by_hip = visible_to_hip(variable, listed, [device.uuid for device in left])
    override = environment.hsa_override_gfx_version
    devices = [_real(left[i], override) for i in by_hip.ordinals]
    return Detection(
        tuple(replace(d, index=i) for i, d in enumerate(devices)),
        tuple(note for note in (by_rocr.note, by_hip.note) if note),
    )


def _real(found: KfdDevice, override: str | None) -> DeviceInfo:
    forced = parse_override(override) if override else None
    if forced is None or forced == found.arch:
        return make_device(found.arch, found.name, found.memory_bytes)
    device = make_device(forced, found.name, found.memory_bytes)
    note = f"HSA_OVERRIDE_GFX_VERSION={override} makes a {found.arch} pass for a {forced}"
    if same_family(forced, found.arch):
        return replace(device, notes=(*device.notes, note))
    # Compilers aim at the forced one, and the device lacks what its own family does not have.
    both = device.traits & make_device(found.arch).traits
    note += ", which is of another family; only what both have is assumed"
    return replace(device, traits=both, notes=(*device.notes, note))


def parse_override(text: str) -> str | None:
    """The architecture that `HSA_OVERRIDE_GFX_VERSION` names: `10.3.0` is gfx1030."""
    match = re.fullmatch(r"([0-9]{1,2})\.([0-9]{1,2})\.([0-9]{1,2})", text.strip())
    if match is None:
        return None
    major, minor, stepping = (int(part) for part in match.groups())
    return gfx_name(major * 10000 + minor * 100 + stepping)


def _from_wsl(probes: Probes, may_ask_torch: bool) -> Detection:
    asked = probes.torch() if may_ask_torch else NOT_ASKED
    why = "Windows' Linux subsystem shows no KFD topology"
    if asked.vendor != PlatformName.ROCM or not asked.devices:
        told = asked.failure or "torch sees no AMD device either"
        return Detection(notes=(f"ROCm is here, but {why}; {told}",))
    note = f"found by torch in a process of its own, because {why}"
    named = [(parse_arch(d.gcn_arch or ""), d) for d in asked.devices]
    devices = [
        replace(make_device(arch, d.name, d.memory_bytes), index=i)
        for i, (arch, d) in enumerate(named)
        if arch is not None
    ]
    unnamed = tuple(
        f"torch does not tell the architecture of {d.name!r} ({d.gcn_arch!r}); it is passed over"
        for arch, d in named
        if arch is None
    )
    return Detection(tuple(replace(d, notes=(*d.notes, note)) for d in devices), unnamed)
