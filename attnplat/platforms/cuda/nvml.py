"""Reading NVML, NVIDIA's management library: no context is created on any device.

Straight from the driver's library, or else through NVIDIA's own bindings (the package
nvidia-ml-py), which know of more places where that library can be.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from attnplat.platforms.cuda.nvml_library import NvmlLibrary

T = TypeVar("T")

# Bindings are other people's code: one that ends the program must not end this one.
_FAILURES = (Exception, SystemExit)


class MigInstance(NamedTuple):
    """A slice of a device with memory of its own (NVIDIA's Multi-Instance GPU).

    `numbers` are those of its GPU instance and compute instance, by which drivers before R470
    name it.
    """

    uuid: str
    name: str = ""
    memory_bytes: int | None = None
    numbers: tuple[int, int] | None = None


class NvmlDevice(NamedTuple):
    """One device as NVML describes it; None where the driver has no answer ("[N/A]")."""

    uuid: str
    name: str = ""
    capability: tuple[int, int] | None = None
    memory_bytes: int | None = None
    mig_enabled: bool = False
    mig: tuple[MigInstance, ...] = ()


class NvmlReading(NamedTuple):
    """All devices in NVML's (PCI) order, or why there are none; `notes` on those it lost."""

    devices: tuple[NvmlDevice, ...] = ()
    failure: str | None = None
    notes: tuple[str, ...] = ()


def load_nvml(bindings: str, library: Callable[[], Any] = NvmlLibrary) -> NvmlReading:
    """Read every device through the driver's `library`, or else through the module `bindings`.

    The bindings are asked only where the library cannot be loaded. Survives whatever either
    raises.
    """
    try:
        loaded = library()
    except _FAILURES as error:
        return _read_bindings(bindings, f"NVML cannot be loaded ({_told(error)})")
    return read_nvml(loaded)


def _read_bindings(bindings: str, why_not_library: str) -> NvmlReading:
    try:
        reading = read_nvml(importlib.import_module(bindings))
    except ModuleNotFoundError as error:
        if error.name == bindings:
            return NvmlReading(failure=why_not_library)
        reading = NvmlReading(failure=f"{bindings} cannot be imported ({_told(error)})")
    except _FAILURES as error:
        reading = NvmlReading(failure=f"{bindings} cannot be imported ({_told(error)})")
    if reading.failure is None:
        return reading
    return NvmlReading(failure=f"{why_not_library}, {reading.failure}")


def read_nvml(module: Any) -> NvmlReading:
    """Every device that the bindings `module` report, or how they failed."""
    try:
        module.nvmlInit()
    except _FAILURES as error:
        return NvmlReading(failure=f"NVML cannot be started ({_told(error)})")
    try:
        return _read_devices(module, int(module.nvmlDeviceGetCount()))
    except _FAILURES as error:
        return NvmlReading(failure=f"NVML cannot list devices ({_told(error)})")
    finally:
        _or_none(lambda: module.nvmlShutdown())


def _read_devices(module: Any, count: int) -> NvmlReading:
    """A device that cannot be opened is lost alone; where all are, listing has failed."""
    devices, notes = [], []
    for index in range(count):
        try:
            handle = module.nvmlDeviceGetHandleByIndex(index)
        except _FAILURES as error:
            notes.append(f"NVIDIA device {index} cannot be used ({_told(error)})")
        else:
            devices.append(_read_device(module, handle))
    if notes and not devices:
        return NvmlReading(failure=f"NVML cannot list devices ({'; '.join(notes)})")
    return NvmlReading(tuple(devices), notes=tuple(notes))


def _read_device(module: Any, handle: Any) -> NvmlDevice:
    mode = _or_none(lambda: module.nvmlDeviceGetMigMode(handle)[0])
    return NvmlDevice(
        uuid=_text(_or_none(lambda: module.nvmlDeviceGetUUID(handle))),
        name=_text(_or_none(lambda: module.nvmlDeviceGetName(handle))),
        capability=_or_none(
            lambda: _capability(*module.nvmlDeviceGetCudaComputeCapability(handle))
        ),
        memory_bytes=_memory(module, handle),
        mig_enabled=mode == 1,
        mig=_read_mig(module, handle) if mode == 1 else (),
    )


def _capability(major: Any, minor: Any) -> tuple[int, int]:
    """The numbers; ValueError for those of no device."""
    capability = int(major), int(minor)
    if not (1 <= capability[0] <= 99 and 0 <= capability[1] <= 9):
        raise ValueError(capability)
    return capability


def _memory(module: Any, handle: Any) -> int | None:
    """Total memory; devices that share the system's (GB10, Jetson) refuse to tell, or tell 0."""
    return _or_none(lambda: int(module.nvmlDeviceGetMemoryInfo(handle).total)) or None


def _read_mig(module: Any, parent: Any) -> tuple[MigInstance, ...]:
    instances = []
    for i in range(_or_none(lambda: int(module.nvmlDeviceGetMaxMigDeviceCount(parent))) or 0):
        try:  # slots without an instance raise NVMLError_NotFound
            handle = module.nvmlDeviceGetMigDeviceHandleByIndex(parent, i)
            uuid = _text(module.nvmlDeviceGetUUID(handle))
        except _FAILURES:
            continue
        instances.append(_mig_instance(module, handle, uuid))
    return tuple(instances)


def _mig_instance(module: Any, handle: Any, uuid: str) -> MigInstance:
    gpu = _or_none(lambda: int(module.nvmlDeviceGetGpuInstanceId(handle)))
    compute = _or_none(lambda: int(module.nvmlDeviceGetComputeInstanceId(handle)))
    return MigInstance(
        uuid,
        _text(_or_none(lambda: module.nvmlDeviceGetName(handle))),
        _memory(module, handle),
        None if gpu is None or compute is None else (gpu, compute),
    )


def _or_none(call: Callable[[], T]) -> T | None:
    """The answer, or None where the driver has none (a field that reads "[N/A]")."""
    try:
        return call()
    except _FAILURES:
        return None


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value if isinstance(value, str) else ""


def _told(error: BaseException) -> str:
    message = str(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
