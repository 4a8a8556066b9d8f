"""What the CPU platform knows of each backend: facts."""

from __future__ import annotations

from attnplat.backends.backend import Backend
from attnplat.backends.portable.catalog import PORTABLE

CATALOG: tuple[Backend, ...] = PORTABLE
