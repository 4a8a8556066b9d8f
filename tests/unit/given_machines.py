"""Machines that answer what a test gives them, in place of a detector's accesses to its own."""

from __future__ import annotations

from dataclasses import dataclass, field

from attnplat.config.env import DriverEnvironment
from attnplat.platforms.cuda.nvml import NvmlReading
from attnplat.platforms.detection import TorchReading
from attnplat.platforms.rocm.detect import KfdNode


@dataclass
class NvidiaMachine:
    """What NVIDIA's detector asks."""

    reading: NvmlReading = field(default_factory=NvmlReading)
    environment: DriverEnvironment = field(default_factory=DriverEnvironment)
    files: tuple[str, ...] = ()
    release: str | None = None
    compatible: str | None = None
    mem: str | None = None
    told: TorchReading = field(default_factory=TorchReading)
    torch_calls: int = 0

    def nvml(self) -> NvmlReading:
        return self.reading

    def driver_files(self) -> tuple[str, ...]:
        return self.files

    def tegra_release(self) -> str | None:
        return self.release

    def device_tree_compatible(self) -> str | None:
        return self.compatible

    def meminfo(self) -> str | None:
        return self.mem

    def torch(self) -> TorchReading:
        self.torch_calls += 1
        return self.told


@dataclass
class AmdMachine:
    """What AMD's detector asks."""

    nodes: tuple[KfdNode, ...] = ()
    environment: DriverEnvironment = field(default_factory=DriverEnvironment)
    opens: bool = True
    wsl: bool = False
    told: TorchReading = field(default_factory=TorchReading)
    torch_calls: int = 0

    def kfd_nodes(self) -> tuple[KfdNode, ...]:
        return self.nodes

    def kfd_opens(self) -> bool:
        return self.opens

    def wsl_device(self) -> bool:
        return self.wsl

    def torch(self) -> TorchReading:
        self.torch_calls += 1
        return self.told
