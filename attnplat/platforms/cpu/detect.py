"""The processor this process runs on: its vendor, what it can execute, how much of it is ours.

Reads what the operating system reports (`/proc/cpuinfo`, `sysctl` on macOS), which leaves out
what the system or a virtual machine has switched off.
"""

from __future__ import annotations

import os
import platform as host
import re
import sys
from dataclasses import replace
from typing import Protocol

from attnplat.config.env import Environment, read_env
from attnplat.platforms.cpu.arch import AARCH64, X86_64, Processor, device_of
from attnplat.platforms.cpu.arch import simulate as simulate
from attnplat.platforms.detection import Detection, read_text
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


class Probes(Protocol):
    """The system accesses that detection needs; tests pass recorded values."""

    def system(self) -> str: ...

    def machine(self) -> str: ...

    def cpuinfo(self) -> str | None: ...

    def sysctl(self) -> str | None: ...

    def meminfo(self) -> str | None: ...

    def cores(self) -> int | None: ...

    def isa_limit(self) -> str | None: ...


class SystemProbes:
    """This machine. Nothing is read before it is asked for."""

    def __init__(self, environment: Environment | None = None) -> None:
        self._environment = environment

    def system(self) -> str:
        return sys.platform

    def machine(self) -> str:
        return host.machine()

    def cpuinfo(self) -> str | None:
        return read_text("/proc/cpuinfo")

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

    def meminfo(self) -> str | None:
        return read_text("/proc/meminfo")

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
    if probes.system() == "darwin":
        text = probes.sysctl() or ""
        processor, memory = parse_sysctl(text, machine), sysctl_memory(text)
    else:
        text = probes.cpuinfo() or ""
        processor, memory = parse_cpuinfo(text, machine), parse_meminfo(probes.meminfo() or "")
    device = device_of(processor, probes.isa_limit())
    if not processor.flags and machine != AARCH64:
        device = replace(device, notes=(*device.notes, _blind_note(machine)))
    return Detection((replace(device, memory_bytes=memory, cores=probes.cores()),))


def parse_cpuinfo(text: str, machine: str) -> Processor:
    """The processor that `/proc/cpuinfo` describes, on x86-64 and ARM.

    A machine may mix processors: only flags that all of them report are kept.
    """
    lists = {frozenset(value.split()) for value in _values(text, "flags", "Features")}
    vendors = _values(text, "vendor_id")
    names = _values(text, "model name", "Hardware")
    return Processor(
        machine=machine,
        vendor=_vendor(vendors[0] if vendors else "", machine),
        name=names[0] if names else "",
        flags=frozenset.intersection(*lists) if lists else frozenset(),
    )


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


def parse_meminfo(text: str) -> int | None:
    """Total memory in bytes, from `/proc/meminfo`."""
    match = re.search(r"^MemTotal:\s*([0-9]+) kB", text, re.MULTILINE)
    return int(match.group(1)) * 1024 if match else None


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


def _blind_note(machine: str) -> str:
    if machine == X86_64:
        return "the operating system does not tell what the processor can execute"
    return f"{machine} processors have no kernels of their own here"
