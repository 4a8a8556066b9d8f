"""Recorded reason codes of a Rejection."""

from __future__ import annotations

from collections.abc import Iterable

from attnplat.backends.backend import Rejection
from attnplat.config.names import Feature, Operation
from attnplat.snapshots.combinations import first_combination, is_recorded_as_combination

_FEATURE_CODES = {
    Feature.SINKS.value: "sink",
    Feature.NON_CAUSAL_DCP.value: "non_causal_mla_dcp",
}
# The code of a request for a name that has no class there.
NO_CLASS = "exception:ValueError"
# Rules that the recorded schema counts among the plain checks.
_PLAIN_RULES = frozenset({"layout_vs_turboquant", "layout_vs_ultraquant", "non_causal_fp16_mla"})
# Fields that the recorded schema has a plain check of.
_PLAIN_FIELDS = frozenset({"head_size", "dtype", "kv_cache_dtype", "block_size", "attn_type"})
_MLA = frozenset({Operation.MLA.value, Operation.SPARSE_MLA.value})
_SPARSE = frozenset({Operation.SPARSE_MLA.value, Operation.BLOCK_SPARSE.value})


def codes_of(reasons: Iterable[Rejection]) -> frozenset[str]:
    """The set of recorded codes that `reasons` amount to.

    A backend that cannot be imported gives that one code: nothing else of it was asked.
    """
    reasons = tuple(reasons)
    if any(r.kind == "package" and not is_recorded_as_combination(r) for r in reasons):
        return frozenset({"import_error"})
    combination = first_combination(reasons, _PLAIN_RULES)
    codes = {code for reason in reasons for code in _codes(reason)}
    return frozenset(codes if combination is None else codes | {combination})


def _codes(reason: Rejection) -> tuple[str, ...]:
    match reason.kind:
        case "package":
            return ()
        case "field":
            only_combined = reason.subject not in _PLAIN_FIELDS
            return () if only_combined and is_recorded_as_combination(reason) else (reason.subject,)
        case "operation":
            return _operation_codes(str(reason.got), frozenset(str(reason.takes).split(", ")))
        case "absent":
            return (NO_CLASS,)
        case "device":
            return ("compute_capability",)
        case "rule":
            return (reason.subject,) if reason.subject in _PLAIN_RULES else ()
        case "feature":
            return (_FEATURE_CODES.get(reason.subject, reason.subject),)
        case _:
            return (reason.subject,)


def _operation_codes(wanted: str, serves: frozenset[str]) -> tuple[str, ...]:
    codes = []
    for family, yes, no in ((_MLA, "mla", "non_mla"), (_SPARSE, "sparse", "non_sparse")):
        wants, takes = wanted in family, bool(serves & family)
        if wants != takes:
            codes.append(yes if wants else no)
    return tuple(codes)
