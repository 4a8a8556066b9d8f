"""Which implementation runs which layer: decided once per config and device, then kept."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from attnplat.backends.interface import AttentionImpl
from attnplat.config.attention import AttentionConfig
from attnplat.config.layer import LayerConfig
from attnplat.config.names import Feature
from attnplat.errors import DeviceError
from attnplat.platforms import current_platform, platform_for
from attnplat.platforms.platform import Platform
from attnplat.platforms.selection import Selection


class Kernels:
    """Selections and implementations of the layers that have run, by config and device.

    The platform of a device, and with it the environment, is looked at when the first layer
    runs there, and kept.

    Args:
        attention: the user's wishes; None for what the environment says.
    """

    def __init__(self, attention: AttentionConfig | None = None) -> None:
        self.attention = attention
        self._platforms: dict[torch.device, Platform] = {}
        self._selections: dict[tuple[LayerConfig, torch.device], Selection] = {}
        self._impls: dict[tuple[LayerConfig, torch.device], AttentionImpl] = {}

    def impl(self, config: LayerConfig, device: torch.device) -> AttentionImpl:
        """The implementation of layers of `config` on `device`.

        Raises:
            NoBackendError: nothing fits; carries every reason.
            SimulatedDeviceError: the device is not here.
        """
        found = self._impls.get((config, device))
        if found is None:
            platform = self.platform(device)
            selection = platform.select(_of_the_run(config, platform), self.attention)
            backend = platform.get_attn_backend(selection.config, self.attention)
            found = backend.create(selection.config, device)
            self._selections[config, device] = selection
            self._impls[config, device] = found
        return found

    def platform(self, device: torch.device) -> Platform:
        """The platform that `device` belongs to."""
        found = self._platforms.get(device)
        if found is None:
            found = self._platforms[device] = platform_on(device)
        return found

    @property
    def selections(self) -> Mapping[tuple[LayerConfig, torch.device], Selection]:
        """What was decided so far, by the config asked for and the device."""
        return MappingProxyType(self._selections)


def _of_the_run(config: LayerConfig, platform: Platform) -> LayerConfig:
    """What a whole run asks for, an implementation must see in its own config."""
    if platform.run.batch_invariant:
        return config.replace(also_needs=config.also_needs | {Feature.BATCH_INVARIANCE})
    return config


def platform_on(device: torch.device) -> Platform:
    """The platform of a torch device of this machine.

    Raises DeviceError for a device that no platform drives.
    """
    here = current_platform(device.index)
    if torch.device(here.torch_device).type == device.type:
        return here
    if device.type == "cpu":
        return platform_for("cpu")
    raise DeviceError(
        f"tensors are on {device}, and the platform of this machine is {here.device}; move the "
        f"model to {here.torch_device!r}, or to 'cpu'"
    )
