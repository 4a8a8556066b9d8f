"""What the user should know of an examined machine, and what to do about it."""

from __future__ import annotations

from typing import NamedTuple

from attnplat.cli.examination import Examination, drives
from attnplat.platforms.device import PlatformName
from attnplat.platforms.distributions import DISTRIBUTIONS
from attnplat.platforms.probe_outcome import Outcome, ProbeKind

ERROR, WARNING, ADVICE = "error", "warning", "advice"


class Finding(NamedTuple):
    """One thing the user should know, and what to do about it ("" where nothing can be)."""

    level: str
    text: str
    fix: str = ""


# What a note says -> what to do; the first that fits.
_DEVICE_FIXES: tuple[tuple[str, str], ...] = (
    ("/usr/lib/wsl/", "attnplat doctor --probe asks torch, as attnplat itself does"),
    ("Driver/library version mismatch", "the driver was updated: reboot, or reload its modules"),
    ("Driver Not Loaded", "load the driver (modprobe nvidia); after a kernel update, reinstall it"),
    ("Insufficient Permissions", "add the user to the group that owns /dev/nvidiactl"),
    ("GPU is lost", "reset the device or reboot; dmesg tells what it reported (Xid)"),
    ("Unknown Error", "in a container, start it again: its devices were taken away"),
    ("not in this container", "to use them, start the container with --gpus all"),
    ("NVML cannot be loaded", "in a container, add utility to NVIDIA_DRIVER_CAPABILITIES"),
    ("has none, so that nothing", "create slices (nvidia-smi mig -cgi), or switch MIG off"),
    ("torch was not asked", "attnplat doctor --probe asks torch, as attnplat itself does"),
    ("the control group", "set OMP_NUM_THREADS to the cores shown, or torch starts more threads"),
    ("could be any of", "give more of the device's UUID"),
    ("names a device twice", "name each device once"),
    ("names no", "nvidia-smi -L and rocminfo tell the devices' names and order"),
    ("one MIG slice", "start a process for each slice"),
    ("HSA_OVERRIDE_GFX_VERSION", "unset it where the device's own architecture is supported"),
    ("may not be read", "pass /dev/kfd and /sys/class/kfd to the container"),
)


def findings(examination: Examination) -> list[Finding]:
    """What the user should know, the worst first."""
    env, inventory, cache = examination.environment, examination.inventory, examination.cache
    found = [Finding(ERROR, text) for text in examination.errors]
    for detection in examination.detections.values():
        found += [Finding(WARNING, note, device_fix(note)) for note in detection.notes]
        for device in detection.devices:
            name = device.name or device
            found += [Finding(WARNING, f"{name}: {n}", device_fix(n)) for n in device.notes]
    found += _torch_findings(examination)
    found += _kernel_findings(examination)
    found += _package_findings(examination)
    found += _plugin_findings(examination)
    found += [Finding(WARNING, note) for note in inventory.notes]
    found += [Finding(WARNING, notice) for notice in env.notices]
    if cache.problem:
        text = f"the cache folder {cache.path} cannot be written: {cache.problem}"
        found.append(Finding(WARNING, text, "set ATTNPLAT_CACHE_DIR to a folder that can be"))
    if "rocm" in examination.platforms and inventory.usable("aiter") and not inventory.on("aiter"):
        text = "amd-aiter is installed and switched off; its kernels are often the fastest here"
        found.append(Finding(ADVICE, text, "set ATTNPLAT_AITER=1"))
    return found


def device_fix(note: str) -> str:
    """What to do about what detection found odd; "" where the note says it itself."""
    return next((fix for part, fix in _DEVICE_FIXES if part in note), "")


def _torch_findings(examination: Examination) -> list[Finding]:
    inventory = examination.inventory
    if "torch" not in inventory.packages:
        text = "torch is not installed: decisions are explained, and nothing can be run"
        return [Finding(WARNING, text, "pip install torch")]
    found = []
    for name, detection in examination.detections.items():
        if detection.devices and not drives(inventory, name):
            how = inventory.features[f"torch_{name}"].how
            text = f"{detection.devices[0]} is here, and torch cannot drive it: {how}"
            found.append(Finding(WARNING, text, f"install a build of torch for {name}"))
    return found


def _package_findings(examination: Examination) -> list[Finding]:
    """Packages that failed when they were tried; those for other devices only as advice."""
    found = []
    here = set(examination.platforms)
    platforms = {d.name: d.platforms for d in DISTRIBUTIONS}
    for name, outcome in examination.outcomes.items():
        wanted = bool(here & set(platforms.get(name, ())))
        if not outcome.broken or (outcome.kind is ProbeKind.NO_DEVICE and not wanted):
            continue
        level = WARNING if wanted else ADVICE
        found.append(Finding(level, package_text(outcome), outcome.fix))
    return found


def _plugin_findings(examination: Examination) -> list[Finding]:
    found = []
    for plugin in examination.plugins:
        if plugin.problem is not None:
            text = f"plugin {plugin.label} is set aside: {plugin.problem.text}"
            found.append(Finding(WARNING, text, plugin.problem.fix))
        if plugin.advice is not None:
            text = f"plugin {plugin.label}: {plugin.advice.text}"
            found.append(Finding(ADVICE, text, plugin.advice.fix))
    return found


def package_text(outcome: Outcome) -> str:
    """A package's outcome in one sentence."""
    return f"{outcome.distribution} {outcome.version}: {outcome.kind}: {outcome.text}"


class CpuKernels(NamedTuple):
    """attnplat's own kernels for processors, and the instruction set they use; JSON values.

    `chosen_by` is ATTNPLAT_CPU_ISA, or the machine.
    """

    built: bool
    how: str
    isa: str
    chosen_by: str


def cpu_kernels(examination: Examination) -> CpuKernels | None:
    """What is known of the C++ kernels; None where the processor was not looked at."""
    processors = examination.detections[PlatformName.CPU].devices
    if not processors:
        return None
    found = examination.inventory.features["cpu_kernels"]
    forced = examination.environment.cpu_isa is not None and not examination.errors
    chosen_by = "ATTNPLAT_CPU_ISA" if forced else "the highest that this machine has"
    return CpuKernels(found.usable, found.how, processors[0].arch, chosen_by)


def _kernel_findings(examination: Examination) -> list[Finding]:
    kernels, device = cpu_kernels(examination), examination.device
    if kernels is None or kernels.built or device is None or device.platform != PlatformName.CPU:
        return []
    if "torch" not in examination.inventory.packages:
        return []
    text = f"attention runs without attnplat's own kernels, several times slower: {kernels.how}"
    fix = "pip install --force-reinstall --no-deps --no-binary attnplat attnplat"
    if "no C++ compiler" in kernels.how:
        fix = f"install a C++ compiler (g++ 11 or clang 12, or later), then {fix}"
    return [Finding(WARNING, text, fix)]
