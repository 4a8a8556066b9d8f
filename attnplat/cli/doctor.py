"""`attnplat doctor`: what is here, what is usable, what is not, and how to fix it.

Judged from drivers' files and package metadata alone: no package is imported, no device is
touched. The report is built as data and printed as tables or as JSON.
"""

from __future__ import annotations

import argparse
import json
import platform as host
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any, NamedTuple

from attnplat.cli.main import EXIT_BAD_INPUT, EXIT_OK
from attnplat.cli.tables import print_table
from attnplat.config.attention import AttentionConfig
from attnplat.config.env import ENV_VARS, Environment, read_env
from attnplat.errors import AttnplatError, ConfigError
from attnplat.platforms import PLATFORMS, current_platform
from attnplat.platforms.detection import Detection
from attnplat.platforms.device import DeviceInfo, PlatformName
from attnplat.platforms.distributions import DISTRIBUTIONS
from attnplat.platforms.inventory import FEATURES, SWITCHES, Inventory
from attnplat.storage import FolderState, cache_folder, check_folder

ERROR, WARNING, ADVICE = "error", "warning", "advice"


class Finding(NamedTuple):
    """One thing the user should know, and what to do about it ("" where nothing can be)."""

    level: str
    text: str
    fix: str = ""


class Examination(NamedTuple):
    """All that was looked at. `device` is None where the user named one that cannot be."""

    device: DeviceInfo | None
    detections: Mapping[str, Detection]
    inventory: Inventory
    environment: Environment
    cache: FolderState
    errors: tuple[str, ...] = ()

    @property
    def platforms(self) -> tuple[str, ...]:
        """The platforms that have a device here, and the one that is used."""
        used = {str(self.device.platform)} if self.device else set()
        return tuple(p for p in self.detections if self.detections[p].devices or p in used)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the report; 0 unless something the user set is wrong."""
    if args.attention != AttentionConfig():
        raise ConfigError("doctor reads no attention options; attnplat explain does")
    examination = examine()
    found = findings(examination)
    if args.json:
        print(json.dumps(report(examination, found), indent=2, sort_keys=True))
    else:
        print_report(examination, found)
    return EXIT_BAD_INPUT if examination.errors else EXIT_OK


def examine() -> Examination:
    """Look at this machine; what the user set wrongly is kept as errors."""
    errors: list[str] = []
    environment = Environment()
    try:
        environment = read_env()
    except ConfigError as error:
        errors.append(str(error))
    detections = {name: _detect(name, environment, errors) for name in PLATFORMS}
    return Examination(
        device=_used_device(environment, detections, errors),
        detections=detections,
        inventory=Inventory.installed(environment),
        environment=environment,
        cache=check_folder(cache_folder(environment)),
        errors=tuple(dict.fromkeys(errors)),
    )


def _detect(name: str, environment: Environment, errors: list[str]) -> Detection:
    """The platform's devices; a processor that cannot be limited as asked is told as it is."""
    module = import_module(f"attnplat.platforms.{name}.detect")
    found: Detection
    if name != PlatformName.CPU:
        found = module.detect()
        return found
    try:
        found = module.detect(module.SystemProbes(environment))
    except ConfigError as error:
        errors.append(str(error))
        found = module.detect(module.SystemProbes(Environment()))
    return found


def _used_device(
    environment: Environment, detections: Mapping[str, Detection], errors: list[str]
) -> DeviceInfo | None:
    """What `current_platform()` answers for, without looking for devices a second time."""
    if environment.device is None:
        return next((d for found in detections.values() for d in found.devices), None)
    try:
        return current_platform().device
    except AttnplatError as error:
        errors.append(str(error))
        return None


def findings(examination: Examination) -> list[Finding]:
    """What the user should know, the worst first."""
    env, inventory, cache = examination.environment, examination.inventory, examination.cache
    found = [Finding(ERROR, text) for text in examination.errors]
    for detection in examination.detections.values():
        found += [Finding(WARNING, note, _device_fix(note)) for note in detection.notes]
        for device in detection.devices:
            found += [Finding(WARNING, f"{device.name or device}: {n}") for n in device.notes]
    found += _torch_findings(examination)
    found += _kernel_findings(examination)
    found += [Finding(WARNING, note) for note in inventory.notes]
    found += [Finding(WARNING, notice) for notice in env.notices]
    if cache.problem:
        text = f"the cache folder {cache.path} cannot be written: {cache.problem}"
        found.append(Finding(WARNING, text, "set ATTNPLAT_CACHE_DIR to a folder that can be"))
    if "rocm" in examination.platforms and inventory.usable("aiter") and not inventory.on("aiter"):
        text = "amd-aiter is installed and switched off; its kernels are often the fastest here"
        found.append(Finding(ADVICE, text, "set ATTNPLAT_AITER=1"))
    return found


def _device_fix(note: str) -> str:
    if "NVML cannot be loaded" in note:
        return "in a container, add utility to NVIDIA_DRIVER_CAPABILITIES"
    return ""


def _torch_findings(examination: Examination) -> list[Finding]:
    device, inventory = examination.device, examination.inventory
    if "torch" not in inventory.packages:
        text = "torch is not installed: decisions are explained, and nothing can be run"
        return [Finding(WARNING, text, "pip install torch")]
    if device is None or device.simulated or device.platform == "cpu":
        return []
    drives = inventory.features[f"torch_{device.platform}"]
    if drives.usable:
        return []
    text = f"{device} is here, and torch cannot drive it: {drives.how}"
    return [Finding(WARNING, text, f"install a build of torch for {device.platform}")]


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


def report(examination: Examination, found: Iterable[Finding]) -> dict[str, Any]:
    """The whole examination as plain JSON values."""
    from attnplat import __version__

    have = examination.inventory.packages
    kernels = cpu_kernels(examination)
    return {
        "cpu_kernels": None if kernels is None else kernels._asdict(),
        "attnplat": __version__,
        "python": host.python_version(),
        "system": {"name": host.system(), "release": host.release(), "machine": host.machine()},
        "device": examination.device.to_dict() if examination.device else None,
        "devices": {
            name: [device.to_dict() for device in detection.devices]
            for name, detection in examination.detections.items()
        },
        "packages": {
            d.name: {
                "version": have.get(d.name),
                "purpose": d.purpose,
                "platforms": list(d.platforms),
                "install": d.install,
            }
            for d in DISTRIBUTIONS
        },
        "features": examination.inventory.to_dict()["features"],
        "switches": examination.inventory.to_dict()["switches"],
        "environment": examination.environment.to_dict(),
        "cache": {
            "path": str(examination.cache.path),
            "writable": examination.cache.problem is None,
            "problem": examination.cache.problem,
        },
        "findings": [{"level": f.level, "text": f.text, "fix": f.fix} for f in found],
    }


def print_report(examination: Examination, found: Iterable[Finding]) -> None:
    """The examination as tables."""
    from attnplat import __version__

    system = f"{host.system()} {host.release()} {host.machine()}"
    print(f"attnplat {__version__}, Python {host.python_version()}, {system}\n")
    print_table(_device_rows(examination), ("device", "name", "memory", "traits"))
    _print_packages(examination)
    _print_features(examination)
    if (kernels := cpu_kernels(examination)) is not None and kernels.built:
        print(f"\nThe C++ kernels use {kernels.isa}: {kernels.chosen_by}")
    print("\nSettings")
    print_table(_setting_rows(examination), ("name", "value", "set by"))
    cache = examination.cache
    print(f"\nCache folder {cache.path}: {cache.problem or 'writable'}")
    rows = [(f.level, f.text, f.fix) for f in found]
    if rows:
        print("\nFindings")
        print_table(rows, ("", "what", "what to do"))
    else:
        print("\nNothing is wrong.")


def _device_rows(examination: Examination) -> list[tuple[str, ...]]:
    devices = [d for found in examination.detections.values() for d in found.devices]
    used = examination.device
    if used is not None and used not in devices:
        devices.insert(0, used)
    return [_device_row(device, device == used) for device in devices]


def _device_row(device: DeviceInfo, used: bool) -> tuple[str, ...]:
    mark = " (used)" if used else ""
    cores = f"{device.cores} cores" if device.cores else ""
    name = ", ".join(part for part in (device.name, cores) if part)
    memory = f"{device.memory_bytes / 2**30:.1f} GiB" if device.memory_bytes else ""
    return f"{device}{mark}", name, memory, " ".join(sorted(device.traits))


def _print_packages(examination: Examination) -> None:
    have, here = examination.inventory.packages, set(examination.platforms)
    relevant = [d for d in DISTRIBUTIONS if here & set(d.platforms)]
    installed = [(d.name, have[d.name], d.purpose) for d in relevant if d.name in have]
    missing = [(d.name, d.purpose, d.install) for d in relevant if d.name not in have]
    print("\nPackages")
    print_table(installed, ("installed", "version", "for"))
    print()
    print_table(missing, ("missing", "would be for", "how to get it"))


def _print_features(examination: Examination) -> None:
    """Features of the accelerators that are here; a plain CPU machine has none to tell of."""
    here = set(examination.platforms)
    found = examination.inventory.features
    rows = [
        (name, "yes" if found[name].usable else "no", spec.meaning, found[name].how)
        for name, spec in FEATURES.items()
        if here & set(spec.platforms)
    ]
    if rows:
        print("\nFeatures")
        print_table(rows, ("feature", "usable", "meaning", "because"))


def _setting_rows(examination: Examination) -> list[tuple[str, ...]]:
    """Every variable, but switches of platforms that are not here only where they are set."""
    values = examination.environment.to_dict()
    rows: list[tuple[str, ...]] = [
        (v.name, str(values.get(v.name, v.default)), _set_by(v.name in values)) for v in ENV_VARS
    ]
    own = {spec.variable for spec in SWITCHES.values()}
    if "rocm" not in examination.platforms:
        rows = [row for row in rows if row[0] not in own or row[0] in values]
    return rows


def _set_by(is_set: bool) -> str:
    return "environment" if is_set else "default"
