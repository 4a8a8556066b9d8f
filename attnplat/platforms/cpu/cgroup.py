"""How much of a Linux machine a control group leaves to this process: containers, services.

Both versions of the interface: one tree of folders with `cpu.max` and `memory.max`, or a tree
for each controller with `cpu.cfs_quota_us` and `memory.limit_in_bytes`. A limit of any folder
above holds too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

MOUNT = "/sys/fs/cgroup"
OWN = "/proc/self/cgroup"

# Version 1 writes "no limit" as the largest number of whole pages.
_NO_LIMIT = 2**62

Read = Callable[[str], str | None]


class Limits(NamedTuple):
    """Processors' worth of time, a fraction perhaps, and memory; None where nothing limits."""

    processors: float | None = None
    memory_bytes: int | None = None


def read_limits(read: Read) -> Limits:
    """The tightest limits on this process; `read` gives a file's text, or None."""
    processors: list[float] = []
    memory: list[int] = []
    for controllers, path in _memberships(read(OWN) or ""):
        for folder in _folders(controllers, path):
            if controllers == "" or "cpu" in controllers.split(","):
                processors += _processors(read, folder, controllers == "")
            if controllers == "" or controllers == "memory":
                memory += _memory(read, folder, controllers == "")
    return Limits(min(processors, default=None), min(memory, default=None))


def _memberships(text: str) -> Iterator[tuple[str, str]]:
    """`hierarchy:controllers:path` lines; version 2 names no controllers."""
    for line in text.splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            yield parts[1], parts[2]


def _folders(controllers: str, path: str) -> Iterator[str]:
    """The group's folder and all above it, below the controllers' mount.

    A container may see its own folder as the mount and be told its path on the host, so that
    folders can be missing.
    """
    mount = f"{MOUNT}/{controllers}" if controllers else MOUNT
    names = [name for name in path.split("/") if name not in ("", "..", ".")]
    for depth in range(len(names), -1, -1):
        yield "/".join([mount, *names[:depth]])


def _processors(read: Read, folder: str, second_version: bool) -> list[float]:
    if second_version:
        words = (read(f"{folder}/cpu.max") or "").split()
        quota, period = (words[0], words[1]) if len(words) == 2 else ("", "")
    else:
        quota = (read(f"{folder}/cpu.cfs_quota_us") or "").strip()
        period = (read(f"{folder}/cpu.cfs_period_us") or "").strip()
    share, whole = _number(quota), _number(period)
    return [share / whole] if share and whole else []


def _memory(read: Read, folder: str, second_version: bool) -> list[int]:
    name = "memory.max" if second_version else "memory.limit_in_bytes"
    limit = _number((read(f"{folder}/{name}") or "").strip())
    return [limit] if limit and limit < _NO_LIMIT else []


def _number(text: str) -> int | None:
    """None for `max`, -1 and whatever else is no number of microseconds or bytes."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None
