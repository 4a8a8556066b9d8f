"""NVIDIA devices: what NVML, Jetson's files or torch say, as `DeviceInfo` values.

NVML creates no context on a device. Torch is asked only on request and in a process of its
own, since its device properties do create one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

from attnplat.config.env import DriverEnvironment, read_driver_env
from attnplat.platforms.cuda.arch import Capability, make_device
from attnplat.platforms.cuda.arch import simulate as simulate
from attnplat.platforms.cuda.nvml import MigInstance, NvmlDevice, NvmlReading, load_nvml
from attnplat.platforms.cuda.visible import VARIABLE, visible_devices
from attnplat.platforms.detection import (
    NOT_ASKED,
    Detection,
    TorchReading,
    Visible,
    ask_torch_once,
    parse_meminfo,
    read_text,
)
from attnplat.platforms.device import DeviceInfo, PlatformName

# Chips of Jetson modules, by the `compatible` strings of their device tree.
TEGRA_CHIPS: dict[str, Capability] = {
    "tegra210": (5, 3),
    "tegra186": (6, 2),
    "tegra194": (7, 2),
    "tegra234": (8, 7),
    "tegra264": (11, 0),
}

# The least capable module that each major Jetson Linux release runs on.
TEGRA_RELEASES: tuple[tuple[int, Capability], ...] = ((36, (8, 7)), (34, (7, 2)), (0, (5, 3)))

# A container shares its host's /proc, so this file alone says nothing of devices to be used.
HOST_DRIVER = "/proc/driver/nvidia/version"
DRIVER_FILES = (
    "/dev/nvidiactl",
    "/usr/lib/wsl/lib/libcuda.so.1",
    "C:/Windows/System32/nvcuda.dll",
    HOST_DRIVER,
)

_CUT = "{} is set to be cut into MIG slices and has none, so that nothing can run on it"
_ONE_SLICE = "CUDA shows a process one MIG slice and no other device: {} of {} are hidden"
_FIRST_SLICE = f"the device is cut into MIG slices; name one by its UUID in {VARIABLE}"


class Probes(Protocol):
    """The system accesses that detection needs; tests pass recorded values."""

    @property
    def environment(self) -> DriverEnvironment: ...

    def nvml(self) -> NvmlReading: ...

    def driver_files(self) -> tuple[str, ...]: ...

    def tegra_release(self) -> str | None: ...

    def device_tree_compatible(self) -> str | None: ...

    def meminfo(self) -> str | None: ...

    def torch(self) -> TorchReading: ...


class SystemProbes:
    """This machine. Nothing is read before it is asked for; files are those under `root`."""

    def __init__(self, root: str | Path = "/") -> None:
        self._root = Path(root)

    @cached_property
    def environment(self) -> DriverEnvironment:
        return read_driver_env()

    def nvml(self) -> NvmlReading:
        return load_nvml("pynvml")

    def driver_files(self) -> tuple[str, ...]:
        return tuple(path for path in DRIVER_FILES if self._at(path).exists())

    def tegra_release(self) -> str | None:
        return read_text(self._at("/etc/nv_tegra_release"))

    def device_tree_compatible(self) -> str | None:
        return read_text(self._at("/proc/device-tree/compatible"))

    def meminfo(self) -> str | None:
        return read_text(self._at("/proc/meminfo"))

    def torch(self) -> TorchReading:
        return ask_torch_once(self.environment)

    def _at(self, path: str) -> Path:
        return self._root / path.lstrip("/")


class Tegra(NamedTuple):
    """What the files of a Jetson say."""

    release: str
    compatible: str | None

    @property
    def capability(self) -> Capability:
        """That of the module."""
        return parse_tegra(self.release, self.compatible)


def detect_devices(probes: Probes | None = None) -> tuple[DeviceInfo, ...]:
    """The NVIDIA devices that this process may use, in its order."""
    return detect(probes).devices


def detect(probes: Probes | None = None, *, may_ask_torch: bool = False) -> Detection:
    """The devices, and what was odd about finding them.

    Args:
        probes: the system accesses; this machine's when left out.
        may_ask_torch: where NVML gives no device though a driver is here, start a process
            that asks torch (seconds of time). Otherwise a note says what would help.
    """
    probes = SystemProbes() if probes is None else probes
    reading = probes.nvml()
    release = probes.tegra_release()
    tegra = None if release is None else Tegra(release, probes.device_tree_compatible())
    if reading.devices:
        found = _from_nvml(_told_by_tegra(reading.devices, tegra), probes.environment)
        found = found._replace(notes=(*reading.notes, *found.notes))
    else:
        found = _without_nvml(probes, reading, tegra, may_ask_torch)
    return found._replace(devices=tuple(_with_memory(d, probes) for d in found.devices))


def _without_nvml(
    probes: Probes, reading: NvmlReading, tegra: Tegra | None, may_ask_torch: bool
) -> Detection:
    driver = probes.driver_files()
    why = reading.failure or "NVML reports no device"
    if driver == (HOST_DRIVER,) and tegra is None:
        note = f"the host has an NVIDIA driver, and its devices are not in this container ({why})"
        return Detection(notes=(note,))
    if not driver and tegra is None:
        return Detection()
    asked = probes.torch() if may_ask_torch else NOT_ASKED
    if asked.vendor == PlatformName.CUDA and asked.devices:
        return _from_torch(asked, why)
    if tegra is not None:
        return _from_tegra(tegra, why, probes.environment)
    torch = asked.failure or "torch sees no NVIDIA device either"
    return Detection(notes=(f"an NVIDIA driver is here ({driver[0]}), but {why}; {torch}",))


def parse_tegra(release: str, compatible: str | None) -> Capability:
    """The capability of a Jetson module, from its release file and its device tree.

    The device tree names the chip; without it the least capable module that the release
    ("# R36 (release), ...") runs on is assumed.
    """
    for chip, capability in TEGRA_CHIPS.items():
        if compatible and re.search(rf"\b{chip}\b", compatible):
            return capability
    match = re.search(r"R([0-9]{1,4})", release)
    major = int(match.group(1)) if match else 0
    return next(capability for since, capability in TEGRA_RELEASES if major >= since)


def _told_by_tegra(found: Sequence[NvmlDevice], tegra: Tegra | None) -> tuple[NvmlDevice, ...]:
    """A Jetson's NVML leaves fields out that its files tell."""
    if tegra is None:
        return tuple(found)
    return tuple(d if d.capability else d._replace(capability=tegra.capability) for d in found)


def _with_memory(device: DeviceInfo, probes: Probes) -> DeviceInfo:
    """A device without memory of its own has the system's."""
    if device.memory_bytes is not None or "integrated" not in device.traits:
        return device
    return replace(device, memory_bytes=parse_meminfo(probes.meminfo() or ""))


def _from_nvml(found: Sequence[NvmlDevice], environment: DriverEnvironment) -> Detection:
    listed = environment.cuda_visible_devices
    if listed is not None and listed.strip().startswith("MIG-"):
        devices, visible = _visible_instances(found, listed)
    else:
        devices, visible = _visible_wholes(found, listed)
    notes = [visible.note] if visible.note else []
    notes += [_CUT.format(d.name) for d in found if d.mig_enabled and not d.mig]
    slices = [d for d, instance in devices if instance is not None]
    if slices and len(devices) > 1:
        notes.append(_ONE_SLICE.format(len(devices) - 1, len(devices)))
        devices = [next((d, instance) for d, instance in devices if instance is not None)]
    if _order_is_uncertain(found, environment):
        notes.append(
            "devices differ and CUDA may number them fastest first; "
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID to have them numbered as listed here"
        )
    made = (replace(d, index=i) for i, (d, _) in enumerate(devices))
    return Detection(tuple(made), tuple(notes))


# A visible device, and the slice that it is one of, or None where it is whole.
_Shown = tuple[DeviceInfo, MigInstance | None]


def _visible_wholes(
    found: Sequence[NvmlDevice], listed: str | None
) -> tuple[list[_Shown], Visible]:
    visible = visible_devices(listed, [d.uuid for d in found])
    shown = [_whole_or_slice(found[i]) for i in visible.ordinals]
    return [pair for pair in shown if pair is not None], visible


def _whole_or_slice(found: NvmlDevice) -> _Shown | None:
    """A device cut into slices is reached through its first one; without any it is unusable."""
    if not found.mig_enabled:
        return make_device(found.capability, found.name, found.memory_bytes), None
    if not found.mig:
        return None
    return _slice(found, found.mig[0], _FIRST_SLICE if len(found.mig) > 1 else None), found.mig[0]


def _visible_instances(found: Sequence[NvmlDevice], listed: str) -> tuple[list[_Shown], Visible]:
    slices = [(device, instance) for device in found for instance in device.mig]
    by_numbers = listed.strip().startswith("MIG-GPU-")
    names = [_old_name(*pair) if by_numbers else pair[1].uuid for pair in slices]
    visible = visible_devices(listed, names)
    shown = [slices[i] for i in visible.ordinals]
    return [(_slice(*pair), pair[1]) for pair in shown], visible


def _old_name(device: NvmlDevice, instance: MigInstance) -> str:
    """How drivers before R470 call a slice; "" where its numbers are not known."""
    if instance.numbers is None:
        return ""
    return f"MIG-{device.uuid}/{instance.numbers[0]}/{instance.numbers[1]}"


def _slice(found: NvmlDevice, instance: MigInstance, note: str | None = None) -> DeviceInfo:
    name = instance.name or f"{found.name} MIG"
    device = make_device(found.capability, name, instance.memory_bytes)
    return replace(device, notes=(*device.notes, note)) if note else device


def _order_is_uncertain(found: Sequence[NvmlDevice], environment: DriverEnvironment) -> bool:
    listed = environment.cuda_visible_devices
    named = listed is not None and listed.strip()[:4] in ("", "GPU-", "MIG-")
    by_bus = (environment.cuda_device_order or "").upper() == "PCI_BUS_ID"
    return len({d.name for d in found}) > 1 and not by_bus and not named


def _from_torch(reading: TorchReading, why_not_nvml: str) -> Detection:
    note = f"found by torch in a process of its own, because {why_not_nvml}"
    devices = [make_device(d.capability, d.name, d.memory_bytes) for d in reading.devices]
    return Detection(
        tuple(replace(d, index=i, notes=(*d.notes, note)) for i, d in enumerate(devices))
    )


def _from_tegra(tegra: Tegra, why_not_nvml: str, environment: DriverEnvironment) -> Detection:
    device = make_device(tegra.capability, "NVIDIA Jetson")
    notes = (*device.notes, f"a Jetson by its release file, because {why_not_nvml}")
    device = replace(device, traits=device.traits | {"integrated"}, notes=notes)
    visible = visible_devices(environment.cuda_visible_devices, ("",))
    return Detection((device,) * len(visible.ordinals), (visible.note,) if visible.note else ())
