"""The kinds of recorded table: how a row is told, decided and compared.

Each kind is a `Kind` value. `decide` answers the outcome fields of a row under a rule set;
`compared` names those that a check compares. Everything else of a row is passed through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from attnplat.errors import UnknownNameError
from attnplat.platforms.rules import platform_under
from attnplat.snapshots.codes import codes_of
from attnplat.snapshots.layers import case_of

Row = Mapping[str, Any]
Outcome = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """One kind of table.

    Attributes:
        name: the table's name.
        recognises: whether a row is of this kind.
        decide: (row, rules) -> the outcome fields.
        compared: (outcome or row) -> the values that must agree.
    """

    name: str
    recognises: Callable[[Row], bool]
    decide: Callable[[Row, str], Outcome]
    compared: Callable[[Row], Any]


def kind_of(row: Row) -> Kind:
    """The kind of table a row belongs to. Raises UnknownNameError when it is none."""
    for kind in KINDS:
        if kind.recognises(row):
            return kind
    shape = ", ".join(sorted(row)[:6])
    raise UnknownNameError("case with fields", shape, [k.name for k in KINDS])


def refused(row: Row) -> bool:
    """Whether an outcome is a refusal."""
    return row.get("error") is not None


# Selection --------------------------------------------------------------------------------


def _decide_selection(row: Row, rules: str) -> Outcome:
    case = case_of(row)
    platform = platform_under(rules, row["platform"], row["arch"], row["profile"])
    selection = platform.select(case.config, case.wishes, run=case.run)
    asked = selection.requested is not None
    rejected = {name: sorted(codes_of(rs)) for name, rs in selection.rejections.items()}
    return {
        "selected": selection.chosen.name if selection.chosen else None,
        "priority_list": [] if asked else list(selection.candidates),
        "valid": [] if asked else [b.name for b in selection.accepted],
        "rejected": rejected,
        "error": None if selection.ok else _error(asked),
    }


def _error(asked: bool) -> str:
    return "requested_backend_invalid" if asked else "no_valid_backend"


def _compare_selection(row: Row) -> Any:
    # An exception in the recorded engine left no reasons to compare.
    silent = str(row.get("error")).startswith("exception:")
    rejected = {} if silent else {n: frozenset(c) for n, c in row["rejected"].items()}
    return row["selected"], list(row["valid"]), rejected, refused(row)


def _compare_choice(row: Row) -> Any:
    return row["selected"], refused(row)


KINDS: tuple[Kind, ...] = (
    Kind("selection", lambda row: "config" in row, _decide_selection, _compare_selection),
)
