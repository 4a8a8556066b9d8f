"""Tables for people: plain aligned text, or rich's where standard output is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence


def print_table(
    rows: Iterable[Sequence[object]], headers: Sequence[str] = (), title: str | None = None
) -> None:
    """Print `rows` under `headers`; None is an empty cell.

    Raises ValueError where a row has not as many cells as the others or the headers.
    """
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    width = len(headers) if headers else len(cells[0]) if cells else 0
    for row in cells:
        if len(row) != width:
            raise ValueError(f"a row of {len(row)} cells in a table of {width} columns: {row}")
    if not (sys.stdout.isatty() and _print_rich(cells, headers, title)):
        print(plain_table(cells, headers, title))


def plain_table(
    cells: Sequence[Sequence[str]], headers: Sequence[str] = (), title: str | None = None
) -> str:
    """The table as text: columns padded to their widest cell, two spaces apart."""
    lines = [list(headers), *map(list, cells)] if headers else [list(row) for row in cells]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if headers:
        lines.insert(1, ["-" * width for width in widths])
    rows = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join([title, *rows] if title else rows)


def _print_rich(cells: Sequence[Sequence[str]], headers: Sequence[str], title: str | None) -> bool:
    """Whether rich was there to print the table."""
    try:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    # Text, not str: rich reads square brackets in a str as markup and drops them.
    table = Table(
        title=Text(title) if title else None,
        title_justify="left",
        box=SIMPLE_HEAD,
        show_header=bool(headers),
        pad_edge=False,
    )
    for column in range(len(headers) if headers else len(cells[0]) if cells else 0):
        # A name that is cut in two cannot be copied, so the first column keeps its width.
        table.add_column(
            Text(headers[column]) if headers else "", overflow="fold", no_wrap=column == 0
        )
    for row in cells:
        table.add_row(*map(Text, row))
    Console().print(table)
    return True
