"""Which cases a wrong subject fails: each subject runs in a process of its own.

A wrong implementation may hang, or die of a signal; either is being caught.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from attnplat.testing.bench import Bench, threads
from attnplat.testing.case import Case
from attnplat.testing.runner import Status, Suite
from attnplat.testing.subject import Subject
from attnplat.testing.terrain import Terrain

TIMEOUT = 180.0
"""Seconds that one case may take before it counts as failed."""

Plant = Callable[[Subject], Subject]


@dataclass(frozen=True)
class Trial:
    """A wrong subject and a case asked of it.

    Attributes:
        label: what to call the trial where it fails.
        plant: makes the healthy subject wrong.
        case: what is asked.
    """

    label: str
    plant: Plant
    case: Case


@dataclass(frozen=True)
class Prey:
    """What is hunted: trials in one process, in order, until `enough` have failed."""

    name: str
    trials: Sequence[Trial]
    enough: int = 1

    @classmethod
    def of(cls, name: str, plant: Plant, cases: Iterable[Case], enough: int = 1) -> Prey:
        """One wrong subject that is asked several cases."""
        return cls(name, [Trial(case.id, plant, case) for case in cases], enough)


@dataclass
class _Child:
    prey: Prey
    process: int
    pipe: int
    started: float
    failed: list[str] = field(default_factory=list)
    asked: int = 0
    broken: bool = False
    rest: bytes = b""

    def remaining(self) -> Sequence[Trial]:
        """The trials that a process which died has left, where they are still wanted."""
        wanted = self.broken and len(self.failed) < self.prey.enough
        return self.prey.trials[self.asked :] if wanted else ()


class Hunt:
    """Wrong subjects, hunted `workers` at a time."""

    def __init__(
        self, healthy: Subject, suite: Suite, grounds: Sequence[Terrain], workers: int | None = None
    ) -> None:
        self.healthy = healthy
        self.suite = suite
        self.grounds = grounds
        self.workers = workers or len(os.sched_getaffinity(0))
        self.seconds: dict[str, float] = {}

    def warm(self, cases: Sequence[Case]) -> dict[str, str]:
        """Build all checks and their truths by running the healthy subject; what it fails.

        Threads are only started in children: a process that has had some cannot be forked.
        """
        bench, wrong = Bench(self.healthy), {}
        with threads(1):
            for case in cases:
                if case.threaded:
                    for ground in self.grounds[:1]:
                        self.suite.checks(case, ground)
                    continue
                result = self.suite.run_case(case, bench, self.grounds)
                self.seconds[case.id] = result.seconds
                if result.status == Status.FAILED:
                    wrong[case.id] = result.reason
        threaded = [case for case in cases if case.threaded]
        found = self.run([Prey.of("healthy", lambda subject: subject, threaded, len(threaded))])
        return wrong | dict.fromkeys(found["healthy"], "fails on several threads")

    def run(
        self, preys: Iterable[Prey], told: Callable[[str, list[str]], None] | None = None
    ) -> dict[str, list[str]]:
        """Name -> labels of the trials that failed. A prey is asked for when its turn comes."""
        waiting = iter(preys)
        running: list[_Child] = []
        found: dict[str, list[str]] = {}
        while True:
            while len(running) < self.workers and (prey := next(waiting, None)) is not None:
                running.append(self._start(prey))
            if not running:
                return found
            for child in self._wait(running):
                running.remove(child)
                if rest := child.remaining():
                    running.append(self._start(replace(child.prey, trials=rest), child.failed))
                    continue
                found[child.prey.name] = child.failed
                if told is not None:
                    told(child.prey.name, child.failed)

    def _start(self, prey: Prey, failed: Sequence[str] = ()) -> _Child:
        reader, writer = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(reader)
            try:
                self._work(prey, writer, len(failed))
            finally:
                # Dying of an error, too, means that the trial at hand has failed.
                os._exit(sys.exc_info()[0] is not None)
        os.close(writer)
        return _Child(prey, process, reader, time.monotonic(), list(failed))

    def _work(self, prey: Prey, writer: int, failed: int) -> None:
        """Run in the child: tell each case before it is asked, and whether it failed."""
        torch.set_num_threads(1)
        with open(os.devnull, "w") as silent:
            for stream in (1, 2):
                os.dup2(silent.fileno(), stream)
        plant: Plant | None = None
        bench: Bench | None = None
        for trial in prey.trials:
            os.write(writer, f"? {trial.label}\n".encode())
            if bench is None or plant is not trial.plant:
                plant, bench = trial.plant, Bench(trial.plant(self.healthy))
            result = self.suite.run_case(trial.case, bench, self.grounds)
            if result.status == Status.FAILED:
                os.write(writer, f"! {trial.label}\n".encode())
                failed += 1
                if failed == prey.enough:
                    return

    def _wait(self, running: list[_Child]) -> list[_Child]:
        """Read what children tell; those that have ended."""
        ready, _, _ = select.select([child.pipe for child in running], [], [], 1.0)
        ended = []
        for child in running:
            if child.pipe in ready:
                data = os.read(child.pipe, 1 << 16)
                self._hear(child, data)
                if not data:
                    self._bury(child)
                    ended.append(child)
            elif time.monotonic() - child.started > TIMEOUT:
                os.kill(child.process, 9)
        return ended

    def _hear(self, child: _Child, data: bytes) -> None:
        *lines, child.rest = (child.rest + data).split(b"\n")
        for line in lines:
            kind, name = line.decode().split(" ", 1)
            child.started = time.monotonic()
            if kind == "?":
                child.asked += 1
            else:
                child.failed.append(name)

    def _bury(self, child: _Child) -> None:
        """What killed the process has failed the trial at hand."""
        os.close(child.pipe)
        _, status = os.waitpid(child.process, 0)
        child.broken = status != 0
        if child.broken:
            label = child.prey.trials[max(child.asked, 1) - 1].label
            child.failed += [] if label in child.failed else [label]
