"""Recorded decisions of another engine, decided again under its rule set.

Every row is decided once. Then each declared difference is left out in turn: some row, or some
answer of a recorded class, must come out otherwise, or the difference says nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from attnplat.config.names import Operation
from attnplat.platforms import PLATFORMS, tables_for
from attnplat.platforms.differences import Difference
from attnplat.platforms.platform import Platform
from attnplat.platforms.rules import differences_of, platform_under, under
from attnplat.snapshots.check import read_cases
from attnplat.snapshots.kind import Kind, platform_of
from attnplat.snapshots.tables import KINDS, kind_of
from tests.unit.recorded_classes import questions

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
THEIRS = "vllm-0.33"
LEAST_AGREEMENT = 0.999
# Operation -> the tables about it that do not say which backends were refused.
UNTOLD = {
    Operation.MLA_PREFILL: ("prefill",),
    Operation.STATE: ("mamba",),
    Operation.INDEXER: ("indexer", "minimax"),
    Operation.BLOCK_SPARSE: ("minimax",),
}
# A difference of these subjects may show in a row that does not name its backend.
SUBJECTS_OF_ALL = ("exists", "order", "accepts")


@dataclass(frozen=True, eq=False)
class Decided:
    """A recorded row, and what attnplat decides under the same rules."""

    kind: Kind
    row: dict[str, Any]
    outcome: dict[str, Any]
    agrees: bool

    @property
    def cell(self) -> str:
        row = self.row
        return f"{self.kind.name}:{row['platform']}:{row['arch']}:{row['profile']}"

    @property
    def names(self) -> frozenset[str]:
        """Every backend that the row or the outcome names."""
        found = {self.row.get("requested"), self.outcome.get("selected")}
        found |= {self.outcome.get("backend"), *self.outcome.get("valid", ())}
        return frozenset(found | set(self.outcome.get("rejected", ())))

    def comes_out_otherwise(self, platform: Platform) -> bool:
        """Whether a platform's decision differs from the recorded one."""
        return not self.kind.agrees(self.kind.decide(self.row, platform), self.row)


@cache
def decided() -> tuple[Decided, ...]:
    return tuple(_decide_all())


def _decide_all() -> Iterator[Decided]:
    for path in sorted(GOLDEN.glob("*.jsonl.gz")):
        for row in read_cases(path):
            kind = kind_of(row)
            outcome = kind.decide(row, platform_of(row, THEIRS))
            yield Decided(kind, dict(row), outcome, kind.agrees(outcome, row))


@cache
def mixed() -> tuple[Decided, ...]:
    """All rows, those of different sorts in turn: what a difference changes is found soon."""
    tables: defaultdict[str, defaultdict[tuple[Any, ...], list[Decided]]]
    tables = defaultdict(lambda: defaultdict(list))
    for case in decided():
        row = case.row
        sort = (row["platform"], row.get("rule"), row.get("tag"), row.get("requested"))
        tables[case.kind.name][sort].append(case)
    return tuple(_in_turn(_in_turn(sorts.values()) for sorts in tables.values()))


def _in_turn(groups: Iterable[Iterable[Decided]]) -> Iterator[Decided]:
    for turn in zip_longest(*groups):
        yield from (case for case in turn if case is not None)


@cache
def by_name() -> dict[str, list[Decided]]:
    """Backend -> the rows that name it, those that ask for it first."""
    found: defaultdict[str, list[Decided]] = defaultdict(list)
    for case in sorted(mixed(), key=lambda case: case.row.get("requested") is None):
        for name in case.names:
            found[name].append(case)
    return found


def test_every_kind_of_table_is_there():
    assert {case.kind.name for case in decided()} == {kind.name for kind in KINDS}


def test_each_table_agrees_on_each_device_and_profile():
    rows = Counter(case.cell for case in decided())
    agree = Counter(case.cell for case in decided() if case.agrees)
    assert len({cell.split(":", 1)[1] for cell in rows}) == 49
    below = {
        cell: f"{agree[cell]} of {n}"
        for cell, n in rows.items()
        if agree[cell] < n * LEAST_AGREEMENT
    }
    assert not below


def test_explicit_requests_agree_without_exception():
    asked = [case for case in decided() if case.row.get("requested") is not None]
    assert len(asked) > 10_000
    assert [case.row for case in asked if not case.agrees] == []


DIFFERENCES = [(platform, d) for platform in PLATFORMS for d in differences_of(platform)]


def _label(platform: str, difference: Difference) -> str:
    theirs = difference.theirs
    named = f"[{theirs.__name__}]" if callable(theirs) and hasattr(theirs, "__name__") else ""
    operation = f"({difference.operation})" if difference.operation else ""
    return (
        f"{platform}:{'+'.join(difference.backends) or '*'}{operation}:{difference.subject}{named}"
    )


def _rows_to_ask(platform: str, difference: Difference) -> list[Decided]:
    """The rows that may come out otherwise, the likeliest first."""
    if difference.subject.partition(".")[0] in SUBJECTS_OF_ALL:
        return [case for case in mixed() if case.row["platform"] == platform]
    named = [case for name in difference.backends for case in by_name()[name]]
    serving = frozenset().union(*(operations_of()[name] for name in difference.backends))
    tables = {table for operation in serving for table in UNTOLD.get(operation, ())}
    return named + [case for case in mixed() if case.kind.name in tables]


@cache
def operations_of() -> dict[str, frozenset[Operation]]:
    """Backend -> every operation that some platform declares it for."""
    found: defaultdict[str, frozenset[Operation]] = defaultdict(frozenset)
    for platform in PLATFORMS:
        for backend in tables_for(platform).catalog:
            found[backend.name] |= backend.serves
    return found


@pytest.mark.parametrize(
    ("platform", "difference"), DIFFERENCES, ids=[_label(p, d) for p, d in DIFFERENCES]
)
def test_leaving_out_a_difference_changes_a_decision(platform, difference):
    without: dict[tuple[str, str, str], Platform] = {}

    def platform_without(*device: str) -> Platform:
        if device not in without:
            ours = platform_under("attnplat", *device)
            without[device] = under(THEIRS, ours, without=difference)
        return without[device]

    for case in _rows_to_ask(platform, difference):
        row = case.row
        device = (row["platform"], row["arch"], row["profile"])
        if case.agrees and case.comes_out_otherwise(platform_without(*device)):
            return
    for question in questions():
        named = question.row["requested"] in difference.backends
        if named and not question.agrees(platform_without(*question.device)):
            return
    pytest.fail("no recorded decision depends on it: it is dead, or says what another one says")


def test_a_difference_says_what_attnplat_does_and_why():
    for _, difference in DIFFERENCES:
        assert difference.ours and difference.because
        assert difference.source.startswith("vLLM 0.33")
