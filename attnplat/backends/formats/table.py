"""The table of formats in docs/formats.md, from the registry. No torch here.

`python -m attnplat.backends.formats.table docs/formats.md` rewrites it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from attnplat.backends.formats.elements import element_name
from attnplat.backends.formats.facts import FORMATS, Format, ScalePlace, ScaleRule
from attnplat.errors import ConfigError

BEGIN, END = "<!-- table of formats: begin -->", "<!-- table of formats: end -->"
HEAD_SIZE, NUM_KV_HEADS, BLOCK_SIZE = 128, 8, 64

_COLUMNS = ("encoding", "one row", "elements", "scale", "where", "row bytes", "per token", "page")


def markdown() -> str:
    """The table, one line per format."""
    lines = [_COLUMNS, ("---",) * len(_COLUMNS), *(_cells(row) for row in FORMATS.values())]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def rewritten(text: str) -> str:
    """`text` with what is between the two marks replaced by the table. Raises ConfigError."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ConfigError(f"expected one {BEGIN!r} and one {END!r}")
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{markdown()}{END}{rest.split(END)[1]}"


def _cells(format: Format) -> tuple[str, ...]:
    size = format.size or HEAD_SIZE
    heads = 1 if format.one_head else NUM_KV_HEADS
    return (
        f"`{format.encoding.value}`",
        format.summary,
        _elements(format),
        _scale(format),
        format.scale.place.value if format.scale else "",
        str(format.row_bytes(size)),
        str(format.bytes_per_token(heads, size)),
        str(format.page_bytes(BLOCK_SIZE, heads, size)),
    )


def _elements(format: Format) -> str:
    words = element_name(format.element)
    if format.rest is not None:
        words += f", last {format.rest_size} {element_name(format.rest)}"
    return words


def _scale(format: Format) -> str:
    scale = format.scale
    if scale is None:
        return "none"
    if scale.place is ScalePlace.CALLER:
        return "float32 per tensor or head"
    per = "row" if scale.tile is None else str(scale.tile)
    words = f"{scale.dtype.value} per {per}"
    if scale.copies > 1:
        words += f", {scale.copies} copies"
    if scale.rule is ScaleRule.POWER_OF_TWO and scale.dtype.itemsize > 1:
        words += ", power of two"
    if scale.factor:
        words += ", times float32"
    return words


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(rewritten(path.read_text(encoding="utf-8")), encoding="utf-8")
