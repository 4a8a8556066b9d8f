"""Selections that are asked for again and again, remembered by everything they depend on."""

from __future__ import annotations

from attnplat.config.attention import AttentionConfig
from attnplat.config.layer import LayerConfig
from attnplat.config.run import RunContext
from attnplat.platforms.platform import Platform
from attnplat.platforms.selection import Selection


class SelectionCache:
    """The selections of one platform, for callers that ask per layer and per step.

    The platform is a frozen value - device, packages, tables, wishes - so the arguments of
    `select` are all that is left to key by, and an entry cannot go stale. What changes the
    platform (another environment, a newly installed package) makes another platform, and
    that one wants a cache of its own.
    """

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        self._known: dict[
            tuple[LayerConfig, AttentionConfig | None, RunContext | None, bool], Selection
        ] = {}

    def select(
        self,
        config: LayerConfig,
        attention: AttentionConfig | None = None,
        *,
        run: RunContext | None = None,
        allow_reference: bool = False,
    ) -> Selection:
        """As `Platform.select`, from memory where the same has been asked."""
        key = (config, attention, run, allow_reference)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self.platform.select(
                config, attention, run=run, allow_reference=allow_reference
            )
        return found

    def __len__(self) -> int:
        return len(self._known)
