"""Looking at a machine: its devices, packages and settings, for `attnplat doctor`.

A `Machine` is what there is to look at: this one, or one whose answers were written down.
"""

from __future__ import annotations

import platform as host
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from attnplat.config.env import DriverEnvironment, Environment, read_driver_env, read_env
from attnplat.errors import AttnplatError, ConfigError
from attnplat.platforms import PLATFORMS, current_platform, plugin_detection, plugins_here
from attnplat.platforms.detection import Detection, TorchReading, disagreements
from attnplat.platforms.device import DeviceInfo, PlatformName
from attnplat.platforms.distributions import DISTRIBUTIONS, Installed
from attnplat.platforms.inventory import Inventory, look_for_packages
from attnplat.storage import FolderState, cache_folder, check_folder

if TYPE_CHECKING:
    from attnplat.platforms.plugins import Plugin
    from attnplat.platforms.probe_outcome import Outcome


class System(NamedTuple):
    """Which interpreter and operating system: JSON values."""

    python: str
    name: str
    release: str
    machine: str


class Machine(NamedTuple):
    """What there is to look at.

    Attributes:
        system: interpreter and operating system.
        probes: platform -> the system accesses of its detector.
        environment: the user's settings; `errors` says what was wrong with them.
        driver: what drivers are told.
        installed: versions and metadata folders of packages.
        take_stock: what came of trying packages -> packages, features and switches.
        paths: where modules are looked for.
        cache: the cache folder and whether it can be written.
        plugins: gives every plugin that is declared, tried anew.
        errors: what the user set wrongly, one sentence each.
    """

    system: System
    probes: Mapping[str, Any]
    environment: Environment
    driver: DriverEnvironment
    installed: Installed
    take_stock: Callable[[Mapping[str, Outcome]], Inventory]
    paths: Sequence[str]
    cache: FolderState
    plugins: Callable[[], tuple[Plugin, ...]]
    errors: tuple[str, ...] = ()


class Examination(NamedTuple):
    """All that was looked at. `device` is None where the user named one that cannot be.

    `outcomes` are of the packages that were tried, now or before: see `remembered`.
    """

    device: DeviceInfo | None
    detections: Mapping[str, Detection]
    inventory: Inventory
    environment: Environment
    cache: FolderState
    errors: tuple[str, ...] = ()
    system: System = System("", "", "", "")
    plugins: tuple[Plugin, ...] = ()
    outcomes: Mapping[str, Outcome] = {}
    remembered: frozenset[str] = frozenset()
    probed: bool = False

    @property
    def platforms(self) -> tuple[str, ...]:
        """The platforms that have a device here, and the one that is used."""
        used = {str(self.device.platform)} if self.device else set()
        return tuple(p for p in self.detections if self.detections[p].devices or p in used)


class Trial(NamedTuple):
    """How packages are tried: afresh or only where nothing good is remembered, how long each
    may take, and who hears of each."""

    fresh: bool = False
    timeout_s: float = 60.0
    told: Callable[[Outcome], None] | None = None


def this_machine() -> Machine:
    """The machine that this runs on."""
    errors: tuple[str, ...] = ()
    environment = Environment()
    try:
        environment = read_env()
    except ConfigError as error:
        errors = (str(error),)
    detectors = {name: _detector(name) for name in PLATFORMS}
    driver, found = read_driver_env(), look_for_packages(sys.path)
    return Machine(
        system=System(host.python_version(), host.system(), host.release(), host.machine()),
        probes={
            name: module.SystemProbes(environment)
            if name == PlatformName.CPU
            else module.SystemProbes()
            for name, module in detectors.items()
        },
        environment=environment,
        driver=driver,
        installed=found,
        take_stock=partial(Inventory.of, found, environment, driver),
        paths=[path for path in sys.path if path],
        cache=check_folder(cache_folder(environment)),
        plugins=partial(plugins_here, again=True),
        errors=errors,
    )


def examine(machine: Machine | None = None, trial: Trial | None = None) -> Examination:
    """Look at a machine; what the user set wrongly is kept as errors.

    With `trial`, installed packages are tried too, and torch is asked for its devices.
    """
    machine = this_machine() if machine is None else machine
    errors, plugins = list(machine.errors), machine.plugins()
    outcomes = _remembered(machine)
    remembered = frozenset(outcomes)
    if trial is not None:
        outcomes, remembered = _try_packages(machine, outcomes, trial)
    inventory = machine.take_stock(outcomes)
    detections = {name: _detect(name, machine, errors, trial) for name in machine.probes}
    if trial is not None:
        detections = _compared_with_torch(machine, inventory, detections)
    detections = _with_plugins(plugins, detections)
    return Examination(
        device=_used_device(machine, inventory, detections, errors),
        detections=detections,
        inventory=inventory,
        environment=machine.environment,
        cache=machine.cache,
        errors=tuple(dict.fromkeys(errors)),
        system=machine.system,
        plugins=plugins,
        outcomes=outcomes,
        remembered=remembered,
        probed=trial is not None,
    )


def _detector(name: str) -> Any:
    return import_module(f"attnplat.platforms.{name}.detect")


def _detect(name: str, machine: Machine, errors: list[str], trial: Trial | None) -> Detection:
    """The platform's devices; a processor that cannot be limited as asked is told as it is."""
    detector, probes = _detector(name), machine.probes[name]
    found: Detection
    if name in (PlatformName.CUDA, PlatformName.ROCM):
        found = detector.detect(probes, may_ask_torch=trial is not None)
        return found
    try:
        found = detector.detect(probes)
    except ConfigError as error:
        errors.append(str(error))
        found = detector.detect(_Unlimited(probes))
    return found


def _with_plugins(
    plugins: Sequence[Plugin], detections: Mapping[str, Detection]
) -> dict[str, Detection]:
    """The devices of plugins' platforms too, in the order in which platforms are looked for."""
    names = [name for p in plugins if p.problem is None for name in p.platforms]
    found = {name: d for name, d in detections.items() if name != PlatformName.CPU}
    found |= {name: plugin_detection(name) for name in names}
    return found | {name: d for name, d in detections.items() if name == PlatformName.CPU}


class _Unlimited:
    """A processor's system accesses without the user's limit."""

    def __init__(self, probes: Any) -> None:
        self._probes = probes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._probes, name)

    def isa_limit(self) -> str | None:
        return None


def _used_device(
    machine: Machine,
    inventory: Inventory,
    detections: Mapping[str, Detection],
    errors: list[str],
) -> DeviceInfo | None:
    """What `current_platform()` answers for, without looking for devices a second time."""
    if machine.environment.device is None:
        for name, found in detections.items():
            if found.devices and drives(inventory, name):
                return found.devices[0]
        return None
    try:
        return current_platform().device
    except AttnplatError as error:
        errors.append(str(error))
        return None


def drives(inventory: Inventory, name: str) -> bool:
    """Whether torch can use the platform's devices; one that is not installed might."""
    feature = inventory.features.get(f"torch_{name}")
    return feature is None or feature.usable or "torch" not in inventory.packages


# Packages ----------------------------------------------------------------------------------


def _remembered(machine: Machine) -> dict[str, Outcome]:
    if not (machine.cache.path / "probes").is_dir():
        return {}
    from attnplat.platforms.probe_memory import remembered

    return remembered(machine.installed, machine.environment, machine.driver, machine.paths)


def _try_packages(
    machine: Machine, known: Mapping[str, Outcome], trial: Trial
) -> tuple[dict[str, Outcome], frozenset[str]]:
    """Try what is installed; what worked before and has not changed is believed."""
    from attnplat.platforms.probe_memory import ProbeMemory
    from attnplat.platforms.probing import probes_for, try_all
    from attnplat.storage import Store

    good = {} if trial.fresh else {n: o for n, o in known.items() if not o.broken}
    probes = [p for p in probes_for(machine.installed) if p.distribution not in good]
    outcomes = try_all(probes, machine.paths, trial.timeout_s, told=trial.told)
    memory = ProbeMemory(Store(machine.cache.path, "probes"), machine.paths, machine.driver)
    if machine.cache.problem is None:
        memory.keep(probes, outcomes)
    tried = {outcome.distribution: outcome for outcome in outcomes}
    together = {**good, **tried}
    in_order = {d.name: together[d.name] for d in DISTRIBUTIONS if d.name in together}
    return in_order, frozenset(good)


def _compared_with_torch(
    machine: Machine, inventory: Inventory, detections: Mapping[str, Detection]
) -> dict[str, Detection]:
    """The detections, with a note wherever torch sees something else."""
    compared = dict(detections)
    for name in (PlatformName.CUDA, PlatformName.ROCM):
        found = compared.get(name)
        asks = found is not None and (found.devices or found.notes)
        if found is None or not asks or not drives(inventory, name):
            continue
        if "torch" not in inventory.packages:
            continue
        reading: TorchReading = machine.probes[name].torch()
        notes = disagreements(str(name), found.devices, reading)
        compared[name] = found._replace(notes=(*found.notes, *notes))
    return compared
