"""Runs the tests marked `gpu` and says honestly how many really ran."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
NOTHING_COLLECTED = 5


def verdict(status: int, total: int, skipped: int) -> tuple[int, str]:
    """Exit code and closing sentence for pytest's exit code and counts.

    pytest ends with 5 when it selected no test and with 0 when every test skipped itself;
    neither is a device that passed.
    """
    if status == NOTHING_COLLECTED or (status == 0 and total == 0):
        return NOTHING_COLLECTED, "FAILED: no test was selected, so nothing ran"
    if status != 0:
        return status, f"FAILED: pytest ended with {status}"
    if skipped == total:
        return NOTHING_COLLECTED, f"FAILED: all {total} selected tests were skipped"
    return 0, f"passed: {total - skipped} tests ran, {skipped} were skipped"


def read_counts(report: Path) -> tuple[int, int]:
    """(tests, skipped) of a JUnit report; zeros when pytest wrote none."""
    if not report.exists():
        return 0, 0
    suites = list(ElementTree.parse(report).iter("testsuite"))
    tests, skipped = (sum(int(s.get(key, 0)) for s in suites) for key in ("tests", "skipped"))
    return tests, skipped


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", f"--junitxml={report}"]
        arguments = sys.argv[1:] or ["tests"]
        status = subprocess.run([*command, *arguments], cwd=ROOT, check=False).returncode
        code, sentence = verdict(status, *read_counts(report))
    print(f"ci/device: {sentence}")
    return code


if __name__ == "__main__":
    sys.exit(main())
