"""What optional packages answered when they were tried, kept until something changes.

The key holds what an answer depends on: versions, the times and sizes of the files that a
reinstall or a rebuild writes, the interpreter, the drivers that are here and what they are told.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from importlib.machinery import PathFinder
from typing import Any

from attnplat.config.env import DriverEnvironment, Environment
from attnplat.platforms.detection import read_text
from attnplat.platforms.distributions import Installed
from attnplat.platforms.probe_outcome import Outcome, ProbeKind
from attnplat.platforms.probing import Probe, import_paths, probes_for
from attnplat.storage import Store, cache_folder, key_of

# What tells one state of a machine's drivers from another.
_DRIVERS = ("/sys/module/nvidia/version", "/sys/module/amdgpu/version", "/opt/rocm/.info/version")
_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")

# A machine may have been busy; next time it may not be.
_NOT_KEPT = frozenset({ProbeKind.HANGS, ProbeKind.NOT_TRIED})


def remembered(
    installed: Installed,
    environment: Environment,
    driver: DriverEnvironment,
    paths: Sequence[str] | None = None,
) -> dict[str, Outcome]:
    """What the installed packages answered when they were last tried, if nothing has changed."""
    store = Store(cache_folder(environment), "probes")
    if not store.folder.is_dir():
        return {}
    memory = ProbeMemory(store, import_paths() if paths is None else paths, driver)
    found = {probe.distribution: memory.recall(probe) for probe in probes_for(installed)}
    return {name: outcome for name, outcome in found.items() if outcome is not None}


class ProbeMemory:
    """Remembered outcomes.

    Args:
        store: of the kind "probes".
        paths: where modules are looked for.
        driver: what drivers are told.
    """

    def __init__(self, store: Store, paths: Sequence[str], driver: DriverEnvironment) -> None:
        self._store = store
        self._paths = list(paths)
        self._driver = driver

    def key(self, probe: Probe) -> str:
        """What the outcome of `probe` depends on, as a key."""
        python = [sys.version, sysconfig.get_platform()]
        drivers = [read_text(path) for path in _DRIVERS]
        devices = [os.path.exists(path) for path in _DEVICES]
        told = self._driver._replace(path=None)
        spec, files = list(probe.spec), self._files(probe)
        return key_of(
            probe.distribution,
            probe.version,
            probe.torch,
            spec,
            files,
            python,
            drivers,
            devices,
            told,
        )

    def recall(self, probe: Probe) -> Outcome | None:
        """The kept outcome, or None where there is none for things as they are now."""
        outcome = Outcome.from_dict(self._store.read(self.key(probe)))
        if outcome is None or outcome.distribution != probe.distribution:
            return None
        return outcome

    def keep(self, probes: Iterable[Probe], outcomes: Iterable[Outcome]) -> None:
        """Keep the outcomes of `probes`; a folder that cannot be written is told of once."""
        for probe, outcome in zip(probes, outcomes, strict=True):
            if outcome.kind not in _NOT_KEPT:
                self._store.keep(
                    self.key(probe),
                    outcome.to_dict(),
                    packages={probe.distribution: probe.version},
                    about=f"{probe.distribution} {probe.version}: {outcome.kind}",
                )

    def _files(self, probe: Probe) -> list[Any]:
        """Stamps of the files that say what is installed, and of torch's."""
        stamps = [_stamp(os.path.join(probe.folder, name)) for name in ("RECORD", "METADATA")]
        top = (probe.spec.module or probe.distribution.replace("-", "_")).partition(".")[0]
        for module in dict.fromkeys((top, "torch")):
            stamps += _module_stamps(module, self._paths)
        return stamps


def _module_stamps(module: str, paths: Sequence[str]) -> list[Any]:
    """Where the module is, when it was written, and the libraries beside it."""
    try:
        spec = PathFinder.find_spec(module, [path for path in paths if path])
    except (ImportError, AttributeError, ValueError):
        return [module, "not found"]
    if spec is None:
        return [module, "not found"]
    found: list[Any] = [module, _stamp(spec.origin) if spec.has_location else "a bare folder"]
    for folder in spec.submodule_search_locations or ():
        found += [_stamp(path) for path in _libraries(folder)]
    return found


def _libraries(folder: str) -> list[str]:
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    return [os.path.join(folder, name) for name in names if name.endswith((".so", ".pyd"))]


def _stamp(path: str | None) -> list[Any]:
    try:
        status = os.stat(path or "")
    except (OSError, ValueError):
        return [path, None]
    return [path, status.st_mtime_ns, status.st_size]
