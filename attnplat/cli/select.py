"""`attnplat select`: decide recorded cases, write the outcomes, or check them."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator

from attnplat.cli.main import EXIT_NO, EXIT_OK
from attnplat.cli.tables import print_table
from attnplat.errors import ConflictError
from attnplat.platforms.differences import RULE_SETS
from attnplat.snapshots.check import Tally, check, decide, read_cases, write_cases
from attnplat.snapshots.kind import Row

_SHOWN_EVERY = 500


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--cases", action="append", required=True, metavar="FILE", help="JSON lines, plain or .gz"
    )
    parser.add_argument(
        "--rules", choices=RULE_SETS, default=RULE_SETS[0], help="whose rules decide"
    )
    parser.add_argument(
        "--out", metavar="FILE", help="write the rows with the outcomes decided here"
    )
    parser.add_argument(
        "--check", action="store_true", help="compare with the outcomes in the rows"
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    """Decide, write or compare; 1 when a compared row differs."""
    if args.check and args.out:
        raise ConflictError("--check compares and --out writes; give one of the two")
    rows = _watched(row for path in args.cases for row in read_cases(path))
    if args.check:
        tally = check(rows, args.rules)
        _print_tally(tally, args.json)
        return EXIT_OK if tally.agreed else EXIT_NO
    decided = (decide(row, args.rules) for row in rows)
    if args.out:
        count = write_cases(args.out, decided)
        print(f"{count} rows written to {args.out}")
        return EXIT_OK
    for row in decided:
        print(json.dumps(row))
    return EXIT_OK


def _watched(rows: Iterable[Row]) -> Iterator[Row]:
    """The rows; where someone watches, how many have been decided is shown meanwhile."""
    if not sys.stderr.isatty():
        yield from rows
        return
    for count, row in enumerate(rows):
        if count % _SHOWN_EVERY == 0:
            print(f"\r{count} rows decided", end="", file=sys.stderr, flush=True)
        yield row
    print("\r\033[K", end="", file=sys.stderr, flush=True)


def _print_tally(tally: Tally, as_json: bool) -> None:
    if as_json:
        print(json.dumps(_as_dict(tally), indent=2))
        return
    rows = []
    for cell, count in sorted(tally.rows.items()):
        differ = tally.differ[cell]
        share = 100.0 * (count - differ) / count
        rows.append([*cell, str(count), str(differ), f"{share:.2f} %"])
    print_table(rows, ["table", "platform", "arch", "profile", "rows", "differ", "agree"])
    total, differ = tally.rows.total(), tally.differ.total()
    print(f"{total} rows, {differ} differ")
    for example in tally.examples:
        print(json.dumps(example))


def _as_dict(tally: Tally) -> dict[str, object]:
    def listed(counter: Counter[tuple[str, str, str, str]]) -> dict[str, int]:
        return {":".join(cell): n for cell, n in sorted(counter.items())}

    return {
        "rows": tally.rows.total(),
        "differ": tally.differ.total(),
        "rows_by_cell": listed(tally.rows),
        "differ_by_cell": listed(tally.differ),
        "examples": tally.examples,
    }
