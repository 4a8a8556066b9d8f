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
from typing import Protocol

from attnplat.config.env import DriverEnvironment, read_driver_env
from attnplat.platforms.cuda.arch import Capability, make_device
from attnplat.platforms.cuda.arch import simulate as simulate
from attnplat.platforms.cuda.nvml import MigInstance, NvmlDevice, NvmlReading, load_nvml
from attnplat.platforms.detection import (
    NOT_ASKED,
    Detection,
    TorchReading,
    Visible,
    ask_torch,
    read_text,
    visible_devices,
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

_CUT = "{} is set to be cut into MIG slices and has none, so that nothing can run on it"


class Probes(Protocol):
    """The system accesses that detection needs; tests pass recorded values."""

    @property
    def environment(self) -> DriverEnvironment: ...

    def nvml(self) -> NvmlReading: ...

    def driver_files(self) -> tuple[str, ...]: ...

    def tegra_release(self) -> str | None: ...

    def device_tree_compatible(self) -> str | None: ...

    def torch(self) -> TorchReading: ...


class SystemProbes:
    """This machine. Nothing is read before it is asked for."""

    _DRIVER_FILES = (
        "/proc/driver/nvidia/version",
        "/dev/nvidiactl",
        "/usr/lib/wsl/lib/libcuda.so.1",
    )

    @cached_property
    def environment(self) -> DriverEnvironment:
        return read_driver_env()

    def nvml(self) -> NvmlReading:
        return load_nvml("pynvml")

    def driver_files(self) -> tuple[str, ...]:
        return tuple(path for path in self._DRIVER_FILES if Path(path).exists())

    def tegra_release(self) -> str | None:
        return read_text("/etc/nv_tegra_release")

    def device_tree_compatible(self) -> str | None:
        return read_text("/proc/device-tree/compatible")

    def torch(self) -> TorchReading:
        return ask_torch()


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
    if reading.devices:
        return _from_nvml(reading.devices, probes.environment)
    driver = probes.driver_files()
    release = probes.tegra_release()
    if not driver and release is None:
        return Detection()
    why = reading.failure or "NVML reports no device"
    asked = probes.torch() if may_ask_torch else NOT_ASKED
    if asked.vendor == PlatformName.CUDA and asked.devices:
        return _from_torch(asked, why)
    if release is not None:
        return _from_tegra(release, probes.device_tree_compatible(), why)
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
    match = re.search(r"R([0-9]+)", release)
    major = int(match.group(1)) if match else 0
    return next(capability for since, capability in TEGRA_RELEASES if major >= since)


def _from_nvml(found: Sequence[NvmlDevice], environment: DriverEnvironment) -> Detection:
    listed = environment.cuda_visible_devices
    if listed is not None and listed.strip().startswith("MIG-"):
        devices, visible = _visible_instances(found, listed)
    else:
        devices, visible = _visible_wholes(found, listed)
    notes = [visible.note] if visible.note else []
    notes += [_CUT.format(d.name) for d in found if d.mig_enabled and not d.mig]
    if _order_is_uncertain(found, environment):
        notes.append(
            "devices differ and CUDA may number them fastest first; "
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID to have them numbered as listed here"
        )
    return Detection(tuple(replace(d, index=i) for i, d in enumerate(devices)), tuple(notes))


def _visible_wholes(
    found: Sequence[NvmlDevice], listed: str | None
) -> tuple[list[DeviceInfo], Visible]:
    visible = visible_devices("CUDA_VISIBLE_DEVICES", listed, [d.uuid for d in found])
    devices = [_whole_or_slice(found[i]) for i in visible.ordinals]
    return [d for d in devices if d is not None], visible


def _whole_or_slice(found: NvmlDevice) -> DeviceInfo | None:
    """A device cut into slices is reached through its first one; without any it is unusable."""
    if not found.mig_enabled:
        return make_device(found.capability, found.name, found.memory_bytes)
    if not found.mig:
        return None
    note = "the device is cut into MIG slices; name one by its UUID in CUDA_VISIBLE_DEVICES"
    return _slice(found, found.mig[0], note)


def _visible_instances(
    found: Sequence[NvmlDevice], listed: str
) -> tuple[list[DeviceInfo], Visible]:
    slices = [(device, instance) for device in found for instance in device.mig]
    uuids = [instance.uuid for _, instance in slices]
    visible = visible_devices("CUDA_VISIBLE_DEVICES", listed, uuids)
    return [_slice(*slices[i]) for i in visible.ordinals], visible


def _slice(found: NvmlDevice, instance: MigInstance, note: str | None = None) -> DeviceInfo:
    name = instance.name or f"{found.name} MIG"
    device = make_device(found.capability, name, instance.memory_bytes)
    return replace(device, notes=(*device.notes, note)) if note else device


def _order_is_uncertain(found: Sequence[NvmlDevice], environment: DriverEnvironment) -> bool:
    by_bus = (environment.cuda_device_order or "").upper() == "PCI_BUS_ID"
    return len({d.name for d in found}) > 1 and not by_bus


def _from_torch(reading: TorchReading, why_not_nvml: str) -> Detection:
    note = f"found by torch in a process of its own, because {why_not_nvml}"
    devices = [make_device(d.capability, d.name, d.memory_bytes) for d in reading.devices]
    return Detection(
        tuple(replace(d, index=i, notes=(*d.notes, note)) for i, d in enumerate(devices))
    )


def _from_tegra(release: str, compatible: str | None, why_not_nvml: str) -> Detection:
    device = make_device(parse_tegra(release, compatible), "NVIDIA Jetson")
    notes = (*device.notes, f"a Jetson by its release file, because {why_not_nvml}")
    return Detection((replace(device, traits=device.traits | {"integrated"}, notes=notes),))
