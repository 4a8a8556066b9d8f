"""Reading NVML, NVIDIA's management library: no context is created on any device.

Through NVIDIA's own bindings (the package nvidia-ml-py), or else straight from the driver's
library, so that a machine without the package is not taken for one without a device.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from attnplat.platforms.cuda.nvml_library import NvmlLibrary

T = TypeVar("T")


class MigInstance(NamedTuple):
    """A slice of a device with memory of its own (NVIDIA's Multi-Instance GPU)."""

    uuid: str
    name: str = ""
    memory_bytes: int | None = None


class NvmlDevice(NamedTuple):
    """One device as NVML describes it; None where the driver has no answer ("[N/A]")."""

    uuid: str
    name: str = ""
    capability: tuple[int, int] | None = None
    memory_bytes: int | None = None
    mig_enabled: bool = False
    mig: tuple[MigInstance, ...] = ()


class NvmlReading(NamedTuple):
    """All devices in NVML's (PCI) order, or why there are none."""

    devices: tuple[NvmlDevice, ...] = ()
    failure: str | None = None


def load_nvml(bindings: str, library: Callable[[], Any] = NvmlLibrary) -> NvmlReading:
    """Read every device through the module `bindings`, or else through the driver's `library`.

    Survives whatever either raises.
    """
    try:
        module = importlib.import_module(bindings)
    except Exception as error:
        reading = _read_library(library)
        if reading.devices or isinstance(error, ModuleNotFoundError):
            return reading
        return NvmlReading(failure=f"{bindings} cannot be imported ({_told(error)})")
    return read_nvml(module)


def _read_library(library: Callable[[], Any]) -> NvmlReading:
    try:
        module = library()
    except Exception as error:
        return NvmlReading(failure=f"NVML cannot be loaded ({_told(error)})")
    return read_nvml(module)


def read_nvml(module: Any) -> NvmlReading:
    """Every device that the bindings `module` report, or how they failed."""
    try:
        module.nvmlInit()
    except Exception as error:
        return NvmlReading(failure=f"NVML cannot be started ({_told(error)})")
    try:
        count = module.nvmlDeviceGetCount()
        return NvmlReading(tuple(_read_device(module, i) for i in range(count)))
    except Exception as error:
        return NvmlReading(failure=f"NVML cannot list devices ({_told(error)})")
    finally:
        _or_none(module.nvmlShutdown)


def _read_device(module: Any, index: int) -> NvmlDevice:
    handle = module.nvmlDeviceGetHandleByIndex(index)
    capability = _or_none(lambda: module.nvmlDeviceGetCudaComputeCapability(handle))
    mode = _or_none(lambda: module.nvmlDeviceGetMigMode(handle)[0])
    return NvmlDevice(
        uuid=_text(_or_none(lambda: module.nvmlDeviceGetUUID(handle))),
        name=_text(_or_none(lambda: module.nvmlDeviceGetName(handle))),
        capability=None if capability is None else (int(capability[0]), int(capability[1])),
        memory_bytes=_or_none(lambda: int(module.nvmlDeviceGetMemoryInfo(handle).total)),
        mig_enabled=mode == 1,
        mig=_read_mig(module, handle) if mode == 1 else (),
    )


def _read_mig(module: Any, parent: Any) -> tuple[MigInstance, ...]:
    instances = []
    for i in range(_or_none(lambda: int(module.nvmlDeviceGetMaxMigDeviceCount(parent))) or 0):
        try:  # slots without an instance raise NVMLError_NotFound
            handle = module.nvmlDeviceGetMigDeviceHandleByIndex(parent, i)
            uuid = _text(module.nvmlDeviceGetUUID(handle))
        except Exception:
            continue
        instances.append(_mig_instance(module, handle, uuid))
    return tuple(instances)


def _mig_instance(module: Any, handle: Any, uuid: str) -> MigInstance:
    return MigInstance(
        uuid,
        _text(_or_none(lambda: module.nvmlDeviceGetName(handle))),
        _or_none(lambda: int(module.nvmlDeviceGetMemoryInfo(handle).total)),
    )


def _or_none(call: Callable[[], T]) -> T | None:
    """The answer, or None where the driver has none (a field that reads "[N/A]")."""
    try:
        return call()
    except Exception:
        return None


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value if isinstance(value, str) else ""


def _told(error: Exception) -> str:
    message = str(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
