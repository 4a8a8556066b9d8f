"""The campaign: every planted bug and every mutant, and what the suite makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnplat.errors import ConfigError
from attnplat.testing.case import Case
from attnplat.testing.cases import CASES
from attnplat.testing.mutations.bug import Bug, healthy
from attnplat.testing.mutations.copies import CODECS, MUTATED, planted, source_of
from attnplat.testing.mutations.equivalent import EQUIVALENT
from attnplat.testing.mutations.hunt import Hunt, Prey
from attnplat.testing.mutations.mutants import Mutant, mutants
from attnplat.testing.mutations.planted import PLANTED
from attnplat.testing.runner import Suite
from attnplat.testing.subject import Subject, subject_of
from attnplat.testing.terrain import Level, terrains

KILLS = Path(__file__).with_name("kills.json")
"""Which cases each bug failed, and one case that each mutant failed, in the last full run."""

ASKED = tuple(case for case in CASES if case.build is not None)


@dataclass(frozen=True, kw_only=True)
class Kills:
    """What a full run has found.

    Attributes:
        planted: bug -> ids of all cases it fails.
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
        level: `quick` asks each bug the cases that caught it before, `full` all of them.
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
    told: Callable[[str, list[str]], None] | None = None,
) -> Outcome:
    """Plant every bug and make every mutant, and see which cases catch them.

    It forks; call it in a process that has not used several threads in torch. Linux only.

    Raises ConfigError for a quick run without the findings of a full one.
    """
    kills = Kills.read()
    if level == "quick" and not kills.planted:
        raise ConfigError(f"{KILLS.name} is missing; it comes with a full run of the mutations")
    subject = subject_of("REFERENCE")
    specimen = healthy(subject)
    suite, grounds = Suite(), terrains(specimen, "quick", seed)
    hunt = Hunt(specimen, suite, grounds, workers)
    needed = ASKED if level == "full" else _needed(kills)
    unhealthy = hunt.warm(needed)
    bugs = [_bug_prey(bug, level, kills) for bug in PLANTED]
    caught = hunt.run(bugs, told)
    made = [m for m in all_mutants() if m.name not in EQUIVALENT]
    if level == "quick":
        made = [m for m in made if m.name in kills.mutants]
    fused = Hunt(_healthy_sdpa(), suite, grounds, workers)
    unhealthy |= {f"TORCH_SDPA {name}": why for name, why in fused.warm(needed).items()}
    killed = fused.run([_mutant_prey(m, level, kills) for m in made], told)
    return Outcome(
        level=level,
        planted=caught,
        mutants=killed,
        equivalent=EQUIVALENT,
        unhealthy=unhealthy,
    )


def all_mutants() -> list[Mutant]:
    """The mutants of every module that is mutated."""
    return [mutant for module in MUTATED for mutant in mutants(module, source_of(module))]


def _healthy_sdpa() -> Subject:
    """TORCH_SDPA as it is, asked for all that its class says, not only what is declared."""
    return subject_of("TORCH_SDPA").replace(declared=())


def _cases(ids: Sequence[str]) -> list[Case]:
    wanted = set(ids)
    return [case for case in ASKED if case.id in wanted]


def _needed(kills: Kills) -> list[Case]:
    """The cases that a quick run asks."""
    ids = {own[0] for own in map(_killers, kills.planted.values()) if own}
    return _cases([*ids, *kills.mutants.values()])


def _killers(ids: Sequence[str]) -> list[str]:
    """The cases to ask first of a bug that failed these: the cheapest to run."""
    return sorted(ids, key=lambda case: (case[0] in "RMO", ids.index(case)))[:1]


def _bug_prey(bug: Bug, level: Level, kills: Kills) -> Prey:
    known = kills.planted.get(bug.name)
    if level == "full" or not known:
        return Prey(bug.name, bug.plant, ASKED, all=level == "full")
    return Prey(bug.name, bug.plant, _cases(_killers(known)))


def _mutant_prey(mutant: Mutant, level: Level, kills: Kills) -> Prey:
    """A mutant is asked what caught it before first, then all that its module is about."""

    def plant(subject: Subject) -> Subject:
        return planted(mutant, subject)

    known = [kills.mutants[mutant.name]] if mutant.name in kills.mutants else []
    if level == "quick":
        return Prey(mutant.name, plant, _cases(known))
    about = [case for case in ASKED if mutant.module not in CODECS or case.id[0] in "HI"]
    rest = [case for case in _in_order(about) if case.id not in known]
    return Prey(mutant.name, plant, [*_cases(known), *rest])


def _in_order(cases: Sequence[Case]) -> list[Case]:
    """Cases that catch much first, slow ones last."""
    return sorted(cases, key=lambda case: "DABCGEFIJHKNMRO".index(case.id[0]))
