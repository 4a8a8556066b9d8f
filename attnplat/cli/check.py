"""`attnplat check`: does a backend do on this machine what it claims?"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnplat.cli.main import EXIT_NO, EXIT_OK
from attnplat.cli.tables import print_table
from attnplat.errors import ConfigError

if TYPE_CHECKING:
    from attnplat.testing.runner import Answers, Report, Result, Suite
    from attnplat.testing.subject import Subject
    from attnplat.testing.terrain import Level


RECORDS = Path("conformance/records")

LEAST_SHARE = 20
"""Cases for which another process is started."""

WIDTH = 100
"""Characters of a reason in a table; failures are told in full below it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "backend",
        nargs="*",
        metavar="BACKEND",
        help="a backend's name, or module:Class of an implementation of your own; default: "
        "every backend of the device that has an adapter and can run here",
    )
    parser.add_argument("--device", default="cpu", help="a device of this machine; default cpu")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--quick", action="store_true", help="about half a minute each (default)")
    how.add_argument("--full", action="store_true", help="every dtype, more sizes and lengths")
    parser.add_argument(
        "--case", action="append", metavar="ID", help="only this case (C5) or kind (C); repeatable"
    )
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers; default 0")
    parser.add_argument(
        "--mutations",
        action="store_true",
        help="check the suite itself: plant bugs and count those that it catches",
    )
    parser.add_argument("--cases", action="store_true", help="list the cases and what they claim")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--record", action="store_true", help="write each result as a record")
    parser.add_argument(
        "--records-dir", metavar="DIR", type=Path, default=RECORDS, help=f"default {RECORDS}"
    )


def run(args: argparse.Namespace) -> int:
    """Check, print, record; 1 when a claim does not hold."""
    _check_options(args)
    if args.cases:
        return _list_cases(args)
    if args.mutations:
        return _mutate(args)
    from attnplat.testing.subject import subject_of

    subjects = [subject_of(b, args.device) for b in args.backend or backends_here(args.device)]
    reports = []
    for report in _reports(subjects, args):
        reports.append(report)
        _show(report, args)
    if args.json:
        print(json.dumps(_told(reports), indent=2))
    return EXIT_OK if all(report.ok for report in reports) else EXIT_NO


def _reports(subjects: list[Subject], args: argparse.Namespace) -> Iterator[Report]:
    """A report each. On a CPU every core asks all subjects its share of the cases, so that what
    a case needs is built once."""
    import torch

    from attnplat.testing.children import can_fork, each_in_a_child
    from attnplat.testing.runner import Suite, chosen, joined

    ids = [case.id for case in chosen(args.case)]
    cores = len(os.sched_getaffinity(0)) if can_fork() and args.device == "cpu" else 1
    shares = min(cores, len(ids) // LEAST_SHARE)
    if shares < 2:
        suite = Suite()
        for subject in subjects:
            yield _ask(subject, args, ids, suite, watched=True)
        return
    torch.set_num_threads(1)
    works = [partial(_ask_all, subjects, args, ids[n::shares], n == 0) for n in range(shares)]
    told = each_in_a_child(works)
    for n, subject in enumerate(subjects):
        yield joined(subject, _level(args), args.seed, [answers[n] for answers in told])


def _level(args: argparse.Namespace) -> Level:
    return "full" if args.full else "quick"


def _ask(
    subject: Subject, args: argparse.Namespace, ids: list[str], suite: Suite, *, watched: bool
) -> Report:
    from attnplat.testing.runner import run_conformance

    return run_conformance(
        subject,
        args.device,
        _level(args),
        ids=ids,
        seed=args.seed,
        suite=suite,
        progress=_progress(subject.name, args) if watched else None,
    )


def _ask_all(
    subjects: list[Subject], args: argparse.Namespace, ids: list[str], watched: bool
) -> list[Answers]:
    """In a child, of each subject."""
    from attnplat.testing.runner import Answers, Suite

    suite = Suite()
    found = [_ask(subject, args, ids, suite, watched=watched) for subject in subjects]
    return [Answers(report.results, report.gaps, report.seconds) for report in found]


def _check_options(args: argparse.Namespace) -> None:
    """Raise ConfigError for options that say nothing together."""
    if args.record and args.case:
        raise ConfigError("--record needs the whole suite; leave --case out")
    if args.mutations and (args.backend or args.case or args.device != "cpu"):
        raise ConfigError(
            "--mutations checks the suite, not a backend: it takes no BACKEND, --case or --device"
        )
    if args.mutations and args.record and not args.full:
        raise ConfigError("--record of mutations needs --full: every bug and mutant, not a sample")


def backends_here(device: str) -> list[str]:
    """The backends with an adapter that nothing about the device or its packages refuses."""
    from attnplat.config.layer import MhaConfig
    from attnplat.platforms import platform_for

    platform, layer = platform_for(device), MhaConfig(head_size=128)
    world = platform.world()
    found = []
    for backend in platform.tables.catalog:
        if backend.loads is None or backend.name in found:
            continue
        reasons = backend.resolve(world).refuse(layer, world)
        if not any(reason.kind in ("device", "package") for reason in reasons):
            found.append(backend.name)
    if not found:
        raise ConfigError(f"no backend of {platform.name} has an adapter that runs here")
    return found


def _progress(backend: str, args: argparse.Namespace) -> Any:
    """Shows the case at hand where someone watches."""
    if args.json or not sys.stderr.isatty():
        return None

    def tell(result: Result) -> None:
        print(f"\r{backend} {result.case.id:<4} {result.status:<16}", end="", file=sys.stderr)

    return tell


def _show(report: Report, args: argparse.Namespace) -> None:
    if not args.json:
        if sys.stderr.isatty():
            print("\r" + " " * 60 + "\r", end="", file=sys.stderr)
        _print(report, every=bool(args.case))
    if args.record:
        from attnplat.testing.records import record_of, write_record

        path = write_record(record_of(report), args.records_dir)
        print(f"recorded in {path}", file=sys.stderr)


def _print(report: Report, *, every: bool) -> None:
    """The table: all cases where some were asked for, else those that did not simply pass."""
    subject = report.subject
    print(f"\n{subject.name} on {subject.device}, {report.level}")
    shown = [r for r in report.results if every or r.status != "passed"]
    if every:
        rows = [(r.case.id, r.status, r.checks or None, _what(r)) for r in shown]
        print_table(rows, ("case", "", "checks", "what"))
    elif shown:
        print_table(_joined(shown), ("", "what", "cases"))
    for result in report.results:
        if result.status == "failed":
            print(f"{result.case.id} claims: {result.case.claim}\n  {result.reason}")
    for name, worst in sorted(report.gaps.items()):
        print(f"worst error in {name}: output {worst.out:.1e}, LSE {worst.lse:.1e}")
    counts = {status: len(report.of(status)) for status in _statuses()}
    told = ", ".join(f"{count} {status}" for status, count in counts.items())
    checks = sum(r.checks for r in report.results)
    partly = sum(r.status == "passed" and r.refused > 0 for r in report.results)
    print(f"{len(report.results)} cases: {told}; {checks} checks in {report.seconds:.0f} s")
    if partly:
        print(f"{partly} of those that passed were asked in part: the rest is not claimed")


def _what(result: Result) -> str:
    """The claim where it holds, else why not, in one short line."""
    if result.status == "passed":
        return result.case.claim
    line = result.reason.split("\n")[0]
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 4]} ..."


def _joined(results: list[Result]) -> list[tuple[str, str, str]]:
    """One row for all cases of which the same is to be said."""
    found: dict[tuple[str, str], list[str]] = {}
    for result in results:
        found.setdefault((str(result.status), _what(result)), []).append(result.case.id)
    return [(status, what, _runs(ids)) for (status, what), ids in found.items()]


def _runs(ids: list[str]) -> str:
    """Ids with runs joined: `A1-A4 B2`."""
    runs: list[list[str]] = []
    for one in ids:
        last = runs[-1][-1] if runs else ""
        if last[:1] == one[0] and int(one[1:]) == int(last[1:]) + 1:
            runs[-1].append(one)
        else:
            runs.append([one])
    return " ".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _statuses() -> Any:
    from attnplat.testing.runner import Status

    return Status


def _told(reports: list[Report]) -> dict[str, Any]:
    """All reports, what each case claims, and what the suite is known to catch."""
    from attnplat.testing.mutations.campaign import Kills

    kills = Kills.read()
    return {
        "backends": [report.to_dict() for report in reports],
        "cases": {r.case.id: r.case.claim for r in reports[0].results},
        "planted": len(kills.planted),
        "caught": sum(bool(cases) for cases in kills.planted.values()),
    }


def _list_cases(args: argparse.Namespace) -> int:
    from attnplat.testing.runner import chosen

    rows = [(case.id, case.claim, case.absent) for case in chosen(args.case)]
    if args.json:
        print(json.dumps([dict(zip(("id", "claim", "absent"), row, strict=True)) for row in rows]))
    else:
        print_table(rows, ("case", "claim", "not applicable because"))
    return EXIT_OK


def _mutate(args: argparse.Namespace) -> int:
    """Plant bugs, count what the suite catches; 1 when one escapes."""
    import torch

    # A process whose torch has run on several threads cannot be forked.
    torch.set_num_threads(1)
    from attnplat.testing.mutations.campaign import KILLS, run_campaign

    watched = sys.stderr.isatty() and not args.json
    seen = 0

    def tell(name: str, cases: list[str]) -> None:
        nonlocal seen
        seen += 1
        if watched:
            print(f"\r{seen:5d} {name[:60]:60} {' '.join(cases[:1]):5}", end="", file=sys.stderr)

    outcome = run_campaign("full" if args.full else "quick", seed=args.seed, told=tell)
    if args.record:
        outcome.kills().write()
        print(f"recorded in {KILLS}", file=sys.stderr)
    if args.json:
        print(json.dumps(outcome.to_dict(), indent=2))
        return EXIT_OK if outcome.ok else EXIT_NO
    if watched:
        print("\r" + " " * 75 + "\r", end="", file=sys.stderr)
    told = outcome.to_dict()
    print(f"planted bugs: {told['caught']} of {told['planted']} caught")
    sample = "" if args.full else " (a sample; --full makes all)"
    print(f"mutants: {told['killed']} of {told['mutants']} killed{sample}")
    print(f"{len(outcome.equivalent)} more mutants are no bugs, and listed with the reason")
    rows = [(name, "escaped") for name in outcome.escaped]
    rows += [(name, why) for name, why in outcome.unhealthy.items()]
    if rows:
        print_table(rows, ("bug", ""))
    return EXIT_OK if outcome.ok else EXIT_NO
