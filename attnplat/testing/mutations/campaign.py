"""The campaign: every planted bug and every mutant, and what the suite makes of them."""

from __future__ import annotations

import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnplat.errors import ConfigError
from attnplat.testing.case import Case
from attnplat.testing.cases import CASES
from attnplat.testing.mutations.bug import Bug, healthy
from attnplat.testing.mutations.copies import MUTATED, planted, source_of
from attnplat.testing.mutations.equivalent import COSTS, EQUIVALENT
from attnplat.testing.mutations.hunt import Hunt, Plant, Prey, Trial
from attnplat.testing.mutations.infection import Infection, Spread
from attnplat.testing.mutations.mutants import Mutant, mutants
from attnplat.testing.mutations.planted import PLANTED
from attnplat.testing.runner import Suite
from attnplat.testing.subject import Subject, subject_of
from attnplat.testing.terrain import Level, Terrain, terrains

KILLS = Path(__file__).with_name("kills.json")
"""Which cases each bug failed, and one case that each mutant failed, in the last full run."""

BATCH = 12
"""Wrong subjects that share a process when each is asked one case."""

SAMPLED = 9
"""One in so many mutants is made when there is little time."""

ASKED = tuple(case for case in CASES if case.build is not None)


@dataclass(frozen=True, kw_only=True)
class Kills:
    """What a full run has found.

    Attributes:
        planted: bug -> ids of cases it fails, not of all.
        mutants: mutant -> id of a case it fails.
    """

    planted: Mapping[str, Sequence[str]] = field(default_factory=dict)
    mutants: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path = KILLS) -> Kills:
        """What the file says; nothing where there is none."""
        if not path.exists():
            return cls()
        values = json.loads(path.read_text(encoding="utf-8"))
        return cls(planted=values["planted"], mutants=values["mutants"])

    def write(self, path: Path = KILLS) -> None:
        """Write the file."""
        values = {"planted": dict(self.planted), "mutants": dict(self.mutants)}
        path.write_text(json.dumps(values, indent=1, sort_keys=True) + "\n", encoding="utf-8")

    def bugs_of(self, case: str) -> list[str]:
        """The planted bugs that fail a case."""
        return [bug for bug, cases in self.planted.items() if case in cases]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a campaign.

    Attributes:
        level: `quick` or `full`.
        planted, mutants: name -> ids of the cases that caught it, empty for none.
        equivalent: mutants that are no bugs, with the reason; they are not run.
        unhealthy: what the specimen or TORCH_SDPA failed without any bug.
    """

    level: Level
    planted: Mapping[str, Sequence[str]]
    mutants: Mapping[str, Sequence[str]]
    equivalent: Mapping[str, str]
    unhealthy: Mapping[str, str]

    @property
    def escaped(self) -> list[str]:
        """Bugs and mutants that nothing caught."""
        found = {**self.planted, **self.mutants}
        return [name for name, cases in found.items() if not cases]

    @property
    def ok(self) -> bool:
        """Whether all were caught, by a suite that healthy subjects pass."""
        return not self.escaped and not self.unhealthy

    def kills(self) -> Kills:
        """What a full run has found, for quick runs and the docs."""
        return Kills(
            planted=self.planted,
            mutants={name: cases[0] for name, cases in self.mutants.items() if cases},
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "level": self.level,
            "planted": len(self.planted),
            "caught": sum(bool(cases) for cases in self.planted.values()),
            "mutants": len(self.mutants),
            "killed": sum(bool(cases) for cases in self.mutants.values()),
            "equivalent": dict(self.equivalent),
            "escaped": self.escaped,
            "unhealthy": dict(self.unhealthy),
        }


def run_campaign(
    level: Level = "quick",
    *,
    seed: int = 0,
    workers: int | None = None,
    told: Told | None = None,
) -> Outcome:
    """Plant every bug and make mutants, and see which cases catch them.

    `quick` asks each bug, and a sample of the mutants, one case that caught it before; `full`
    looks for cases anew where those do not, for a bug to every case, and makes every mutant.

    It forks; call it in a process that has not used several threads in torch. Linux only.

    Raises ConfigError for a quick run without the findings of a full one, and where processes
    cannot be forked.
    """
    if not hasattr(os, "sched_getaffinity"):
        raise ConfigError("bugs are planted in forked processes, which needs Linux")
    kills = Kills.read()
    if level == "quick" and not kills.planted:
        raise ConfigError(f"{KILLS.name} is missing; it comes with a full run of the mutations")
    suite, specimen = Suite(), healthy(subject_of("REFERENCE"))
    grounds = terrains(specimen, "quick", seed)
    run = Campaign(suite, grounds, kills, workers, told)
    return run.quick(specimen) if level == "quick" else run.full(specimen)


Told = Callable[[str, list[str]], None]


@dataclass(frozen=True)
class Campaign:
    """Both kinds of runs, on one suite."""

    suite: Suite
    grounds: Sequence[Terrain]
    known: Kills
    workers: int | None
    told: Told | None

    def quick(self, specimen: Subject) -> Outcome:
        """What caught each bug before, asked of it again; of mutants a sample."""
        known = {bug: _cheapest(cases) for bug, cases in self.known.planted.items() if cases}
        made = {m.name: m for m in all_mutants() if _sampled(m) and m.name in self.known.mutants}
        bugs = [_one(bug.name, bug.plant, known[bug.name]) for bug in PLANTED if bug.name in known]
        some = [_one(m.name, _planter(m), self.known.mutants[m.name]) for m in made.values()]
        hunt, unhealthy = self._hunt(specimen, [trial.case for trial in bugs])
        caught = hunt.run(_batches(bugs), self.told)
        fused, wrong = self._hunt(_healthy_sdpa(), [trial.case for trial in some])
        killed = fused.run(_batches(some), self.told)
        seen = {label for found in (*caught.values(), *killed.values()) for label in found}
        return Outcome(
            level="quick",
            planted={b.name: [known[b.name]] if b.name in seen else [] for b in PLANTED},
            mutants={m: [self.known.mutants[m]] if m in seen else [] for m in made},
            equivalent=EQUIVALENT,
            unhealthy=unhealthy | {f"TORCH_SDPA {name}": why for name, why in wrong.items()},
        )

    def _hunt(self, subject: Subject, cases: Sequence[Case]) -> tuple[Hunt, dict[str, str]]:
        hunt = Hunt(subject, self.suite, self.grounds, self.workers)
        return hunt, hunt.warm([case for case in ASKED if case in cases])

    def full(self, specimen: Subject) -> Outcome:
        """Every bug and mutant, until a case catches it or all have been asked."""
        hunt, unhealthy = self._hunt(specimen, ASKED)
        caught = self.full_bugs(hunt)
        killed, wrong = self.full_mutants([m for m in all_mutants() if m.name not in EQUIVALENT])
        return Outcome(
            level="full",
            planted=caught,
            mutants=killed,
            equivalent=EQUIVALENT,
            unhealthy=unhealthy | {f"TORCH_SDPA {name}": why for name, why in wrong.items()},
        )

    def full_bugs(self, hunt: Hunt) -> dict[str, list[str]]:
        """Bug -> cases: first cases for each bug, then bugs for each case that has none."""
        caught = hunt.run((self._bug(bug, hunt) for bug in PLANTED), self.told)
        bare = [case for case in ASKED if not any(case.id in ids for ids in caught.values())]
        more = hunt.run((_case_prey(case) for case in bare), self.told)
        found = {bug: {*ids, *(c for c, bugs in more.items() if bug in bugs)}
                 for bug, ids in caught.items()}  # fmt: skip
        return {bug: [case.id for case in ASKED if case.id in ids] for bug, ids in found.items()}

    def _bug(self, bug: Bug, hunt: Hunt) -> Prey:
        """What caught it before, then all that is about such, then all else, cheap ones first."""
        known = self.known.planted.get(bug.name, ())
        kinds = bug.kinds + "".join(sorted({case.id[0] for case in ASKED} - set(bug.kinds)))
        rest = sorted(
            (case for case in ASKED if case.id not in known),
            key=lambda case: (
                case.threaded, kinds.index(case.id[0]), hunt.seconds.get(case.id, 0.0)
            ),
        )  # fmt: skip
        return Prey.of(bug.name, bug.plant, [*_cases(known), *rest], max(1, len(known)))

    def full_mutants(
        self, mutants: Sequence[Mutant]
    ) -> tuple[dict[str, list[str]], dict[str, str]]:
        """Mutant -> cases, and what TORCH_SDPA fails without any."""
        infection, subject = Infection(mutants), _healthy_sdpa()
        cases = [case for case in ASKED if not case.threaded]
        hunt = Hunt(subject, self.suite, self.grounds, self.workers)
        spread = Spread.start(infection, subject, self.suite, self.grounds, cases, hunt.workers)
        wrong = hunt.warm(cases)
        wrong |= spread.found(infection)
        order = Order(hunt.seconds, {m.name: m for m in mutants})

        def told(name: str, ids: list[str]) -> None:
            order.learn(name, ids)
            if self.told is not None:
                self.told(name, ids)

        def preys() -> Iterator[Prey]:
            for mutant in mutants:
                known = _cases([self.known.mutants.get(mutant.name, "")])
                rest = order.of(mutant, infection.cases[mutant.name])
                yield Prey.of(mutant.name, _planter(mutant), [*known, *rest])

        return hunt.run(preys(), told), wrong


class Order:
    """The order in which a mutant is asked: what caught others of its function, then by cost."""

    def __init__(self, seconds: Mapping[str, float], mutants: Mapping[str, Mutant]) -> None:
        self.seconds = seconds
        self.mutants = mutants
        self.caught: Counter[tuple[str, str, str]] = Counter()

    def learn(self, name: str, cases: Sequence[str]) -> None:
        """A mutant was caught by these cases."""
        mutant = self.mutants[name]
        self.caught.update((mutant.module, mutant.function, case) for case in cases)

    def of(self, mutant: Mutant, infected: Sequence[str]) -> list[Case]:
        """The cases in which it differs. Those on several threads are not among them: they
        cannot be watched, and arithmetic does not know of threads."""

        def key(case: Case) -> tuple[int, float]:
            count = self.caught[mutant.module, mutant.function, case.id]
            return -count, self.seconds.get(case.id, 0.0)

        return sorted(_cases(infected), key=key)


def all_mutants() -> list[Mutant]:
    """The mutants of every module that is mutated, without functions about costs alone."""
    found = [mutant for module in MUTATED for mutant in mutants(module, source_of(module))]
    return [m for m in found if f"{m.module}.{m.function}" not in COSTS]


def _sampled(mutant: Mutant) -> bool:
    return zlib.crc32(mutant.name.encode()) % SAMPLED == 0


def _planter(mutant: Mutant) -> Plant:
    return lambda subject: planted(mutant, subject)


def _healthy_sdpa() -> Subject:
    """TORCH_SDPA as it is, asked for all that its class says, not only what is declared."""
    return subject_of("TORCH_SDPA").replace(declared=())


def _cases(ids: Iterable[str]) -> list[Case]:
    wanted = set(ids)
    return [case for case in ASKED if case.id in wanted]


def _one(label: str, plant: Plant, case: str) -> Trial:
    return Trial(label, plant, _cases([case])[0])


def _cheapest(ids: Sequence[str]) -> str:
    """The case to ask of a bug that failed these; the kinds that take longest come last."""
    return min(ids, key=lambda case: (case[0] in "RMO", ids.index(case)))


def _batches(trials: Sequence[Trial]) -> Iterator[Prey]:
    for first in range(0, len(trials), BATCH):
        some = trials[first : first + BATCH]
        yield Prey(f"{some[0].label} ...", some, len(some))


def _case_prey(case: Case) -> Prey:
    """A case that no bug has failed yet: all bugs, those of its kind first."""
    order = sorted(PLANTED, key=lambda bug: (bug.kinds + case.id[0]).index(case.id[0]))
    return Prey(case.id, [Trial(bug.name, bug.plant, case) for bug in order])
