"""Recorded reason codes of a Rejection."""

from __future__ import annotations

from collections.abc import Iterable

from attnplat.backends.backend import Rejection
from attnplat.config.names import Feature, Operation

_FEATURE_CODES = {
    Feature.SINKS.value: "sink",
    Feature.NON_CAUSAL_DCP.value: "non_causal_mla_dcp",
}
# Rules that the recorded schema counts among the plain checks.
_PLAIN_RULES = frozenset({"layout_vs_turboquant", "layout_vs_ultraquant", "non_causal_fp16_mla"})
_MLA = frozenset({Operation.MLA.value, Operation.SPARSE_MLA.value})
_SPARSE = frozenset({Operation.SPARSE_MLA.value, Operation.BLOCK_SPARSE.value})


def codes_of(reasons: Iterable[Rejection]) -> frozenset[str]:
    """The set of recorded codes that `reasons` amount to.

    A backend that cannot be imported gives that one code: nothing else of it was asked.
    """
    reasons = tuple(reasons)
    if any(reason.kind == "package" for reason in reasons):
        return frozenset({"import_error"})
    return frozenset(code for reason in reasons for code in _codes(reason))


def _codes(reason: Rejection) -> tuple[str, ...]:
    match reason.kind:
        case "operation":
            return _operation_codes(str(reason.got), frozenset(reason.takes.split(", ")))
        case "device":
            return ("compute_capability",)
        case "rule":
            plain = reason.subject in _PLAIN_RULES
            return (reason.subject if plain else f"combo:{reason.subject}",)
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
