"""Entries of one kind in the cache folder: made once, checked at every use, replaced as a whole.

An entry is a folder with a manifest of every file's size and SHA-256, or a document: one JSON
file with the SHA-256 of its value. Either is written beside its place and renamed into it, so
that a reader finds all of it or nothing; one that does not match counts as absent.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from attnplat.errors import CacheDirectoryError, UnknownNameError
from attnplat.notices import logger
from attnplat.storage.folder import tell_unkept, unwritable
from attnplat.storage.kinds import KINDS
from attnplat.storage.locks import Owner, locked

MANIFEST = "manifest.json"
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_OF_LOCKS = (".lock", ".lock.owner", ".lock.takeover")
_UNFINISHED_S = 3600.0
"""What is younger than this and looks unfinished may be some process's work."""


def key_of(*parts: Any) -> str:
    """A key for plain JSON values: equal parts give equal keys, in every process."""
    return _digest(parts)[:32]


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content, hexadecimal."""
    import hashlib  # loads OpenSSL, which no start-up should pay for

    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Entry(NamedTuple):
    """What lies in a store.

    Attributes:
        key: its key; for rubbish that a broken-off attempt left, its file's name.
        path: its folder or file.
        size: bytes.
        packages: distribution -> the version it was made with.
        about: what it is, in words.
        problem: why it would not be used as it is ("" where it would).
    """

    key: str
    path: Path
    size: int
    packages: Mapping[str, str]
    about: str
    problem: str


class Store:
    """Entries of one kind.

    Args:
        folder: the cache folder; need not exist.
        kind: one of `KINDS`.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        if kind not in KINDS:
            raise UnknownNameError("kind of cache entry", kind, KINDS)
        self.folder = folder / kind
        self.form = KINDS[kind].form

    # Folders ----------------------------------------------------------------------------------

    def find(self, key: str) -> Path | None:
        """The whole and unharmed folder of `key`, or None. Writes nothing."""
        entry = self._place(key)
        manifest = _read_json(entry / MANIFEST)
        try:
            intact = manifest["format"] == self.form and all(
                _matches(entry / name, known) for name, known in manifest["files"].items()
            )
        except (OSError, KeyError, TypeError, AttributeError):
            return None  # no entry, or one that somebody has damaged: it is made again
        return entry if intact else None

    def find_or_make(
        self,
        key: str,
        make: Callable[[Path], None],
        *,
        packages: Mapping[str, str] | None = None,
        about: str = "",
    ) -> Path:
        """The folder of `key`; where there is none, `make` fills one that becomes it.

        Of several processes one makes it and the others wait for as long as it lives.

        Args:
            packages: distribution -> version that it depends on; see `entries`.
            about: what it is, for people.

        Raises CacheDirectoryError when the cache cannot be written, an OSError out of `make`
        included; whatever else `make` raises.
        """
        if (found := self.find(key)) is not None:
            return found
        with self._locked(key):
            if (found := self.find(key)) is not None:
                return found
            with self._new_folder(key) as folder, self._explained():
                make(folder)
                _write_manifest(folder, self.form, dict(packages or {}), about)
                _replace_folder(folder, self._place(key))
        return self._place(key)

    # Documents --------------------------------------------------------------------------------

    def read(self, key: str) -> Any | None:
        """The document of `key`, or None where there is none that is whole. Writes nothing."""
        found = _read_json(self._document(key))
        try:
            if found["format"] == self.form and found["sha256"] == _digest(found["value"]):
                return found["value"]
        except (KeyError, TypeError):
            pass  # damaged: it is made again
        return None

    def write(
        self,
        key: str,
        value: Any,
        *,
        packages: Mapping[str, str] | None = None,
        about: str = "",
    ) -> None:
        """Make `value`, plain JSON, the document of `key`.

        Raises CacheDirectoryError when the cache cannot be written.
        """
        place = self._document(key)
        temporary = self.folder / f".{key}-{os.urandom(8).hex()}"
        value = json.loads(json.dumps(value))  # as a reader will find it
        document = {
            "format": self.form,
            "about": about,
            "packages": dict(packages or {}),
            "sha256": _digest(value),
            "value": value,
        }
        with self._explained():
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                _write_json(temporary, document)
                temporary.replace(place)
            finally:
                temporary.unlink(missing_ok=True)

    def keep(self, key: str, value: Any, **about: Any) -> bool:
        """`write`, except that a cache that cannot be written is told of once: then False."""
        try:
            self.write(key, value, **about)
        except CacheDirectoryError as error:
            tell_unkept(error)
            return False
        return True

    def read_or_make(self, key: str, make: Callable[[], Any], **about: Any) -> Any:
        """The document of `key`; where there is none, what `make` returns, kept if possible.

        Two processes may both make it, and either result stays: this is for what takes
        seconds. None is returned as it is and not kept.
        """
        if (found := self.read(key)) is not None:
            return found
        value = make()
        if value is not None:
            self.keep(key, value, **about)
        return value

    # Housekeeping -----------------------------------------------------------------------------

    def entries(self, installed: Mapping[str, str] | None = None) -> tuple[Entry, ...]:
        """Everything in the store, rubbish of broken-off attempts included, by name.

        Args:
            installed: distribution -> version; an entry that was made with another version
                has a problem. Left out, versions are not compared.
        """
        try:
            paths = sorted(self.folder.iterdir())
        except OSError:
            return ()
        return tuple(self._entry(p, installed) for p in paths if not p.name.endswith(_OF_LOCKS))

    def remove(self, entry: Entry) -> None:
        """Remove an entry, unless a process is at work on it.

        Raises CacheDirectoryError when it cannot be removed.
        """
        unfinished = entry.key.startswith(".")
        key = entry.key[1:].rpartition("-")[0] if unfinished else entry.key
        with self._explained(), locked(self.folder / f"{key}.lock"):
            if entry.path.is_dir() and not entry.path.is_symlink():
                _remove_folder(entry.path)
            else:
                entry.path.unlink(missing_ok=True)

    def _entry(self, path: Path, installed: Mapping[str, str] | None) -> Entry:
        is_folder = path.is_dir()
        key = path.name if is_folder else path.name.removesuffix(".json")
        found = _read_json(path / MANIFEST if is_folder else path)
        about = found if isinstance(found, dict) else {}
        packages = about.get("packages")
        packages = packages if isinstance(packages, dict) else {}
        return Entry(
            key=key,
            path=path,
            size=_size(path),
            packages=packages,
            about=str(about.get("about", "")),
            problem=self._problem(path, key, about) or _outdated(packages, installed),
        )

    def _problem(self, path: Path, key: str, about: Mapping[str, Any]) -> str:
        if key.startswith("."):
            return _unfinished(path)
        if not _KEY.fullmatch(key):
            return "not attnplat's"
        if about.get("format", self.form) != self.form:
            return "of another release of attnplat"
        if (self.find(key) if path.is_dir() else self.read(key)) is None:
            return "damaged"
        return ""

    def _place(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise ValueError(f"{key!r} is no key: letters, digits, '.', '_' and '-' only")
        return self.folder / key

    def _document(self, key: str) -> Path:
        return self._place(key).with_name(f"{key}.json")

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        def waiting(owner: Owner | None) -> None:
            who, what = owner or "another process", "is making what is wanted from"
            logger().warning("%s %s %s; waiting", who, what, self.folder)

        # What is done under the lock has errors of its own, so it is entered by hand.
        held = locked(self._place(f"{key}.lock"), waiting)
        with self._explained():
            self.folder.mkdir(parents=True, exist_ok=True)
            held.__enter__()
        try:
            yield
        finally:
            held.__exit__(None, None, None)

    @contextmanager
    def _new_folder(self, key: str) -> Iterator[Path]:
        # Not tempfile's: those are closed to the other users of a shared cache.
        folder = self.folder / f".{key}-{os.urandom(8).hex()}"
        with self._explained():
            folder.mkdir()
        try:
            yield folder
        finally:
            if folder.exists():
                _remove_folder(folder, ignore_errors=True)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise unwritable(self.folder.parent, error) from None


def _digest(value: Any) -> str:
    import hashlib

    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _write_json(path: Path, value: Any) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
        file.flush()
        with suppress(OSError):  # some file systems cannot; the check at use remains
            os.fsync(file.fileno())


def _matches(path: Path, known: Any) -> bool:
    """Size first: most damage shows there, and costs nothing to see."""
    size, digest = known["size"], known["sha256"]
    return path.stat().st_size == size and bool(file_digest(path) == digest)


def _write_manifest(folder: Path, form: int, packages: dict[str, str], about: str) -> None:
    files = {
        path.relative_to(folder).as_posix(): {
            "size": path.stat().st_size,
            "sha256": file_digest(path),
        }
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = {"format": form, "about": about, "packages": packages, "files": files}
    _write_json(folder / MANIFEST, manifest)


def _replace_folder(folder: Path, entry: Path) -> None:
    if entry.exists() or entry.is_symlink():
        # A folder cannot be renamed onto one that has files.
        old = folder.with_name(f"{folder.name}.old")
        entry.rename(old)
        _remove_folder(old, ignore_errors=True)
    folder.rename(entry)


def _remove_folder(folder: Path, *, ignore_errors: bool = False) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=ignore_errors)


def _unfinished(path: Path) -> str:
    with suppress(OSError):
        if time.time() - path.stat().st_mtime < _UNFINISHED_S:
            return ""
    return "left by an attempt that was broken off"


def _outdated(packages: Mapping[str, str], installed: Mapping[str, str] | None) -> str:
    for name, version in packages.items():
        if installed is not None and installed.get(name) != version:
            return f"made with {name} {version}; installed is {installed.get(name, 'none')}"
    return ""


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else (path,)
    total = 0
    for file in files:
        with suppress(OSError):
            total += file.lstat().st_size
    return total
