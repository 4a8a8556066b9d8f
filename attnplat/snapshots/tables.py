"""The kinds of recorded table: how the kind of a row is told.

Each kind is a `Kind` value. `decide` answers the outcome fields of a row on a platform;
`agrees` compares those that a check compares. Everything else of a row is passed through.
"""

from __future__ import annotations

from attnplat.errors import UnknownNameError
from attnplat.snapshots.kind import Kind, Row
from attnplat.snapshots.kinds import KINDS as LAYER_KINDS
from attnplat.snapshots.models import DEEPSEEK_V4, DIFFKV, MINIMAX
from attnplat.snapshots.parts import INDEXER, PREFILL, STATE, VISION
from attnplat.snapshots.selection import SELECTION

KINDS: tuple[Kind, ...] = (
    SELECTION,
    PREFILL,
    VISION,
    STATE,
    INDEXER,
    MINIMAX,
    DEEPSEEK_V4,
    DIFFKV,
    LAYER_KINDS,
)


def kind_of(row: Row) -> Kind:
    """The kind of table a row belongs to. Raises UnknownNameError when it is none."""
    for kind in KINDS:
        if kind.recognises(row):
            return kind
    shape = ", ".join(sorted(row)[:6])
    raise UnknownNameError("case with fields", shape, [k.name for k in KINDS])
