"""Planted bugs: implementations and library functions that are wrong in one known way."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from attnplat.backends.indexer import IndexerImpl
from attnplat.backends.interface import AttentionImpl
from attnplat.backends.portable.reference_indexer import ReferenceIndexerImpl
from attnplat.testing.mutations.specimen import Specimen
from attnplat.testing.subject import Library, Subject


@dataclass(frozen=True)
class Bug:
    """One planted bug.

    Attributes:
        name: stable, in the words of its class or function.
        what: what is wrong, in one sentence.
        kinds: the kinds of cases that are most likely to fail.
        plant: makes a healthy subject wrong.
    """

    name: str
    what: str
    kinds: str
    plant: Callable[[Subject], Subject]


class BugList:
    """The bugs of one kind, and the kinds of cases that are about such."""

    def __init__(self, kinds: str) -> None:
        self.kinds = kinds
        self.bugs: list[Bug] = []

    def impl(self, wrong: type[AttentionImpl]) -> type[AttentionImpl]:
        """Decorates an implementation that is wrong; its docstring says how."""

        def plant(subject: Subject) -> Subject:
            return subject.replace(name=wrong.__name__, impl=wrong)

        self._add(_words(wrong), wrong.__doc__, plant)
        return wrong

    def indexer(self, wrong: type[IndexerImpl]) -> type[IndexerImpl]:
        """Decorates an indexer that is wrong; its docstring says how."""

        def plant(subject: Subject) -> Subject:
            return subject.replace(name=wrong.__name__, indexer=wrong)

        self._add(_words(wrong), wrong.__doc__, plant)
        return wrong

    def library(self, wrong: Callable[[Library], Library]) -> Callable[[Library], Library]:
        """Decorates a function that makes a library wrong; its docstring says how."""

        def plant(subject: Subject) -> Subject:
            return subject.replace(name=wrong.__name__, library=wrong(subject.library))

        self._add(wrong.__name__.replace("_", " "), wrong.__doc__, plant)
        return wrong

    def _add(self, name: str, what: str | None, plant: Callable[[Subject], Subject]) -> None:
        if not what:
            raise ValueError(f"bug {name!r} does not say what is wrong")
        self.bugs.append(Bug(name, what.split("\n")[0], self.kinds, plant))


def _words(kind: type) -> str:
    """`WindowLeftWide` as `window left wide`, numbers whole."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[a-z])(?=[0-9])", " ", kind.__name__).lower()


def healthy(subject: Subject) -> Subject:
    """The subject that bugs are planted in: the specimen, in the subject's place."""
    return replace(
        subject,
        name=Specimen.name,
        impl=Specimen,
        indexer=ReferenceIndexerImpl,
        declared=(),
        library=Library(),
    )
