"""What every backend of a CPU does first: it looks at the device, and opens the C++ library."""

from __future__ import annotations

import torch

from attnplat.config.env import read_env
from attnplat.errors import ConfigError, PackageError
from attnplat.platforms.cpu.kernels import library
from attnplat.platforms.cpu.kernels.library import KernelError, Library


def require_cpu(name: str, device: torch.device) -> None:
    """Raises ConfigError where the backend of that name was given another device."""
    if device.type != "cpu":
        raise ConfigError(f"{name} runs on the CPU; the device is {device}")


def open_library(isa: str | None) -> tuple[Library, int]:
    """The library, and the index of the instruction set to use.

    That is `isa`, else the one of ATTNPLAT_CPU_ISA, else the highest that this machine has.

    Raises:
        PackageError: attnplat was installed without the library, or it is of another version.
        ConfigError: this machine does not have the instruction set.
    """
    try:
        found = library.load()
    except KernelError as error:
        raise PackageError(str(error)) from error
    try:
        return found, found.isa_index(isa or read_env().cpu_isa)
    except KernelError as error:
        raise ConfigError(str(error)) from error
