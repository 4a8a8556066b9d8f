"""The folder that attnplat's files go to, and whether anything can be written there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from attnplat.config.env import Environment
from attnplat.errors import CacheDirectoryError
from attnplat.notices import tell_once

REMEDY = "set ATTNPLAT_CACHE_DIR to a folder that can be"


class FolderState(NamedTuple):
    """Where files go, and why nothing can be written there (None: it can)."""

    path: Path
    problem: str | None


def cache_folder(environment: Environment) -> Path:
    """The folder for attnplat's files: ATTNPLAT_CACHE_DIR, else the operating system's."""
    if environment.cache_dir is not None:
        return environment.cache_dir
    from platformdirs import user_cache_path

    return user_cache_path("attnplat")


def check_folder(path: Path) -> FolderState:
    """Whether files can be written in `path`, which need not exist; leaves nothing behind."""
    existing = next((p for p in (path, *path.parents) if p.exists()), None)
    if existing is None:
        return FolderState(path, "no folder above it exists")
    if not existing.is_dir():
        return FolderState(path, f"{existing} is not a folder")
    try:
        _write_and_remove(existing / f".attnplat-{os.getpid()}-{os.urandom(8).hex()}")
    except OSError as error:
        return FolderState(path, f"{existing}: {error.strerror or error}")
    return FolderState(path, None)


def _write_and_remove(path: Path) -> None:
    # Permission bits do not tell: root passes them, and a disk may be full or read-only.
    with path.open("xb") as probe:
        try:
            probe.write(b"attnplat")
            probe.flush()
        finally:
            path.unlink()


def unwritable(folder: Path, error: OSError) -> CacheDirectoryError:
    """The error of a folder that `error` kept from being written."""
    reason = error.strerror or error
    return CacheDirectoryError(
        f"the cache folder {str(folder)!r} cannot be written: {reason}; {REMEDY}"
    )


def tell_unkept(error: CacheDirectoryError) -> None:
    """Log, once for each folder and reason, that work goes on without keeping its result."""
    tell_once(f"{error}; until then, what would be kept there is made anew every time")
