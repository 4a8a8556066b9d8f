"""What installed distributions say they bring to attnplat, read without importing any of them.

A plugin's distribution declares entry points in two groups. Their names are what users type:

    [project.entry-points."attnplat.backends"]
    WINDOW_ATTN = "attnplat_window"       # a backend's canonical name = the package that has it

    [project.entry-points."attnplat.platforms"]
    tpu = "attnplat_tpu"                  # a platform's name = the package that has it

So every name is known from metadata alone. `docs/plugins.md` has the rest.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

BACKENDS, PLATFORMS = "attnplat.backends", "attnplat.platforms"
GROUPS = (BACKENDS, PLATFORMS)


class EntryPoint(NamedTuple):
    """One declared name.

    Attributes:
        group: one of `GROUPS`.
        name: the backend's or platform's name in its canonical case.
        package: what the distribution says has it: an import name, if all is well.
        distribution, version: who declares it.
        folder: where its metadata lie.
    """

    group: str
    name: str
    package: str
    distribution: str
    version: str
    folder: str


class Declared(NamedTuple):
    """What was found, and what could not be read, one sentence each."""

    entry_points: tuple[EntryPoint, ...] = ()
    notes: tuple[str, ...] = ()

    def names(self, group: str) -> tuple[str, ...]:
        """The names declared in a group, each once, in the order found."""
        return tuple(dict.fromkeys(e.name for e in self.entry_points if e.group == group))


def declared(paths: Sequence[str] | None = None) -> Declared:
    """The entry points of the distributions along `paths` (Python's own when left out).

    Of a distribution that is installed twice, the first counts, as it does for imports. The
    folders are read again when one of them has changed.
    """
    return _read_all(signature(sys.path if paths is None else paths))


def signature(paths: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """The folders along `paths`, each with when something was last added or removed."""
    found = []
    for path in paths:
        try:
            found.append((path or ".", os.stat(path or ".").st_mtime_ns))
        except (OSError, ValueError):  # import paths may name what is not there
            continue
    return tuple(found)


@lru_cache(maxsize=8)
def _read_all(folders: tuple[tuple[str, int], ...]) -> Declared:
    found: list[EntryPoint] = []
    notes: list[str] = []
    seen: set[str] = set()
    for folder, _ in folders:
        for entry in _entries(folder):
            match = re.fullmatch(r"(.+?)(?:-([^-]+))?(?:-py[0-9.]+)?\.(?:dist|egg)-info", entry)
            if match is None:
                continue
            distribution = re.sub(r"[-_.]+", "-", match[1]).lower()
            if distribution in seen:
                continue
            seen.add(distribution)
            place = os.path.join(folder, entry)
            text = _text(os.path.join(place, "entry_points.txt"))
            if text is None:
                notes.append(f"the entry points of {distribution} in {folder} cannot be read")
            elif "attnplat." in text:
                version = match[2] or ""
                found += [
                    EntryPoint(group, name, package, distribution, version, place)
                    for group, name, package in parse(text)
                ]
    return Declared(tuple(found), tuple(notes))


def parse(text: str) -> list[tuple[str, str, str]]:
    """(group, name, package) of attnplat's groups in the text of an `entry_points.txt`."""
    group, found = "", []
    for line in text.splitlines():
        line = line.strip()
        if line.startswith("["):
            group = line.strip("[]").strip()
        elif group in GROUPS and line and line[0] not in "#;":
            name, _, package = line.partition("=")
            found.append((group, canonical(group, name), package.strip()))
    return found


def canonical(group: str, name: str) -> str:
    """A declared name as attnplat writes it: backends in upper case, platforms in lower."""
    folded = name.strip().replace("-", "_")
    return folded.upper() if group == BACKENDS else folded.lower()


def _entries(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:  # an archive
        return []


def _text(path: str) -> str | None:
    """The file's text, "" where there is none; None where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError:
        return None
