"""The table of ordinary selections: what fits, in order, and why the rest does not."""

from __future__ import annotations

from attnplat.config.layer import MlaConfig
from attnplat.platforms.platform import Platform
from attnplat.platforms.selection import Selection
from attnplat.snapshots.codes import NO_CLASS, codes_of
from attnplat.snapshots.fields import DEVICE, OBJECT, TEXT, check_fields, optional
from attnplat.snapshots.kind import (
    RECORDED_ONLY,
    Kind,
    Outcome,
    Row,
    ask,
    chosen_name,
    error_of,
    refused,
)
from attnplat.snapshots.layers import CONTEXT_FIELDS, LAYER_FIELDS, Case, case_of

# A request at which the recorded engine itself fails, where its class can be imported: it
# reads the model's latent sizes before it asks whether the layer is latent.
_RAISES, _RAISED = "FLASHINFER_MLA_SPARSE", "exception:AttributeError"


def decide_selection(row: Row, platform: Platform) -> Outcome:
    """The outcome fields of an ordinary selection."""
    case, requested = case_of(row), row["requested"]
    selection = ask(platform, case.config, case.run, **case.wishes)
    listed = selection if selection is not None and selection.requested is None else None
    rejected = _rejected(selection, requested)
    error = error_of(selection, requested)
    if platform.tables.accepts and _raises(case, rejected):
        rejected, error = {_RAISES: [_RAISED]}, _RAISED
    return {
        "selected": chosen_name(selection),
        "priority_list": list(listed.candidates) if listed else [],
        "valid": [b.name for b in listed.accepted] if listed else [],
        "rejected": rejected,
        "error": error,
    }


def _raises(case: Case, rejected: dict[str, list[str]]) -> bool:
    known = case.run.model_head_size is not None and not isinstance(case.config, MlaConfig)
    return known and "non_mla" in rejected.get(_RAISES, ())


def _rejected(selection: Selection | None, requested: str | None) -> dict[str, list[str]]:
    if selection is None:
        return {str(requested): [RECORDED_ONLY.get(str(requested), NO_CLASS)]}
    return {name: sorted(codes_of(rs)) for name, rs in selection.rejections.items()}


def agree_on_selection(outcome: Outcome, recorded: Row) -> bool:
    """Whether choice, order, reasons and refusal are the same."""
    # An exception in the recorded engine left no reasons to compare.
    silent = str(recorded.get("error")).startswith("exception:")
    reasons = [
        {name: frozenset(codes) for name, codes in row["rejected"].items()}
        for row in (outcome, recorded)
    ]
    return (
        outcome["selected"] == recorded["selected"]
        and list(outcome["valid"]) == list(recorded["valid"])
        and (silent or reasons[0] == reasons[1])
        and refused(outcome) == refused(recorded)
    )


def check_selection(row: Row) -> None:
    """Raise ConfigError unless the row describes a layer and what is known of its model."""
    wanted = {**DEVICE, "config": OBJECT, "requested": optional(TEXT)}
    check_fields(row, wanted, "a case")
    check_fields(row["config"], LAYER_FIELDS, "the config of a case")
    given = {"context": optional(OBJECT)}
    check_fields(row, given, "a case", required=False)
    context = row.get("context") or {}
    check_fields(context, CONTEXT_FIELDS, "the context of a case", required=False)


SELECTION = Kind(
    "selection",
    lambda row: "config" in row,
    decide_selection,
    agree_on_selection,
    check_selection,
)
