"""What torch says of a device's architecture, for formats that depend on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TorchArch:
    """A device's architecture: `gfx942` for AMD's devices, `sm_90` for NVIDIA's, else its type."""

    arch: str

    @classmethod
    def of(cls, device: torch.device) -> TorchArch:
        """The architecture of a device of this machine."""
        if device.type != "cuda":
            return cls(device.type)
        facts = torch.cuda.get_device_properties(device)
        if torch.version.hip is None:
            return cls(f"sm_{facts.major}{facts.minor}")
        # The target's optional parts (`gfx942:sramecc+:xnack-`) do not matter here.
        return cls(str(facts.gcnArchName).split(":")[0])
