"""Running the suite over a subject, and the report of it."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from attnplat.backends.formats.encodings import Encoding
from attnplat.backends.interface import AttentionImpl
from attnplat.config.layer import LayerConfig
from attnplat.errors import UnknownNameError
from attnplat.testing.bench import Bench, threads
from attnplat.testing.case import Case, Check, Failed, Refused
from attnplat.testing.cases import CASES
from attnplat.testing.compare import CONTRACT, Gap
from attnplat.testing.scenes import stored_encoding
from attnplat.testing.subject import Subject, subject_of
from attnplat.testing.terrain import Level, Terrain, terrains


class Status(StrEnum):
    """What became of one case."""

    PASSED = "passed"
    FAILED = "failed"
    REFUSED = "refused"
    ABSENT = "not applicable"


@dataclass(frozen=True, kw_only=True)
class Result:
    """One case on one subject.

    Attributes:
        case: what was asked.
        status: what became of it.
        reason: why it failed, was refused or is not applicable; also which part of a passed
            case was refused. Empty otherwise.
        checks, refused: how many checks ran, and how many the subject refused.
        shown: (operation, feature, dtype or stored format) of the layers that ran right.
        seconds: how long it took.
    """

    case: Case
    status: Status
    reason: str = ""
    checks: int = 0
    refused: int = 0
    shown: frozenset[tuple[str, str]] = frozenset()
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Report:
    """The suite on one subject.

    Attributes:
        subject: what was under test.
        level, seed: how it was asked.
        results: one a case, in order.
        gaps: the worst error of each tolerance class, over all that passed.
        seconds: how long it took.
    """

    subject: Subject
    level: Level
    seed: int
    results: tuple[Result, ...]
    gaps: dict[str, Gap]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether something ran and nothing failed."""
        return bool(self.of(Status.PASSED)) and not self.of(Status.FAILED)

    def of(self, status: Status) -> list[str]:
        """Ids of the cases with this status."""
        return [r.case.id for r in self.results if r.status == status]

    def shown(self) -> dict[str, list[str]]:
        """Operation -> features, dtypes and stored formats with which it was seen to be right.

        Without the cases about errors, whose layers are not run.
        """
        found = {pair for r in self.results if r.case.id[0] != "N" for pair in r.shown}
        return {
            operation: sorted(name for own, name in found if own == operation)
            for operation in sorted({own for own, _ in found})
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        reasons = {
            str(status): {r.case.id: r.reason for r in self.results if r.status == status}
            for status in (Status.FAILED, Status.REFUSED, Status.ABSENT)
        }
        partly = {r.case.id: r.reason for r in self.results if r.status == "passed" and r.reason}
        return {
            "backend": self.subject.name,
            "device": str(self.subject.device),
            "level": self.level,
            "seed": self.seed,
            "passed": self.of(Status.PASSED),
            "partly refused": partly,
            **reasons,
            "checks": sum(r.checks for r in self.results),
            "shown": self.shown(),
            "errors": {
                name: {
                    "out": worst.out,
                    "out allowed": CONTRACT[name].out,
                    "lse": worst.lse,
                    "lse allowed": CONTRACT[name].lse,
                }
                for name, worst in sorted(self.gaps.items())
            },
            "seconds": round(self.seconds, 1),
        }


class Suite:
    """The cases' checks on each terrain, built once and run on any number of subjects."""

    def __init__(self) -> None:
        self._built: dict[tuple[str, Terrain], list[Check]] = {}

    def checks(self, case: Case, terrain: Terrain) -> list[Check]:
        """The checks of one case on one terrain."""
        key = (case.id, terrain)
        if key not in self._built:
            assert case.build is not None
            self._built[key] = list(case.build(terrain))
        return self._built[key]

    def run_case(
        self,
        case: Case,
        bench: Bench,
        grounds: Sequence[Terrain],
    ) -> Result:
        """One case on the subject of `bench`."""
        if case.build is None:
            return Result(case=case, status=Status.ABSENT, reason=case.absent)
        started = time.perf_counter()
        ran, reasons, shown = 0, [], set()
        for check in self._asked(case, grounds):
            if (why := _refusal(bench.subject, check)) is not None:
                reasons.append(why)
                continue
            try:
                wrong = run_check(check, bench)
            except Refused as refusal:
                reasons.append(str(refusal))
                continue
            ran += 1
            if wrong is not None:
                seconds = time.perf_counter() - started
                reason = f"{wrong}\n  in: {check.note}"
                return Result(
                    case=case, status=Status.FAILED, reason=reason, checks=ran, seconds=seconds
                )
            shown |= {pair for layer in check.configs for pair in _traits(*layer)}
        return _passed(case, bench, ran, reasons, shown, time.perf_counter() - started)

    def _asked(self, case: Case, grounds: Sequence[Terrain]) -> Iterator[Check]:
        every = case.every_dtype or grounds[0].full
        for terrain in grounds if every else grounds[:1]:
            yield from self.checks(case, terrain)


def _passed(
    case: Case,
    bench: Bench,
    ran: int,
    reasons: Sequence[str],
    shown: set[tuple[str, str]],
    seconds: float,
) -> Result:
    told = "; ".join(dict.fromkeys(reasons))
    status = Status.PASSED if ran else Status.REFUSED if reasons else Status.ABSENT
    if status == Status.ABSENT:
        told = f"nothing to ask on {bench.device.type}"
    return Result(
        case=case,
        status=status,
        reason=told,
        checks=ran,
        refused=len(reasons),
        shown=frozenset(shown),
        seconds=seconds,
    )


def _traits(config: LayerConfig, encoding: Encoding | None) -> set[tuple[str, str]]:
    """What a layer has that a backend may lack, by its operation."""
    stored = stored_encoding(config, encoding)
    names = {str(config.dtype), stored.value, *map(str, config.needs)}
    return {(str(config.operation), name) for name in names}


def _refusal(subject: Subject, check: Check) -> str | None:
    for config, encoding in check.configs:
        if (why := subject.refusal(config, encoding)) is not None:
            return why
    return None


def run_check(check: Check, bench: Bench) -> str | None:
    """What contradicts the check's claim, or None. Raises `Refused`."""
    try:
        check.run(bench)
    except Refused:
        raise
    except Failed as failure:
        return str(failure)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({last.name}, line {last.lineno})"
    return None


def run_conformance(
    what: str | type[AttentionImpl] | Subject,
    device: str = "cpu",
    level: Level = "quick",
    *,
    ids: Iterable[str] | None = None,
    seed: int = 0,
    suite: Suite | None = None,
    progress: Callable[[Result], None] | None = None,
) -> Report:
    """Ask a backend everything that it claims to run.

    Args:
        what: a backend's name, `module:Class`, an implementation's class, or a subject.
        device: a device of this machine: `cpu`, `cuda`, `cuda:1`.
        level: `quick` (a minute) or `full` (every dtype, more sizes and lengths).
        ids: only these cases.
        seed: of all random numbers; the same seed asks the same questions.
        suite: one that has built its checks already.
        progress: told of each result.

    Raises:
        UnknownNameError: no such backend or case.
        ConfigError: nothing to check.
    """
    subject = what if isinstance(what, Subject) else subject_of(what, device)
    suite, bench = suite or Suite(), Bench(subject)
    grounds = terrains(subject, level, seed)
    started, results = time.perf_counter(), []
    # Scenes are small: threads would only wait for each other. Cases about them set their own.
    with threads(1):
        for case in chosen(ids):
            result = suite.run_case(case, bench, grounds)
            results.append(result)
            if progress is not None:
                progress(result)
    return Report(
        subject=subject,
        level=level,
        seed=seed,
        results=tuple(results),
        gaps=bench.gaps,
        seconds=time.perf_counter() - started,
    )


class Answers(NamedTuple):
    """What a report has beside its subject, parts of which are code: it goes between processes."""

    results: tuple[Result, ...]
    gaps: dict[str, Gap]
    seconds: float


def joined(subject: Subject, level: Level, seed: int, parts: Sequence[Answers]) -> Report:
    """The report of all cases, from answers to shares of them."""
    gaps: dict[str, Gap] = {}
    for part in parts:
        for name, gap in part.gaps.items():
            gaps[name] = gap.worse(gaps.get(name, Gap()))
    order = {case.id: n for n, case in enumerate(CASES)}
    results = [result for part in parts for result in part.results]
    return Report(
        subject=subject,
        level=level,
        seed=seed,
        results=tuple(sorted(results, key=lambda result: order[result.case.id])),
        gaps=gaps,
        seconds=max(part.seconds for part in parts),
    )


def chosen(ids: Iterable[str] | None) -> tuple[Case, ...]:
    """The cases with these ids (`C5`), or of these kinds (`C`), in any case; all for None.

    Raises UnknownNameError.
    """
    if ids is None:
        return CASES
    wanted = [one.strip().upper() for one in ids]
    known = {case.id for case in CASES} | {case.id[0] for case in CASES}
    for one in wanted:
        if one not in known:
            count = Counter(case.id[0] for case in CASES)
            raise UnknownNameError(
                "case", one, [f"{kind}1 to {kind}{n}" for kind, n in count.items()]
            )
    return tuple(case for case in CASES if case.id in wanted or case.id[0] in wanted)
