"""Which cases a wrong subject fails: each subject runs in a process of its own.

A wrong implementation may hang, or die of a signal; either is being caught.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

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
class Prey:
    """One wrong subject to be hunted.

    Attributes:
        name: what it is called.
        plant: makes the healthy subject wrong.
        cases: the cases to ask, in order.
        all: ask all of them, not only until one fails.
    """

    name: str
    plant: Plant
    cases: Sequence[Case]
    all: bool = False


@dataclass
class _Child:
    prey: Prey
    process: int
    pipe: int
    started: float
    failed: list[str] = field(default_factory=list)
    asking: str = ""
    rest: bytes = b""


class Hunt:
    """Wrong subjects, hunted `workers` at a time."""

    def __init__(
        self, healthy: Subject, suite: Suite, grounds: Sequence[Terrain], workers: int | None = None
    ) -> None:
        self.healthy = healthy
        self.suite = suite
        self.grounds = grounds
        self.workers = workers or len(os.sched_getaffinity(0))

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
                if result.status == Status.FAILED:
                    wrong[case.id] = result.reason
        threaded = [case for case in cases if case.threaded]
        found = self.run([Prey("healthy", lambda subject: subject, threaded, all=True)])
        return wrong | dict.fromkeys(found["healthy"], "fails on several threads")

    def run(
        self, preys: Iterable[Prey], told: Callable[[str, list[str]], None] | None = None
    ) -> dict[str, list[str]]:
        """Name -> ids of the cases it failed."""
        waiting, running, found = list(preys)[::-1], [], {}
        while waiting or running:
            while waiting and len(running) < self.workers:
                running.append(self._start(waiting.pop()))
            for child in self._wait(running):
                running.remove(child)
                found[child.prey.name] = child.failed
                if told is not None:
                    told(child.prey.name, child.failed)
        return found

    def _start(self, prey: Prey) -> _Child:
        reader, writer = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(reader)
            self._work(prey, writer)
            os._exit(0)
        os.close(writer)
        return _Child(prey, process, reader, time.monotonic())

    def _work(self, prey: Prey, writer: int) -> None:
        """Run in the child: tell each case before it is asked, and whether it failed."""
        torch.set_num_threads(1)
        with open(os.devnull, "w") as silent:
            for stream in (1, 2):
                os.dup2(silent.fileno(), stream)
        try:
            bench = Bench(prey.plant(self.healthy))
        except BaseException:
            os.write(writer, b"? planting\n! planting\n")
            return
        for case in prey.cases:
            os.write(writer, f"? {case.id}\n".encode())
            result = self.suite.run_case(case, bench, self.grounds)
            if result.status == Status.FAILED:
                os.write(writer, f"! {case.id}\n".encode())
                if not prey.all:
                    return
        os.write(writer, b"? end\n")

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
            if kind == "!":
                child.failed.append(name)
                child.asking = ""
            else:
                child.asking = name

    def _bury(self, child: _Child) -> None:
        os.close(child.pipe)
        _, status = os.waitpid(child.process, 0)
        if status and child.asking not in ("", "end"):
            child.failed.append(child.asking)


def by_case(found: Mapping[str, Sequence[str]], cases: Iterable[Case]) -> dict[str, list[str]]:
    """Case id -> names of the bugs that fail it."""
    return {case.id: [name for name, ids in found.items() if case.id in ids] for case in cases}
