"""Converted models on disk: made once, checked at every use, replaced as a whole.

An entry is a folder with a manifest of every file's size and SHA-256. It is written beside
its place and renamed into it, so that a reader finds all of it or nothing; an entry that does
not match its manifest counts as absent.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from attnplat.errors import CacheDirectoryError

log = logging.getLogger("attnplat")

MANIFEST = "manifest.json"
FORMAT = 1
"""Of the entries; another number makes all of them anew."""


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class WeightCache:
    """Entries of a cache folder.

    Args:
        folder: need not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "models"

    def find(self, key: str) -> Path | None:
        """The whole and unharmed entry of `key`, or None. Writes nothing."""
        entry = self.folder / key
        try:
            manifest = json.loads((entry / MANIFEST).read_text(encoding="utf-8"))
            intact = manifest["format"] == FORMAT and all(
                _matches(entry / name, known) for name, known in manifest["files"].items()
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None  # no entry, or one that somebody has damaged: it is made again
        return entry if intact else None

    def find_or_make(self, key: str, make: Callable[[Path], None]) -> Path:
        """The entry of `key`; where there is none, `make` fills a folder that becomes it.

        Of several processes one makes it and the others wait.

        Raises CacheDirectoryError when the folder cannot be written, an OSError out of `make`
        included; whatever else `make` raises.
        """
        if (found := self.find(key)) is not None:
            return found
        with self._locked(key):
            if (found := self.find(key)) is not None:
                return found
            with self._new_folder(key) as folder, self._explained():
                make(folder)
                _write_manifest(folder)
                self._replace(folder, self.folder / key)
        return self.folder / key

    def _replace(self, folder: Path, entry: Path) -> None:
        if entry.exists() or entry.is_symlink():
            # A folder cannot be renamed onto one that has files.
            old = folder.with_suffix(".old")
            entry.rename(old)
            shutil.rmtree(old, ignore_errors=True)
        folder.rename(entry)

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        from filelock import FileLock, Timeout

        with self._explained():
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.folder / f"{key}.lock")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                log.warning("another process is converting this model; waiting for it")
                lock.acquire()
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def _new_folder(self, key: str) -> Iterator[Path]:
        # Not tempfile's: those are closed to the other users of a shared cache.
        folder = self.folder / f".{key}-{secrets.token_hex(8)}"
        with self._explained():
            folder.mkdir()
        try:
            yield folder
        finally:
            if folder.exists():
                shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CacheDirectoryError(
                f"the cache folder {str(self.folder)!r} cannot be written: "
                f"{error.strerror or error}; set ATTNPLAT_CACHE_DIR to a folder that can be, or "
                "run without a cache (--no-cache)"
            ) from None


def _matches(path: Path, known: Any) -> bool:
    """Size first: most damage shows there, and costs nothing to see."""
    size, digest = known["size"], known["sha256"]
    return path.stat().st_size == size and bool(file_digest(path) == digest)


def _write_manifest(folder: Path) -> None:
    files = {
        path.relative_to(folder).as_posix(): {
            "size": path.stat().st_size,
            "sha256": file_digest(path),
        }
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = folder / MANIFEST
    with manifest.open("w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, "files": files}, file, indent=1)
        file.flush()
        with suppress(OSError):  # some file systems cannot; the check at use remains
            os.fsync(file.fileno())
