"""Cases: a stable id, a claim in one sentence, and checks that can contradict it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnplat.backends.formats.encodings import Encoding
from attnplat.config.layer import LayerConfig
from attnplat.testing.terrain import Terrain

if TYPE_CHECKING:
    from attnplat.testing.bench import Bench


class Failed(Exception):
    """A claim does not hold; the message says what was seen."""


class Refused(Exception):
    """The subject says at planning that it cannot run this; the message says why."""


@dataclass(frozen=True, eq=False)
class Check:
    """One way to contradict a claim.

    Attributes:
        configs: the layers it runs, with their stored formats; a subject that refuses one
            is not asked.
        run: does it; raises `Failed`.
        note: what it looks at, for messages.
    """

    configs: tuple[tuple[LayerConfig, Encoding | None], ...]
    run: Callable[[Bench], None]
    note: str = ""


Checks = Iterator[Check]
Builder = Callable[[Terrain], Checks]


@dataclass(frozen=True, eq=False)
class Case:
    """One claim of the suite.

    Attributes:
        id: stable name, `A1` to `O10` of the contract, `R1` ... for what must be bitwise.
        claim: what holds.
        build: its checks, or None: it cannot be asked of any implementation here.
        absent: why not, then.
        every_dtype: asked of every dtype even when there is little time.
        threaded: it runs on several CPU threads, after which a process must not be forked.
    """

    id: str
    claim: str
    build: Builder | None
    absent: str = ""
    every_dtype: bool = False
    threaded: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by its id: what builds its checks is code."""
        return _case_of, (self.id,)


def _case_of(name: str) -> Case:
    from attnplat.testing.cases import CASES

    return next(case for case in CASES if case.id == name)


class CaseList:
    """The cases of one kind, in order."""

    def __init__(self, kind: str, title: str) -> None:
        self.kind = kind
        self.title = title
        self.cases: list[Case] = []

    def case(
        self, number: int, claim: str, *, every_dtype: bool = False, threaded: bool = False
    ) -> Callable[[Builder], Builder]:
        """Decorates the function that builds the checks of case `number`."""

        def add(build: Builder) -> Builder:
            name = f"{self.kind}{number}"
            self._add(Case(name, claim, build, every_dtype=every_dtype, threaded=threaded))
            return build

        return add

    def absent(self, number: int, claim: str, because: str) -> None:
        """A case that no implementation of this operation can be asked, and why."""
        self._add(Case(f"{self.kind}{number}", claim, None, absent=because))

    def _add(self, case: Case) -> None:
        if any(case.id == other.id for other in self.cases):
            raise ValueError(f"case {case.id} is there twice")
        self.cases.append(case)


def by_number(cases: Sequence[Case]) -> tuple[Case, ...]:
    """Cases of one kind in the order of their numbers."""
    return tuple(sorted(cases, key=lambda case: int(case.id[1:])))
