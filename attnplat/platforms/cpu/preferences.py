"""What the CPU platform prefers, and why: taste."""

from __future__ import annotations

from attnplat.config.names import Operation
from attnplat.platforms.selection import ByName, Preference

PREFERENCES: tuple[Preference, ...] = (
    Preference(
        serves=frozenset({Operation.MHA}),
        order=("TORCH_SDPA", "REFERENCE"),
        because="torch's own attention is the fastest path that needs no further package",
    ),
    Preference(
        serves=frozenset({Operation.MLA_PREFILL}),
        order=("TORCH_SDPA", "REFERENCE"),
        because="expanded latent attention is ordinary attention with narrower values",
    ),
    Preference(
        serves=frozenset({Operation.MLA}),
        order=("REFERENCE",),
        because="no faster path for absorbed latent attention is here yet",
    ),
)

BY_NAME: tuple[ByName, ...] = ()

LAST_RESORT_AUTOMATIC = True
