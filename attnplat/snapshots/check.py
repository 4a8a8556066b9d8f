"""Deciding many recorded cases, and counting where the outcome differs."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, cast

from attnplat.errors import ConfigError
from attnplat.snapshots.kind import Kind, Outcome, Row, platform_of
from attnplat.snapshots.tables import kind_of

Cell = tuple[str, str, str, str]
LONGEST_SHOWN = 400


@dataclass
class Tally:
    """Agreement per (table, platform, arch, profile), and the first rows that differ."""

    rows: Counter[Cell] = field(default_factory=Counter)
    differ: Counter[Cell] = field(default_factory=Counter)
    examples: list[dict[str, Any]] = field(default_factory=list)
    most_examples: int = 5

    def add(self, cell: Cell, row: Row, outcome: dict[str, Any], agrees: bool) -> None:
        """Count one row."""
        self.rows[cell] += 1
        if agrees:
            return
        self.differ[cell] += 1
        if len(self.examples) < self.most_examples:
            self.examples.append({"row": dict(row), "outcome": outcome})

    @property
    def agreed(self) -> bool:
        """Whether every row agreed."""
        return not self.differ


def read_cases(path: str | Path) -> Iterator[Row]:
    """The rows of a JSON-lines file, plain or gzip. Raises ConfigError naming file and line."""
    try:
        with _open(path, "rt") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _row(path, number, line)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"cases file {str(path)!r} cannot be read: {error}") from None


def decide(row: Row, rules: str) -> dict[str, Any]:
    """The row with attnplat's outcome in place of the recorded one."""
    return {**row, **outcome_of(kind_of(row), row, rules)}


def outcome_of(kind: Kind, row: Row, rules: str) -> Outcome:
    """What attnplat decides of a row. Raises ConfigError, showing the row, where it is no case."""
    try:
        kind.check(row)
        return kind.decide(row, platform_of(row, rules))
    except ConfigError as error:
        raise ConfigError(f"{error}, in the case {_shown(row)}") from None


def _shown(row: Row) -> str:
    text = json.dumps(row)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def check(rows: Iterable[Row], rules: str) -> Tally:
    """Decide every row and compare with its recorded outcome."""
    tally = Tally()
    for row in rows:
        kind = kind_of(row)
        outcome = outcome_of(kind, row, rules)
        cell = (kind.name, row["platform"], row["arch"], row["profile"])
        tally.add(cell, row, outcome, kind.agrees(outcome, row))
    return tally


def write_cases(path: str | Path, rows: Iterable[Row]) -> int:
    """Write rows as JSON lines (gzip when the name ends in .gz); how many were written."""
    count = 0
    try:
        with _open(path, "wt") as out:
            for row in rows:
                out.write(json.dumps(row) + "\n")
                count += 1
    except OSError as error:
        raise ConfigError(f"file {str(path)!r} cannot be written: {error.strerror}") from None
    return count


def _open(path: str | Path, mode: str) -> TextIO:
    opener: Any = gzip.open if str(path).endswith(".gz") else open
    return cast(TextIO, opener(path, mode, encoding="utf-8"))


def _row(path: str | Path, number: int, line: str) -> Row:
    where = f"cases file {str(path)!r}, line {number}"
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    missing = {"platform", "arch", "profile"} - set(row) if isinstance(row, dict) else {"object"}
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(sorted(missing))}")
    return cast(Row, row)
