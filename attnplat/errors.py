"""Every error attnplat raises on purpose, in one tree.

`AttnplatError` is the root. Errors about a value also derive from `ValueError` (or
`TypeError`), so callers that know nothing of attnplat still catch them the usual way.
A message names the value, what is allowed, and the nearest fix where one is known.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnplat.platforms.selection import Selection


class AttnplatError(Exception):
    """Root of every error that attnplat raises on purpose."""


class ConfigError(AttnplatError, ValueError):
    """A configuration value is not allowed, whatever the device."""


class UnknownNameError(ConfigError):
    """A name (backend, kind, dtype, field, device ...) that nothing of that sort has.

    Carries `what` (the sort of name), `name`, `known` (sorted) and `closest`
    (the best match or None).
    """

    def __init__(self, what: str, name: object, known: Iterable[str], *, hint: str = "") -> None:
        self.what = what
        self.name = name
        self.known = sorted(map(str, known))
        self.closest = closest_name(str(name), self.known)
        parts = [f"unknown {what} {name!r}"]
        if self.closest is not None:
            parts.append(f"did you mean {self.closest!r}?")
        parts.append(f"known: {', '.join(self.known)}")
        if hint:
            parts.append(hint)
        super().__init__("; ".join(parts))


class ConflictError(ConfigError):
    """Two values were given where one was asked for."""


class DeviceError(AttnplatError):
    """The machine's devices cannot be used as asked."""


class SimulatedDeviceError(DeviceError):
    """Kernels were asked for on a device that is only simulated."""


class NoBackendError(AttnplatError):
    """No backend fits the layer; `selection` holds every reason."""

    def __init__(self, selection: Selection) -> None:
        self.selection = selection
        super().__init__(selection.failure())


class PackageError(AttnplatError):
    """An optional package is missing, broken or of a version that does not fit."""


class ModelFileError(AttnplatError):
    """A model folder or file is missing, corrupt or not of a kind attnplat reads."""


class CacheDirectoryError(AttnplatError):
    """The cache directory cannot be created or written."""


class OfflineError(AttnplatError):
    """Something would have to be fetched, and the user has forbidden the network."""


class OutOfBlocksError(AttnplatError):
    """The KV cache has too few blocks for what was asked."""


class UnsupportedCallError(AttnplatError, ValueError):
    """A call asks an implementation for something that its layer's config did not declare."""


class PlanMismatchError(AttnplatError, ValueError):
    """Tensors of a call do not have the shape, dtype or device its plan was made for."""


class TensorError(PlanMismatchError):
    """One tensor of a call is not as it must be: shape, dtype, stride, device, memory.

    `argument` is its name, as in `pages.block_table`.
    """

    def __init__(self, argument: str, message: str) -> None:
        self.argument = argument
        super().__init__(message)


class WorkspaceTooSmallError(AttnplatError):
    """The caller's workspace cannot hold what the plan needs and may not grow now."""


class HostLengthsNeededError(AttnplatError, ValueError):
    """The backend needs exact lengths on the host and the batch carries none.

    Raised in place of a hidden device-to-host copy.
    """


def closest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, compared without case, or None.

    A name that shares its first three letters or more counts as like, so that a
    misspelt abbreviation finds the long name it was meant for.
    """
    from difflib import get_close_matches  # only an error needs it

    by_lower = {k.lower(): k for k in known}
    folded = name.lower()
    matches = get_close_matches(folded, by_lower, n=1, cutoff=0.6)
    if matches:
        return by_lower[matches[0]]
    shared = {k: _shared_start(k, folded) for k in by_lower}
    best = max(shared, key=lambda k: shared[k], default=None)
    return by_lower[best] if best is not None and shared[best] >= 3 else None


def _shared_start(one: str, other: str) -> int:
    same = (a == b for a, b in zip(one, other, strict=False))
    return next((i for i, equal in enumerate(same) if not equal), min(len(one), len(other)))
