"""Where WINDOW_ATTN stands among a platform's own backends, and why: taste."""

from __future__ import annotations

from attnplat.config.names import Operation
from attnplat.platforms.plugins import REST
from attnplat.platforms.selection import Preference

PREFERENCES = (
    Preference(
        serves=frozenset({Operation.MHA}),
        # REST is the platform's own order. In front of it stands what should come first; last
        # resorts stay last, whatever stands behind.
        order=(REST, "WINDOW_ATTN"),
        because="it was written to be read, and copies what the others read in place",
    ),
)

BY_NAME = ()
