"""The processor this process runs on: its vendor, what it can execute, how much of it is ours.

Reads what the operating system reports (`/proc/cpuinfo`, `sysctl` on macOS), which leaves out
what the system or a virtual machine has switched off, and what a container may use of it.
"""

from __future__ import annotations

import math
import os
import platform as host
import sys
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from attnplat.config.env import Environment, read_env
from attnplat.platforms.cpu.arch import AARCH64, X86_64, Processor, device_of
from attnplat.platforms.cpu.arch import simulate as simulate
from attnplat.platforms.cpu.cgroup import read_limits
from attnplat.platforms.detection import Detection, parse_meminfo, read_text
from attnplat.platforms.device import DeviceInfo

_MACHINES = {"x86_64": X86_64, "amd64": X86_64, "aarch64": AARCH64, "arm64": AARCH64}
_VENDORS = {
    "GenuineIntel": "intel",
    "AuthenticAMD": "amd",
    "HygonGenuine": "amd",
}


# macOS: a sysctl name whose value is 1 -> the flag Linux reports for the same thing.
SYSCTL_FLAGS: dict[str, str] = {
    "hw.optional.neon": "asimd",
    "hw.optional.AdvSIMD": "asimd",
    "hw.optional.arm.AdvSIMD": "asimd",
    "hw.optional.arm.FEAT_BF16": "bf16",
    "hw.optional.arm.FEAT_I8MM": "i8mm",
    "hw.optional.arm.FEAT_DotProd": "asimddp",
    "hw.optional.arm.FEAT_FP16": "asimdhp",
}


# ARM's processors have no names in `/proc/cpuinfo`: (implementer, part) -> name.
ARM_NAMES: dict[tuple[str, str], str] = {
    ("0x41", "0xd08"): "Cortex-A72",
    ("0x41", "0xd0b"): "Cortex-A76",
    ("0x41", "0xd0c"): "Neoverse-N1",
    ("0x41", "0xd40"): "Neoverse-V1",
    ("0x41", "0xd42"): "Cortex-A78AE",
    ("0x41", "0xd49"): "Neoverse-N2",
    ("0x41", "0xd4f"): "Neoverse-V2",
    ("0x41", "0xd84"): "Neoverse-V3",
    ("0x46", "0x001"): "A64FX",
    ("0x48", "0xd01"): "Kunpeng-920",
    ("0x4e", "0x004"): "Carmel",
    ("0xc0", "0xac3"): "Ampere-1",
}


class Probes(Protocol):
    """The system accesses that detection needs; tests pass recorded values."""

    def system(self) -> str: ...

    def machine(self) -> str: ...

    def processor(self) -> str: ...

    def sysctl(self) -> str | None: ...

    def text(self, path: str) -> str | None: ...

    def cores(self) -> int | None: ...

    def isa_limit(self) -> str | None: ...


class SystemProbes:
    """This machine. Nothing is read before it is asked for; files are those under `root`."""

    def __init__(self, environment: Environment | None = None, root: str | Path = "/") -> None:
        self._environment = environment
        self._root = Path(root)

    def system(self) -> str:
        return sys.platform

    def machine(self) -> str:
        return host.machine()

    def processor(self) -> str:
        """What Windows calls the processor; other systems start a program to tell."""
        return host.processor() if sys.platform == "win32" else ""

    def text(self, path: str) -> str | None:
        return read_text(self._root / path.lstrip("/"))

    def sysctl(self) -> str | None:
        import subprocess

        try:
            done = subprocess.run(
                ["/usr/sbin/sysctl", "hw", "machdep.cpu"],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=10,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout

    def cores(self) -> int | None:
        """Processors in this process's affinity mask, where there is such a thing."""
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count()

    def isa_limit(self) -> str | None:
        environment = read_env() if self._environment is None else self._environment
        return environment.cpu_isa


def detect_devices(probes: Probes | None = None) -> tuple[DeviceInfo, ...]:
    """The processor this process runs on: always one."""
    return detect(probes).devices


def detect(probes: Probes | None = None) -> Detection:
    """The processor, and what was odd about finding it."""
    probes = SystemProbes() if probes is None else probes
    machine = _MACHINES.get(probes.machine().lower(), probes.machine().lower())
    processor, memory = _read(probes, machine)
    device = device_of(processor, probes.isa_limit())
    notes = [*device.notes, *_notes(processor, probes.system())]
    cores = probes.cores()
    if probes.system() == "linux":
        limits = read_limits(probes.text)
        memory = min((m for m in (memory, limits.memory_bytes) if m is not None), default=None)
        allowed = None if limits.processors is None else max(1, math.ceil(limits.processors))
        if allowed is not None and (cores is None or allowed < cores):
            notes.append(_limit_note(limits.processors, cores))
            cores = allowed
    return Detection((replace(device, memory_bytes=memory, cores=cores, notes=tuple(notes)),))


def _read(probes: Probes, machine: str) -> tuple[Processor, int | None]:
    """The processor and the machine's memory, by what the operating system has to tell."""
    if probes.system() == "darwin":
        text = probes.sysctl() or ""
        return parse_sysctl(text, machine), sysctl_memory(text)
    if probes.system() == "win32":
        return parse_identifier(probes.processor(), machine), None
    processor = parse_cpuinfo(probes.text("/proc/cpuinfo") or "", machine)
    return processor, parse_meminfo(probes.text("/proc/meminfo") or "")


def _notes(processor: Processor, system: str) -> list[str]:
    if processor.machine == X86_64 and processor.name.startswith("VirtualApple"):
        return ["this Python is one for Intel that macOS translates; one for ARM is faster"]
    if processor.flags or processor.machine == AARCH64:
        return []
    if processor.machine == X86_64:
        what = "Windows" if system == "win32" else "the operating system"
        return [f"{what} does not tell what the processor can execute; only scalar code is run"]
    return [f"{processor.machine} processors have no kernels of their own here"]


def _limit_note(processors: float | None, cores: int | None) -> str:
    of = "" if cores is None else f" of {cores}"
    return f"the control group leaves this process the time of {processors:.3g}{of} processors"


def parse_cpuinfo(text: str, machine: str) -> Processor:
    """The processor that `/proc/cpuinfo` describes, on x86-64 and ARM.

    A machine may mix processors: only flags that all of them report are kept.
    """
    lists = {frozenset(value.split()) for value in _values(text, "flags", "Features")}
    vendors = _values(text, "vendor_id")
    names = _values(text, "model name", "Hardware") or _arm_names(text)
    return Processor(
        machine=machine,
        vendor=_vendor(vendors[0] if vendors else "", machine),
        name=names[0] if names else "",
        flags=frozenset.intersection(*lists) if lists else frozenset(),
    )


def _arm_names(text: str) -> list[str]:
    """The names of ARM's processors here, most of them first, by their numbers."""
    makers, parts = _values(text, "CPU implementer"), _values(text, "CPU part")
    known = [ARM_NAMES[pair] for pair in zip(makers, parts, strict=False) if pair in ARM_NAMES]
    return sorted(known, key=known.count, reverse=True)


def parse_identifier(text: str, machine: str) -> Processor:
    """The processor by what Windows calls it, which says nothing of what it can execute.

    `Intel64 Family 6 Model 143 Stepping 8, GenuineIntel`
    """
    _, _, vendor = text.rpartition(",")
    return Processor(machine=machine, vendor=_vendor(vendor.strip(), machine), name=text.strip())


def parse_sysctl(text: str, machine: str) -> Processor:
    """The processor that macOS's `sysctl hw machdep.cpu` describes."""
    values = _sysctl_values(text)
    flags = {flag for name, flag in SYSCTL_FLAGS.items() if values.get(name) == "1"}
    for name in ("machdep.cpu.features", "machdep.cpu.leaf7_features"):
        flags |= {flag.lower() for flag in values.get(name, "").split()}
    return Processor(
        machine=machine,
        vendor=_vendor(values.get("machdep.cpu.vendor", ""), machine),
        name=values.get("machdep.cpu.brand_string", ""),
        flags=frozenset(flags),
    )


def sysctl_memory(text: str) -> int | None:
    """Total memory in bytes."""
    value = _sysctl_values(text).get("hw.memsize", "")
    return int(value) if value.isascii() and value.isdigit() else None


def _values(text: str, *names: str) -> list[str]:
    """The values of every line of one of `names`, in order."""
    found = []
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon and name.strip() in names:
            found.append(value.strip())
    return found


def _sysctl_values(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, colon, value in pairs if colon}


def _vendor(text: str, machine: str) -> str:
    return "arm" if machine == AARCH64 else _VENDORS.get(text, "")
