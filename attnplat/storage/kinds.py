"""What is kept in the cache folder: one subfolder a kind."""

from __future__ import annotations

from typing import NamedTuple


class Kind(NamedTuple):
    """A kind of entry: what it is, and the number of its form.

    A release that reads or writes entries otherwise counts `form` up: all are made anew.
    """

    what: str
    form: int = 1


KINDS: dict[str, Kind] = {
    "models": Kind("weights converted from GGUF"),
    "probes": Kind("what optional packages answered when they were tried"),
    "plugins": Kind("what plugins answered when they were tried"),
}
