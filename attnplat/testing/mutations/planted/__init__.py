"""The planted bugs."""

from __future__ import annotations

from attnplat.testing.mutations.bug import Bug
from attnplat.testing.mutations.planted import (
    errors,
    indexers,
    library,
    masks,
    plans,
    reading,
    scores,
    writing,
)

PLANTED: tuple[Bug, ...] = tuple(
    bug
    for module in (masks, scores, reading, writing, plans, errors, indexers, library)
    for bug in module.BUGS.bugs
)
"""Every planted bug, by kind."""
