"""Platforms: which devices are here, and what each knows of its backends.

`current_platform()` answers for this machine, `platform_for(name)` for any device, here
or not. Nothing is probed when this module is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache, lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from attnplat.backends.backend import Backend
from attnplat.config import entry_points
from attnplat.config.env import Environment, read_env
from attnplat.config.names import Operation
from attnplat.config.options import from_environment
from attnplat.config.run import RunContext
from attnplat.errors import DeviceError, UnknownNameError
from attnplat.notices import tell_once
from attnplat.platforms import elsewhere
from attnplat.platforms.detection import Detection
from attnplat.platforms.device import DeviceInfo, PlatformName
from attnplat.platforms.elsewhere import ELSEWHERE
from attnplat.platforms.inventory import Inventory
from attnplat.platforms.names import DeviceName, parse_device_name
from attnplat.platforms.platform import Platform
from attnplat.platforms.selection import Tables

if TYPE_CHECKING:
    from attnplat.platforms.plugin_platform import PluginPlatform
    from attnplat.platforms.plugin_tables import Joining
    from attnplat.platforms.plugins import Plugin

# In the order they are looked for: an accelerator comes before the CPU it is attached to.
PLATFORMS: tuple[str, ...] = tuple(PlatformName)


def platform_names() -> tuple[str, ...]:
    """attnplat's platforms and those of plugins, in the order they are looked for."""
    if not _has_plugins():
        return PLATFORMS
    from attnplat.platforms.plugins import plugin_platforms

    accelerators = [name for name in PLATFORMS if name != PlatformName.CPU]
    return (*accelerators, *plugin_platforms(), PlatformName.CPU)


def plugins_here(*, again: bool = False) -> tuple[Plugin, ...]:
    """Every plugin that is installed, and what became of it; see `installed_plugins`."""
    if not _has_plugins():
        return ()
    from attnplat.platforms.plugins import installed_plugins

    return installed_plugins(again=again)


def plugin_detection(name: str) -> Detection:
    """The devices of a plugin's platform, and what was odd."""
    return _of_plugin(name).detection()


def _has_plugins() -> bool:
    """Whether any distribution declares one; where none does, nothing of plugins is imported."""
    return bool(entry_points.declared().entry_points)


def current_platform(index: int | None = None) -> Platform:
    """The platform of this machine: CUDA, ROCm, a plugin's, CPU; or what ATTNPLAT_DEVICE names.

    Args:
        index: which of the visible devices; the first when left out.

    Creates no device context. The environment is read at every call.
    """
    environment = read_env()
    for notice in environment.notices:
        tell_once(notice)
    if environment.device is not None:
        return _platform_named(environment.device, environment, index)
    inventory = Inventory.installed(environment)
    for name in platform_names():
        devices = _devices_here(name, inventory)
        if devices and _torch_drives(name, inventory):
            return _bind(_pick(name, devices, index), environment, inventory)
    raise DeviceError("no device was found, not even a CPU")


def platform_for(
    device: Any, *, assume: str | None = None, inventory: Inventory | None = None
) -> Platform:
    """The platform of the named device, which need not be here.

    Args:
        device: `rocm:gfx950`, `sm90`, `cpu:amx`, `h100`: an architecture is simulated.
            `cuda`, `cuda:1`, `cpu`: a device of this machine. Or a `torch.device`, of which
            `cuda` is an AMD device where torch drives those; or a `DeviceInfo`.
        assume: the packages a simulated device has: `all`, `installed`, `minimal` or the
            name of a profile; `all` when left out.
        inventory: the packages exactly, instead.

    Raises:
        UnknownNameError: no such device, with the closest known.
        DeviceError: a device of this machine was named that is not here.
    """
    environment = read_env()
    if isinstance(device, DeviceInfo):
        packages = Inventory.assumed(assume or "all", device) if device.simulated else None
        platform = _bind(device, environment, packages)
    else:
        name = device if isinstance(device, str) else _name_of_torchs(device, environment)
        platform = _platform_named(name, environment, None, assume=assume)
    return platform if inventory is None else platform.replace(inventory=inventory)


def _name_of_torchs(device: Any, environment: Environment) -> str:
    """Our name for a `torch.device`, known by its attributes so that torch is not imported."""
    kind, index = getattr(device, "type", None), getattr(device, "index", None)
    if not isinstance(kind, str):
        raise UnknownNameError("device", device, PLATFORMS, hint="give a name or a torch.device")
    if kind == PlatformName.CUDA and Inventory.installed(environment).usable("torch_rocm"):
        kind = PlatformName.ROCM
    return kind if index is None else f"{kind}:{index}"


def detect(name: str, *, may_ask_torch: bool = False) -> tuple[DeviceInfo, ...]:
    """The visible devices of one platform on this machine; what was odd is logged once.

    With `may_ask_torch`, a driver that shows itself and tells of no device is asked through
    torch, in a process of its own (seconds).
    """
    if name not in PLATFORMS:
        return _of_plugin(name).devices()
    module = _module(name, "detect")
    asks = may_ask_torch and name in (PlatformName.CUDA, PlatformName.ROCM)
    found: Detection = module.detect(may_ask_torch=True) if asks else module.detect()
    for note in found.notes:
        tell_once(note)
    return found.devices


def _devices_here(name: str, inventory: Inventory) -> tuple[DeviceInfo, ...]:
    drives = name != PlatformName.CPU and inventory.features.get(f"torch_{name}")
    return detect(name, may_ask_torch=bool(drives and drives.usable))


def _torch_drives(name: str, inventory: Inventory) -> bool:
    """Whether the installed torch can use the platform's devices; a torch not yet here might."""
    feature = f"torch_{name}"
    if feature not in inventory.features or "torch" not in inventory.packages:
        return True
    if not inventory.usable(feature):
        how = inventory.features[feature].how
        tell_once(f"a {name} device is here and is passed over: {how}, which cannot drive it")
    return inventory.usable(feature)


def simulate(name: str, arch: str) -> DeviceInfo:
    """A device of the given architecture that is not here."""
    if name not in PLATFORMS:
        device: DeviceInfo = _of_plugin(name).simulated(arch)
    else:
        device = _module(name, "detect").simulate(arch)
    return device


def tables_for(name: str) -> Tables:
    """The facts and taste of one platform, and what plugins add to them."""
    if not _has_plugins():
        return own_tables(name)
    from attnplat.platforms.plugins import joining

    return _joined_tables(name, joining())


@lru_cache(maxsize=16)
def _joined_tables(name: str, plugins: tuple[Joining, ...]) -> Tables:
    from attnplat.platforms.plugin_tables import joined

    own = own_tables(name) if name in PLATFORMS else _of_plugin(name).tables()
    return joined(own, name, plugins)


@cache
def own_tables(name: str) -> Tables:
    """The facts and taste of one of attnplat's own platforms, whatever plugins there are."""
    catalog, preferences = _module(name, "catalog"), _module(name, "preferences")
    return Tables(
        catalog=catalog.CATALOG,
        preferences=preferences.PREFERENCES,
        by_name=preferences.BY_NAME,
        last_resort_automatic=preferences.LAST_RESORT_AUTOMATIC,
        foreign=ForeignBackends(name),
    )


class ForeignBackends(Mapping[str, str]):
    """Backend name -> the other platform it belongs to; reads their catalogs when asked.

    `departures` changes another platform's tables as a rule set wants them.
    """

    def __init__(
        self, own: str, departures: Callable[[str, Tables], Tables] = lambda _, tables: tables
    ) -> None:
        self._own = own
        self._departures = departures
        self._found: dict[str, Tables] = {}

    def under(self, departures: Callable[[str, Tables], Tables]) -> ForeignBackends:
        """The same backends, changed by another rule set."""
        return ForeignBackends(self._own, departures)

    def find(self, name: str, operation: Operation) -> Backend | None:
        """The other platforms' backend of that name, for `operation` where it is declared so."""
        owner = self.get(name)
        if owner is None:
            return None
        if name not in self._found:
            entries = tuple(b for b in _catalog_of(owner) if b.name == name)
            self._found[name] = self._departures(owner, Tables(entries, ()))
        return self._found[name].find(name, operation)

    def __getitem__(self, backend: str) -> str:
        return self._owners[backend]

    def __iter__(self) -> Iterator[str]:
        return iter(self._owners)

    def __len__(self) -> int:
        return len(self._owners)

    @property
    def _owners(self) -> Mapping[str, str]:
        own = _owners_beside(self._own)
        if not _has_plugins():
            return own
        from attnplat.platforms.plugins import owners

        return {**owners(), **own}


@cache
def _owners_beside(own: str) -> dict[str, str]:
    """Backend -> the first of the other platforms that declares it."""
    others = [*(p for p in PLATFORMS if p != own), ELSEWHERE]
    return {b.name: owner for owner in reversed(others) for b in _catalog_of(owner)}


def _catalog_of(owner: str) -> tuple[Backend, ...]:
    if owner == ELSEWHERE:
        return elsewhere.CATALOG
    catalog: tuple[Backend, ...] = _module(owner, "catalog").CATALOG
    return catalog


def _of_plugin(platform: str) -> PluginPlatform:
    """The platform of a plugin. Raises PackageError for one that is set aside."""
    from attnplat.platforms.plugin_platform import PluginPlatform

    return PluginPlatform.named(platform, ForeignBackends(platform))


def _module(platform: str, part: str) -> Any:
    if platform not in PLATFORMS:
        raise UnknownNameError("platform", platform, PLATFORMS)
    return import_module(f"attnplat.platforms.{platform}.{part}")


def _platform_named(
    text: str, environment: Environment, index: int | None, assume: str | None = None
) -> Platform:
    name: DeviceName = parse_device_name(text)
    if name.arch is not None:
        device = simulate(name.platform, name.arch)
        inventory = Inventory.assumed(assume or "all", device)
        return _bind(device, environment, inventory)
    inventory = Inventory.installed(environment)
    devices = _devices_here(name.platform, inventory)
    if not devices:
        raise DeviceError(
            f"{text!r} names a device of this machine, and no {name.platform} device is here; "
            f"name an architecture to simulate one, such as {_example(name.platform)!r}"
        )
    picked = _pick(name.platform, devices, name.index if index is None else index)
    return _bind(picked, environment, inventory)


def _pick(platform: str, devices: tuple[DeviceInfo, ...], index: int | None) -> DeviceInfo:
    wanted = index or 0
    if not 0 <= wanted < len(devices):
        raise DeviceError(
            f"{platform} device {wanted} was asked for; visible: 0 to {len(devices) - 1}"
        )
    return devices[wanted]


def _bind(
    device: DeviceInfo, environment: Environment, inventory: Inventory | None = None
) -> Platform:
    name = str(device.platform)
    packages = inventory or Inventory.installed(environment)
    if _has_plugins():
        from attnplat.platforms.plugins import with_requirements

        packages = with_requirements(packages)
    return Platform(
        device=device,
        inventory=packages,
        tables=tables_for(name),
        torch_type=None if name in PLATFORMS else _of_plugin(name).torch_type,
        wishes=from_environment(environment),
        run=RunContext(batch_invariant=environment.batch_invariant),
    )


def _example(platform: str) -> str:
    known = {"cuda": "cuda:sm90", "rocm": "rocm:gfx950", "cpu": "cpu:avx2"}
    return known.get(platform, f"{platform}:ARCH")
