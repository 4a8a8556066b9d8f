"""`attnplat cache`: what is kept in the cache folder, and removing what is of no more use."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from attnplat.cli.main import EXIT_OK
from attnplat.cli.tables import print_table
from attnplat.config.attention import AttentionConfig
from attnplat.config.env import read_env
from attnplat.errors import ConfigError, UnknownNameError
from attnplat.platforms.distributions import installed_versions
from attnplat.storage import KINDS, Entry, Store, cache_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "kind", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}; default all"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--clean",
        action="store_true",
        help="remove what is damaged, unfinished, or of versions that are no longer installed",
    )
    what.add_argument("--clear", action="store_true", help="remove everything")
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    """List the entries, or remove those asked for and say what was freed."""
    if args.attention != AttentionConfig():
        raise ConfigError("cache reads no attention options; attnplat explain does")
    for kind in args.kind:
        if kind not in KINDS:
            raise UnknownNameError("kind of cache entry", kind, KINDS)
    folder = cache_folder(read_env())
    stores = {kind: Store(folder, kind) for kind in args.kind or KINDS}
    found = [(kind, entry) for kind, store in stores.items() for entry in _entries(store)]
    removed = [(k, e) for k, e in found if args.clear or (args.clean and e.problem)]
    for kind, entry in removed:
        stores[kind].remove(entry)
    if args.json:
        _print_json(str(folder), found, removed)
    elif args.clean or args.clear:
        print(f"{folder}: removed {len(removed)} of {len(found)} entries, {_total(removed)}")
    else:
        _print(str(folder), found)
    return EXIT_OK


def _entries(store: Store) -> tuple[Entry, ...]:
    """The entries, judged against what is installed."""
    names = {name for entry in store.entries() for name in entry.packages}
    return store.entries(installed_versions(names, sys.path).versions)


def _print(folder: str, found: list[tuple[str, Entry]]) -> None:
    print(f"{folder}: {len(found)} entries, {_total(found)}")
    rows = [(k, e.about or e.key, in_mib(e.size), e.problem or "in use") for k, e in found]
    if rows:
        print()
        print_table(rows, ("kind", "what", "size", ""))
    useless = [pair for pair in found if pair[1].problem]
    if useless:
        print(f"\nattnplat cache --clean removes {len(useless)} of them, {_total(useless)}")


def _print_json(
    folder: str, found: list[tuple[str, Entry]], removed: list[tuple[str, Entry]]
) -> None:
    entries: list[dict[str, Any]] = [
        {
            "kind": kind,
            "key": entry.key,
            "about": entry.about,
            "bytes": entry.size,
            "packages": dict(entry.packages),
            "problem": entry.problem,
            "removed": (kind, entry) in removed,
        }
        for kind, entry in found
    ]
    print(json.dumps({"folder": folder, "entries": entries}, indent=2))


def _total(entries: list[tuple[str, Entry]]) -> str:
    return in_mib(sum(entry.size for _, entry in entries))


def in_mib(size: int) -> str:
    """Bytes as people read them."""
    return f"{size / 2**20:.1f} MiB"
