"""One layer on several devices at once: what all of them accept.

Pipelines and replicas that exchange KV caches run the same backend everywhere, on devices that
need not be alike. Each device decides as it would alone; what is shared is the intersection.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from attnplat.config.attention import AttentionConfig
from attnplat.config.layer import LayerConfig
from attnplat.errors import ConfigError
from attnplat.platforms.platform import Platform
from attnplat.platforms.selection import Selection


@dataclass(frozen=True)
class SharedSelection:
    """What several devices decided for one layer, and what they have in common.

    Attributes:
        selections: each device's own decision, in the order in which they were given.
        accepted: the backends that every device accepts and that share a KV-cache layout
            across them: first the one whose worst rank on any device is best.
        refused: every other backend that some device accepts -> why it is not shared.
    """

    selections: tuple[Selection, ...]
    accepted: tuple[str, ...]
    refused: Mapping[str, str]

    @property
    def chosen(self) -> str | None:
        """The first accepted backend, unless a device lacks one for a part of the layer."""
        complete = all(s.ok for s in self.selections)
        return self.accepted[0] if self.accepted and complete else None

    @property
    def ok(self) -> bool:
        """Whether one backend serves the layer on every device."""
        return self.chosen is not None

    def explain(self) -> str:
        """The decision, and why each backend that some device accepts is not shared."""
        devices = ", ".join(str(s.world.device) for s in self.selections)
        lines = [f"on all of {devices}: {self.chosen or 'nothing'}"]
        if len(self.accepted) > 1:
            lines.append(f"  also accepted by all: {', '.join(self.accepted[1:])}")
        lines += [f"  {name}: {why}" for name, why in self.refused.items()]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "chosen": self.chosen,
            "accepted": list(self.accepted),
            "refused": dict(self.refused),
            "devices": [s.to_dict() for s in self.selections],
        }


def select_shared(
    platforms: Iterable[Platform],
    config: LayerConfig,
    attention: AttentionConfig | None = None,
    *,
    allow_reference: bool = False,
) -> SharedSelection:
    """Decide for one layer that runs on several devices with one backend. Pure.

    Raises ConfigError without any device.
    """
    selections = tuple(
        platform.select(config, attention, allow_reference=allow_reference)
        for platform in platforms
    )
    if not selections:
        raise ConfigError("a selection is shared by devices, and none was given")
    refused: dict[str, str] = {}
    accepted: dict[str, int] = {}
    for name in dict.fromkeys(b.name for s in selections for b in s.accepted):
        why_not = _why_not_shared(name, selections)
        if why_not is None:
            accepted[name] = max(_ranks(s).index(name) for s in selections)
        else:
            refused[name] = why_not
    return SharedSelection(selections, tuple(sorted(accepted, key=accepted.__getitem__)), refused)


def _ranks(selection: Selection) -> list[str]:
    return [backend.name for backend in selection.accepted]


def _why_not_shared(name: str, selections: tuple[Selection, ...]) -> str | None:
    """Why a backend is not shared by all devices, or None when it is."""
    layouts: set[str] | None = None
    for selection in selections:
        backend = next((b for b in selection.accepted if b.name == name), None)
        if backend is None:
            reasons = selection.rejections.get(name, ())
            because = f": {'; '.join(map(str, reasons))}" if reasons else " (not considered there)"
            return f"refused on {selection.world.device}{because}"
        if backend.layouts is not None:
            layouts = set(backend.layouts) if layouts is None else layouts & set(backend.layouts)
    if layouts is not None and not layouts:
        return "its KV-cache layouts on these devices have none in common"
    return None
