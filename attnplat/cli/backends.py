"""`attnplat backends`: what every backend takes, and what each platform prefers."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from attnplat.cli.main import EXIT_OK
from attnplat.cli.tables import print_table
from attnplat.config.names import Operation
from attnplat.errors import ConfigError
from attnplat.platforms import platform_names
from attnplat.platforms.earned import Earned, earned
from attnplat.platforms.feature_tables import (
    COLUMNS,
    FURTHER,
    Table,
    backends_document,
    differences_document,
    differences_table,
    feature_tables,
    priority_table,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--platform", choices=platform_names(), help="one platform; default all")
    parser.add_argument(
        "--operation", choices=[str(o) for o in Operation], help="one operation; default all"
    )
    parser.add_argument("--further", action="store_true", help="the further features instead")
    parser.add_argument("--preferences", action="store_true", help="what is preferred, and why")
    parser.add_argument(
        "--differences", action="store_true", help="where vLLM 0.33 decides otherwise, and why"
    )
    parser.add_argument("--markdown", action="store_true", help="the whole page of docs/")
    parser.add_argument(
        "--records",
        metavar="DIR",
        type=Path,
        help="take marks from the conformance records in this folder (see `attnplat check "
        "--record`); default those that attnplat was installed with",
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    """Print the tables asked for."""
    found = earned() if args.records is None else _of_records(args.records)
    if args.markdown:
        print(differences_document() if args.differences else backends_document(found), end="")
        return EXIT_OK
    tables = _tables(args, found)
    if args.json:
        print(json.dumps([_as_dict(t) for t in tables], indent=2))
        return EXIT_OK
    for table in tables:
        print(f"\n{table.title}")
        print_table(table.rows, table.headers)
    return EXIT_OK


def _of_records(folder: Path) -> Earned:
    from attnplat.testing.records import earned_by, read_records

    if not (records := read_records(folder)):
        raise ConfigError(f"there are no conformance records in {folder}")
    return earned_by(records)


def _tables(args: argparse.Namespace, found: Earned) -> list[Table]:
    platforms = [args.platform] if args.platform else list(platform_names())
    if args.preferences:
        return [priority_table(p) for p in platforms]
    if args.differences:
        return [differences_table(p) for p in platforms]
    columns = FURTHER if args.further else COLUMNS
    tables = [t for p in platforms for t in feature_tables(p, columns, earned=found)]
    if args.operation:
        tables = [t for t in tables if t.title.endswith(f": {args.operation}")]
    return tables


def _as_dict(table: Table) -> dict[str, object]:
    rows = [dict(zip(table.headers, row, strict=True)) for row in table.rows]
    return {"title": table.title, "rows": rows}
