"""Where other rule sets depart from the CUDA platform's catalog and preferences."""

from __future__ import annotations

from attnplat.platforms.differences import Difference

DIFFERENCES: tuple[Difference, ...] = ()
