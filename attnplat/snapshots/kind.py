"""What a kind of recorded table is, and how its rows ask for a decision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from attnplat.config.attention import AttentionConfig
from attnplat.config.frozen import FrozenMap
from attnplat.config.layer import LayerConfig
from attnplat.config.run import RunContext
from attnplat.errors import ConfigError
from attnplat.platforms.platform import Platform
from attnplat.platforms.rules import platform_under
from attnplat.platforms.selection import Selection
from attnplat.snapshots.codes import NO_CLASS
from attnplat.snapshots.fields import DEVICE, Fields, check_fields

Row = Mapping[str, Any]
Outcome = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """One kind of table.

    Attributes:
        name: the table's name.
        recognises: whether a row is of this kind.
        decide: (row, the platform of the row under a rule set) -> the outcome fields.
        agrees: (outcome, recorded row) -> whether the compared fields are the same.
        check: raises ConfigError unless a row holds what a decision about it needs.
    """

    name: str
    recognises: Callable[[Row], bool]
    decide: Callable[[Row, Platform], Outcome]
    agrees: Callable[[Outcome, Row], bool]
    check: Callable[[Row], None]


def with_fields(fields: Fields) -> Callable[[Row], None]:
    """The check that a row names its device and holds these fields."""
    return partial(check_fields, wanted={**DEVICE, **fields}, what="a case")


# Names that the recorded engine has and attnplat has no backend for, and the code that it
# records when one is asked for.
RECORDED_ONLY = {"CUSTOM": NO_CLASS, "NO_ATTENTION": "import_error"}


def platform_of(row: Row, rules: str) -> Platform:
    """The simulated device of a row, with its packages, deciding by a rule set."""
    return platform_under(rules, row["platform"], row["arch"], row["profile"])


def ask(
    platform: Platform, config: LayerConfig, run: RunContext | None = None, **wishes: Any
) -> Selection | None:
    """Select for `config`; None where the wishes name nothing that the rule set has.

    A name outside attnplat's vocabulary is left out where the rule set ignores requests.
    """
    for name in ("backend", "mla_prefill_backend"):
        if wishes.get(name) in RECORDED_ONLY:
            if not platform.tables.allows("request_ignored", config, platform.world(run=run)):
                return None
            wishes[name] = None
    given = [(k, FrozenMap(v) if isinstance(v, dict) else v) for k, v in wishes.items()]
    try:
        return platform.select(config, _attention(tuple(given)), run=run)
    except ConfigError:
        return None


@lru_cache(maxsize=1024)
def _attention(wishes: tuple[tuple[str, Any], ...]) -> AttentionConfig:
    return AttentionConfig(**dict(wishes))


def refused(row: Row) -> bool:
    """Whether an outcome is a refusal."""
    return row.get("error") is not None


def error_of(selection: Selection | None, requested: str | None) -> str | None:
    """The recorded code of a refusal, None where a backend was chosen."""
    if selection is not None and selection.ok:
        return None
    if selection is None or _is_absent(selection):
        return "requested_backend_has_no_class"
    asked = requested is not None and selection.replaced is None
    return "requested_backend_invalid" if asked else "no_valid_backend"


def _is_absent(selection: Selection) -> bool:
    return any(r.kind == "absent" for reasons in selection.rejections.values() for r in reasons)


def chosen_name(selection: Selection | None) -> str | None:
    """The name of the chosen backend, or None."""
    chosen = selection.chosen if selection is not None else None
    return chosen.name if chosen is not None else None


def agree_on_choice(outcome: Outcome, recorded: Row) -> bool:
    """Whether two outcomes refuse together or select the same."""
    if refused(outcome) or refused(recorded):
        return refused(outcome) and refused(recorded)
    return bool(outcome["selected"] == recorded["selected"])
