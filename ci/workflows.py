"""Makes .github/workflows/*.yml and docs/ci.md from ci/matrix.toml.

`--check` fails when one of them differs from what the matrix says; `--write` rewrites them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MATRIX = ROOT / "ci" / "matrix.toml"
WORKFLOWS = ".github/workflows"
PAGE = "docs/ci.md"
RECORDS = ROOT / "conformance" / "records"

EXECUTES = ("ci/run", "ci/device", "ci/ipex")
WHEN = ("push", "pull_request", "schedule", "demand")
# Actions by major version: fixes arrive, changes of behaviour do not.
CHECKOUT, SETUP_PYTHON = "actions/checkout@v5", "actions/setup-python@v6"
CACHE, UPLOAD = "actions/cache@v4", "actions/upload-artifact@v4"

HEAD = "# Made from ci/matrix.toml by ci/workflows.py (`make generate`); do not edit.\n"
# Where pip finds a CPU build of torch is the repository's own setting.
PIP = {"PIP_EXTRA_INDEX_URL": "${{ vars.PIP_EXTRA_INDEX_URL }}"}


@dataclass(frozen=True, kw_only=True)
class Runner:
    """One kind of machine: see ci/matrix.toml.

    Attributes:
        device: what `attnplat` must say of it.
        at_least: of a processor, the instruction set that is enough; "" for exactly `device`.
        every_python: also with the other Python versions.
    """

    name: str
    device: str
    what: str
    labels: tuple[str, ...]
    executes: str
    when: tuple[str, ...]
    timeout_minutes: int
    at_least: str = ""
    every_python: bool = False

    @property
    def own(self) -> bool:
        """Whether it is a machine of one's own."""
        return "self-hosted" in self.labels

    @property
    def expect(self) -> str:
        """The command that fails on a machine that is not what the matrix says."""
        platform, _, arch = self.device.partition(":")
        if self.at_least:
            return f"ci/expect --at-least {platform}:{self.at_least}"
        return f"ci/expect {platform}:{arch}"


@dataclass(frozen=True)
class Matrix:
    """All of ci/matrix.toml."""

    pythons: tuple[str, ...]
    torches: tuple[str, ...]
    runners: tuple[Runner, ...]

    def on(self, when: str, *, own: bool | None = None) -> list[Runner]:
        """The runners of a trigger."""
        return [r for r in self.runners if when in r.when and own in (None, r.own)]


def read_matrix(text: str) -> Matrix:
    """The matrix in a file's text. Raises ValueError for what it cannot be."""
    data = tomllib.loads(text)
    known = {f.name for f in fields(Runner)}
    runners = []
    for entry in data["runner"]:
        if unknown := set(entry) - known:
            raise ValueError(f"runner {entry.get('name')}: unknown {', '.join(sorted(unknown))}")
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
        runners.append(_checked(Runner(**values)))
    names = [runner.name for runner in runners]
    if len(set(names)) < len(names):
        raise ValueError("two runners have one name")
    return Matrix(
        tuple(data["python"]["versions"]), tuple(data["torch"]["versions"]), tuple(runners)
    )


def _checked(runner: Runner) -> Runner:
    if runner.executes not in EXECUTES:
        raise ValueError(f"{runner.name} executes {runner.executes}; it takes {EXECUTES}")
    if not runner.when or set(runner.when) - set(WHEN):
        raise ValueError(f"{runner.name} runs when {runner.when}; it takes some of {WHEN}")
    if runner.own and "pull_request" in runner.when:
        raise ValueError(f"{runner.name} is a machine of one's own: no pull request runs on it")
    if not 1 <= runner.timeout_minutes <= 120:
        raise ValueError(f"{runner.name} has {runner.timeout_minutes} minutes; it takes 1 to 120")
    return runner


# Workflows -------------------------------------------------------------------------------------


def workflows(matrix: Matrix) -> dict[str, str]:
    """Path -> text of every generated file."""
    made = {
        "ci.yml": _every_change(matrix),
        "devices.yml": _devices(matrix),
        "full.yml": _full(matrix),
        "demand.yml": _demand(matrix),
    }
    files = {f"{WORKFLOWS}/{name}": HEAD + to_yaml(value) for name, value in made.items()}
    return {**files, PAGE: page(matrix)}


def _every_change(matrix: Matrix) -> dict[str, Any]:
    """Pushes and pull requests, on machines that everybody has."""
    include = []
    for runner in matrix.on("pull_request"):
        pythons = matrix.pythons if runner.every_python else matrix.pythons[:1]
        include += [{**_row(runner), "python": version} for version in pythons]
    run = _job(
        "${{ matrix.name }}, Python ${{ matrix.python }}",
        _steps("${{ matrix.python }}", "${{ matrix.expect }}", "${{ matrix.executes }}"),
        include=include,
    )
    versions = _job(
        "torch ${{ matrix.torch }}",
        [
            *_checkout(matrix.pythons[0]),
            {"run": "ci/run --torch ${{ matrix.torch }} install unit execution"},
        ],
        include=[{"torch": version} for version in matrix.torches],
        runs_on=list(matrix.on("pull_request")[0].labels),
        timeout=60,
    )
    return _workflow(
        "CI",
        {"push": {"branches": ["main"]}, "pull_request": None},
        {"run": run, "torch": versions},
        cancel="${{ github.event_name == 'pull_request' }}",
    )


def _devices(matrix: Matrix) -> dict[str, Any]:
    """Machines of one's own: after a change of main those marked so, every night all of them."""
    jobs = {}
    for runner in matrix.runners:
        if not runner.own:
            continue
        always = "push" in runner.when
        steps = [
            {"uses": CHECKOUT, "with": {"persist-credentials": False}},
            {"name": "the machine is what its labels say", "run": runner.expect},
            {"name": runner.executes, "run": runner.executes},
        ]
        job: dict[str, Any] = {"name": f"{runner.name}: {runner.what}"}
        if not always:
            job["if"] = "github.event_name != 'push'"
        jobs[runner.name] = {
            **job,
            "runs-on": list(runner.labels),
            "timeout-minutes": runner.timeout_minutes,
            # One job a machine: accelerators are not shared.
            "concurrency": {"group": runner.name, "cancel-in-progress": False},
            "steps": steps,
        }
    triggers = {
        "push": {"branches": ["main"]},
        "schedule": [{"cron": "17 2 * * *"}],
        "workflow_dispatch": None,
    }
    return _workflow("Devices", triggers, jobs, cancel=False)


def _full(matrix: Matrix) -> dict[str, Any]:
    """All tests, the slow ones too, every week; the record of them is kept."""
    runner = matrix.on("pull_request")[0]
    steps = [
        *_checkout(matrix.pythons[0]),
        {"run": "make test-full"},
        {
            "uses": UPLOAD,
            "with": {"name": "record", "path": "ci/records/*.json", "if-no-files-found": "error"},
        },
    ]
    job = {
        "runs-on": list(runner.labels),
        "timeout-minutes": 120,
        "env": {**PIP, "CI": "true"},
        "steps": steps,
    }
    triggers = {"schedule": [{"cron": "43 3 * * 6"}], "workflow_dispatch": None}
    return _workflow("All tests", triggers, {"full": job}, cancel=False)


def _demand(matrix: Matrix) -> dict[str, Any]:
    """What is run when somebody asks for it."""
    runners = matrix.on("demand")
    jobs = {
        runner.name: {
            "name": f"{runner.name}: {runner.what}",
            "if": f"inputs.runner == '{runner.name}'",
            "runs-on": list(runner.labels),
            "timeout-minutes": runner.timeout_minutes,
            "steps": [
                *_checkout(matrix.pythons[0]),
                {"run": runner.expect},
                {"run": runner.executes},
            ],
        }
        for runner in runners
    }
    choice = {"type": "choice", "required": True, "options": [r.name for r in runners]}
    trigger = {"workflow_dispatch": {"inputs": {"runner": choice}}}
    return _workflow("On demand", trigger, jobs, cancel=False)


def _workflow(
    name: str, triggers: Mapping[str, Any], jobs: Mapping[str, Any], cancel: bool | str
) -> dict[str, Any]:
    return {
        "name": name,
        "on": dict(triggers),
        "permissions": {"contents": "read"},
        "concurrency": {
            "group": "${{ github.workflow }}-${{ github.ref }}",
            "cancel-in-progress": cancel,
        },
        "jobs": dict(jobs),
    }


def _row(runner: Runner) -> dict[str, Any]:
    return {
        "name": runner.name,
        "labels": list(runner.labels),
        "executes": runner.executes,
        "expect": runner.expect,
        "minutes": runner.timeout_minutes,
    }


def _job(
    name: str,
    steps: list[dict[str, Any]],
    include: list[dict[str, Any]],
    runs_on: Any = "${{ matrix.labels }}",
    timeout: Any = "${{ matrix.minutes }}",
) -> dict[str, Any]:
    return {
        "name": name,
        "runs-on": runs_on,
        "timeout-minutes": timeout,
        "strategy": {"fail-fast": False, "matrix": {"include": include}},
        "env": {**PIP, "CI": "true"},
        "steps": steps,
    }


def _checkout(python: str) -> list[dict[str, Any]]:
    return [
        {"uses": CHECKOUT, "with": {"persist-credentials": False}},
        {"uses": SETUP_PYTHON, "with": {"python-version": python}},
        {
            "uses": CACHE,
            "with": {
                "path": "~/.cache/pip",
                "key": "pip-${{ runner.os }}-${{ runner.arch }}-"
                f"{python}-${{{{ hashFiles('ci/constraints.txt') }}}}",
                "restore-keys": f"pip-${{{{ runner.os }}}}-${{{{ runner.arch }}}}-{python}-",
            },
        },
    ]


def _steps(python: str, expect: str, executes: str) -> list[dict[str, Any]]:
    return [
        *_checkout(python),
        {"name": "the machine is what the matrix says", "run": expect},
        {"name": executes, "run": executes},
    ]


# YAML ------------------------------------------------------------------------------------------

_PLAIN = re.compile(r"[A-Za-z_./~$][A-Za-z0-9_./~@*= -]*[A-Za-z0-9_./*]|[A-Za-z]")
_WORDS = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n", "~"})


def to_yaml(value: Any, indent: int = 0) -> str:
    """Mappings, lists, texts, numbers and truth values as YAML, in the order given."""
    pad = "  " * indent
    lines = []
    if isinstance(value, Mapping):
        for key, item in value.items():
            lines.append(f"{pad}{key}:{_item(item, indent + 1)}")
    else:
        for item in value:
            if isinstance(item, Mapping):
                inner = to_yaml(item, indent + 1)
                lines.append(f"{pad}- {inner.lstrip(' ')}".rstrip("\n"))
            else:
                lines.append(f"{pad}- {_scalar(item)}")
    return "".join(f"{line}\n" for line in lines)


def _item(value: Any, indent: int) -> str:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return f" [{', '.join(map(_scalar, value))}]"
    if isinstance(value, (Mapping, list)):
        return "\n" + to_yaml(value, indent).rstrip("\n")
    return "" if value is None else f" {_scalar(value)}"


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    if isinstance(value, int):
        return text
    plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    return text if plain else json.dumps(text, ensure_ascii=False)


# The page --------------------------------------------------------------------------------------


def page(matrix: Matrix) -> str:
    """The whole of docs/ci.md."""
    lines = [
        "# Where attnplat is run",
        "",
        "Made from `ci/matrix.toml` by `make generate`; do not edit.",
        "",
        "A runner first shows that it is the machine in its row (`ci/expect`), then executes what",
        "anybody can execute at home. `seen` is taken from the conformance records in",
        "`conformance/records`: where it says *not yet run*, nothing here has been shown on such a",
        "machine, whatever the declarations say.",
        "",
        "| runner | machine | device | executes | when | seen |",
        "|---|---|---|---|---|---|",
    ]
    seen = _seen()
    for runner in matrix.runners:
        last = seen.get(runner.device) or seen.get(f"cpu:{runner.at_least}") or "not yet run"
        last = last if runner.executes != "ci/ipex" else _seen_ipex()
        lines.append(
            f"| {runner.name} | {runner.what} | `{runner.device}` | `{runner.executes}` | "
            f"{', '.join(runner.when)} | {last} |"
        )
    lines += [
        "",
        f"Python {', '.join(matrix.pythons)}: all of them on `{matrix.runners[0].name}`, and",
        "everywhere the torch-free half of the tests with each that is found.",
        f"torch {', '.join(matrix.torches)}: `ci/run --torch VERSION install unit execution`;",
        "every other job has the version in `ci/constraints.txt`.",
        "",
        "The workflows themselves have not yet been run: there is no hosting for them. What they",
        "execute has been, on the machines under `seen`.",
    ]
    return "\n".join(lines) + "\n"


def _seen() -> dict[str, str]:
    """Device -> the backends with a conformance record there, and the newest date."""
    found: dict[str, tuple[str, set[str]]] = {}
    for path in sorted(RECORDS.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        device = f"{record['platform']}:{record['arch']}"
        date, names = found.get(device, ("", set()))
        found[device] = (max(date, record["date"]), names | {record["backend"]})
    return {
        device: f"{date}: {', '.join(sorted(names))}" for device, (date, names) in found.items()
    }


def _seen_ipex() -> str:
    dates = [json.loads(path.read_text())["date"] for path in RECORDS.glob("IPEX-*.json")]
    return f"{max(dates)}: IPEX" if dates else "not yet run; its double in every run"


def differences(made: Mapping[str, str]) -> list[str]:
    """The files that are not as they should be, those that should not be there included."""
    stale = [
        name
        for name, text in made.items()
        if not (ROOT / name).is_file() or (ROOT / name).read_text(encoding="utf-8") != text
    ]
    there = (path.relative_to(ROOT).as_posix() for path in (ROOT / WORKFLOWS).glob("*.y*ml"))
    return [*stale, *(name for name in there if name not in made)]


def write(made: Mapping[str, str], stale: Iterable[str]) -> None:
    """Rewrite what is stale."""
    for name in stale:
        path = ROOT / name
        if name not in made:
            path.unlink()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(made[name], encoding="utf-8")
        print(f"workflows: rewrote {name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--check", action="store_true")
    mode.add_argument("--write", action="store_true")
    options = parser.parse_args()
    made = workflows(read_matrix(MATRIX.read_text(encoding="utf-8")))
    stale = differences(made)
    if options.write:
        write(made, stale)
    else:
        for name in stale:
            print(f"workflows: {name} is not what ci/matrix.toml says; run make generate")
    print(f"workflows: {len(made)} files; those that were stale: {len(stale)}")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
