"""The few functions of the driver's NVML library that detection calls, without bindings.

Function names and argument order are those of NVIDIA's C API; the class offers them under
the names, and with the answers, that the package nvidia-ml-py gives them.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

_LIBRARIES = {
    "linux": ("libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1"),
    "win32": ("nvml.dll", r"C:\Program Files\NVIDIA Corporation\NVSMI\nvml.dll"),
}
_TEXT_BYTES = 96


class NvmlError(Exception):
    """A call that NVML refused, with NVML's own message."""


class _Memory(ctypes.Structure):
    """`nvmlMemory_t`, in bytes."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class NvmlLibrary:
    """NVML as it is installed with the driver. Raises OSError where there is none."""

    def __init__(self, names: tuple[str, ...] | None = None) -> None:
        self._library = _load(_LIBRARIES.get(sys.platform, ()) if names is None else names)
        self._library.nvmlErrorString.restype = ctypes.c_char_p

    def nvmlInit(self) -> None:
        self._call("nvmlInit_v2")

    def nvmlShutdown(self) -> None:
        self._call("nvmlShutdown")

    def nvmlDeviceGetCount(self) -> int:
        return self._number("nvmlDeviceGetCount_v2")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        return handle

    def nvmlDeviceGetName(self, handle: ctypes.c_void_p) -> str:
        return self._text("nvmlDeviceGetName", handle)

    def nvmlDeviceGetUUID(self, handle: ctypes.c_void_p) -> str:
        return self._text("nvmlDeviceGetUUID", handle)

    def nvmlDeviceGetCudaComputeCapability(self, handle: ctypes.c_void_p) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        pointers = ctypes.byref(major), ctypes.byref(minor)
        self._call("nvmlDeviceGetCudaComputeCapability", handle, *pointers)
        return major.value, minor.value

    def nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p) -> _Memory:
        memory = _Memory()
        self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        return memory

    def nvmlDeviceGetMigMode(self, handle: ctypes.c_void_p) -> tuple[int, int]:
        now, pending = ctypes.c_uint(), ctypes.c_uint()
        self._call("nvmlDeviceGetMigMode", handle, ctypes.byref(now), ctypes.byref(pending))
        return now.value, pending.value

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: ctypes.c_void_p) -> int:
        return self._number("nvmlDeviceGetMaxMigDeviceCount", handle)

    def nvmlDeviceGetMigDeviceHandleByIndex(
        self, handle: ctypes.c_void_p, index: int
    ) -> ctypes.c_void_p:
        name, instance = "nvmlDeviceGetMigDeviceHandleByIndex", ctypes.c_void_p()
        self._call(name, handle, ctypes.c_uint(index), ctypes.byref(instance))
        return instance

    def nvmlDeviceGetGpuInstanceId(self, instance: ctypes.c_void_p) -> int:
        return self._number("nvmlDeviceGetGpuInstanceId", instance)

    def nvmlDeviceGetComputeInstanceId(self, instance: ctypes.c_void_p) -> int:
        return self._number("nvmlDeviceGetComputeInstanceId", instance)

    def _number(self, function: str, *arguments: Any) -> int:
        number = ctypes.c_uint()
        self._call(function, *arguments, ctypes.byref(number))
        return number.value

    def _text(self, function: str, handle: ctypes.c_void_p) -> str:
        buffer = ctypes.create_string_buffer(_TEXT_BYTES)
        self._call(function, handle, buffer, ctypes.c_uint(_TEXT_BYTES))
        return buffer.value.decode(errors="replace")

    def _call(self, function: str, *arguments: Any) -> None:
        call: Callable[..., int] = getattr(self._library, function)
        code = call(*arguments)
        if code != 0:
            message: bytes = self._library.nvmlErrorString(code) or b"unknown error"
            raise NvmlError(f"{function}: {message.decode(errors='replace')}")


def _load(names: tuple[str, ...]) -> ctypes.CDLL:
    failure = OSError(f"there is no NVML for {sys.platform}")
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            failure = error
    raise failure
