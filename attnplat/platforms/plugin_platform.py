"""A platform out of a plugin, asked through a door that nothing it raises gets through."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from attnplat.errors import AttnplatError, DeviceError, PackageError, UnknownNameError
from attnplat.notices import tell_once
from attnplat.platforms.detection import Detection
from attnplat.platforms.device import DeviceInfo
from attnplat.platforms.plugin_backend import failed
from attnplat.platforms.plugins import Plugin, installed_plugins
from attnplat.platforms.selection import Tables


@dataclass(frozen=True)
class PluginPlatform:
    """One plugin's platform.

    Attributes:
        name: the platform's name.
        plugin: the plugin, usable.
        foreign: backend -> platform, of those that belong elsewhere.
    """

    name: str
    plugin: Plugin
    foreign: Mapping[str, str]

    @classmethod
    def named(cls, name: str, foreign: Mapping[str, str]) -> PluginPlatform:
        """The platform of that name.

        Raises:
            UnknownNameError: no plugin declares it.
            PackageError: the plugin that does is set aside.
        """
        plugins = [p for p in installed_plugins() if name in p.platforms]
        usable = next((p for p in plugins if p.problem is None), None)
        if usable is not None:
            return cls(name, usable, foreign)
        for plugin in plugins:
            assert plugin.problem is not None
            raise PackageError(f"{plugin.problem.text}; {plugin.problem.fix}")
        raise UnknownNameError(
            "platform", name, [n for p in installed_plugins() for n in p.platforms]
        )

    def detection(self) -> Detection:
        """Its devices and what it found odd; what goes wrong in it is odd."""
        try:
            found = self._ask("finding devices", "detect")
            if isinstance(found, Detection) and all(map(self._is_own, found.devices)):
                return found
            raise TypeError(f"detect() returned {found!r}, not a Detection of {self.name} devices")
        except PackageError as error:
            return Detection(notes=(str(error),))
        except TypeError as error:
            text = failed(self.plugin.label, "finding devices", error)
            return Detection(notes=(text,))

    def devices(self) -> tuple[DeviceInfo, ...]:
        """Its devices on this machine; what was odd is logged once."""
        found = self.detection()
        for note in found.notes:
            tell_once(note)
        return found.devices

    def simulated(self, arch: str) -> DeviceInfo:
        """A device that is not here.

        Raises:
            UnknownNameError or DeviceError: as the plugin says.
            PackageError: the plugin fails.
        """
        device = self._ask(f"simulating {arch!r}", "simulate", arch)
        if not self._is_own(device):
            raise DeviceError(f"the plugin {self.plugin.label} has no device {self.name}:{arch}")
        found: DeviceInfo = device
        return found

    def tables(self) -> Tables:
        """The platform's facts and taste."""
        contents = self.plugin.contents
        assert contents is not None
        return Tables(
            catalog=contents.catalog,
            preferences=contents.preferences,
            by_name=contents.by_name,
            last_resort_automatic=contents.last_resort_automatic,
            foreign=self.foreign,
        )

    @property
    def torch_type(self) -> str:
        """What torch calls its devices: `TORCH_TYPE` in detect.py, else the platform's name."""
        return str(getattr(self.plugin.contents.detect, "TORCH_TYPE", self.name))  # type: ignore[union-attr]

    def _is_own(self, device: Any) -> bool:
        return isinstance(device, DeviceInfo) and device.platform == self.name

    def _ask(self, what: str, function: str, *arguments: Any) -> Any:
        assert self.plugin.contents is not None
        asked: Callable[..., Any] = getattr(self.plugin.contents.detect, function)
        try:
            return asked(*arguments)
        except (KeyboardInterrupt, AttnplatError):
            raise
        except BaseException as error:
            raise PackageError(failed(self.plugin.label, what, error)) from error
