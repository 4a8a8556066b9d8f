"""The scripts in ci/ report what is wrong, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import attnplat
from ci import check_install, device_tests, full_tests, generated

ROOT = Path(__file__).resolve().parents[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def script(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    "path", ["ci/run", "ci/setup", "ci/find-python", "ci/device", "ci/expect", "ci/ipex", ".ci/run"]
)
def test_scripts_are_executable_bash_without_syntax_errors(path: str) -> None:
    assert os.access(ROOT / path, os.X_OK)
    done = script("bash", "-n", path)
    assert (done.returncode, done.stderr) == (0, "")


def test_find_python_finds_this_version_and_refuses_one_that_nobody_has() -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = script("ci/find-python", version)
    assert found.returncode == 0, found.stderr
    said = script(found.stdout.strip(), "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
    assert said.stdout.strip() == version
    refused = script("ci/find-python", "3.99")
    assert refused.returncode == 1
    assert "Python 3.99" in refused.stderr


def test_an_unknown_phase_is_refused_with_the_known_ones() -> None:
    done = script("ci/run", "tests")
    assert done.returncode == 2
    assert "unknown phase 'tests'; known: install lint types" in done.stderr


def test_the_device_report_fails_exactly_where_there_is_no_device() -> None:
    done = script(sys.executable, "ci/device_report.py")
    assert (done.returncode == 0) == ("\ndevice 0: " in done.stdout)
    assert (done.returncode == 1) == ("ci/device: FAILED: " in done.stdout)


# (pytest's exit code, tests, skipped): exit code and a part of what is said
VERDICTS = {
    (0, 5, 0): (0, "passed: 5 tests ran, 0 were skipped"),
    (0, 5, 4): (0, "passed: 1 tests ran, 4 were skipped"),
    (0, 5, 5): (5, "FAILED: all 5 selected tests were skipped"),
    (0, 0, 0): (5, "FAILED: no test was selected"),
    (5, 0, 0): (5, "FAILED: no test was selected"),
    (1, 5, 0): (1, "FAILED: pytest ended with 1"),
    (2, 0, 0): (2, "FAILED: pytest ended with 2"),
}


@pytest.mark.parametrize("outcome", VERDICTS, ids=str)
def test_a_device_passes_only_if_a_test_ran_and_none_failed(outcome: tuple[int, int, int]) -> None:
    code, sentence = device_tests.verdict(*outcome)
    expected_code, expected = VERDICTS[outcome]
    assert code == expected_code
    assert expected in sentence


def test_pins_other_than_exact_ones_are_refused() -> None:
    assert check_install.read_pins("# c\nPy_YAML==6.0  # why\n\n") == {"py-yaml": "6.0"}
    for line in ("torch>=2.8", "torch", "torch==2.13.0+cpu", "torch @ file:///wheels/torch"):
        with pytest.raises(ValueError, match="line 1"):
            check_install.read_pins(line)


INSTALLED = {"torch": "2.13.0+cpu", "rich": "15.0.0"}
# (installed, torch_free, ci): what must be reported
ENVIRONMENTS: dict[str, tuple[dict[str, str], bool, bool, list[str]]] = {
    "as pinned": (INSTALLED, False, True, []),
    "another version": (
        {**INSTALLED, "rich": "14.0.0"},
        False,
        False,
        ["rich is 14.0.0, the constraints say 15.0.0"],
    ),
    "no torch": ({"rich": "15.0.0"}, False, False, ["torch is not installed"]),
    "no torch where none belongs": ({"rich": "15.0.0"}, True, True, []),
    "torch where none belongs": (
        INSTALLED,
        True,
        False,
        ["torch is installed in the torch-free environment"],
    ),
    "CUDA libraries in CI": (
        {**INSTALLED, "nvidia-cublas": "13.0", "cuda-toolkit": "13.0", "nvidia-ml-py": "13.1"},
        False,
        True,
        ["pip took a CUDA build of torch: cuda-toolkit, nvidia-cublas"],
    ),
    "CUDA libraries on one's own machine": (
        {**INSTALLED, "nvidia-cublas": "13.0"},
        False,
        False,
        [],
    ),
}


@pytest.mark.parametrize("claim", ENVIRONMENTS)
def test_an_environment_that_is_not_as_pinned_is_reported(claim: str) -> None:
    installed, torch_free, ci, expected = ENVIRONMENTS[claim]
    pins = {"torch": "2.13.0", "rich": "15.0.0"}
    assert check_install.problems(installed, pins, torch_free=torch_free, ci=ci) == expected


def test_a_stale_block_is_rewritten_and_a_current_one_left_alone() -> None:
    stale = "a\n<!-- generated: make help -->\n```text\nold\n```\nb\n```\nnot ours\n```\n"
    fresh, count = generated.regenerate(stale)
    assert count == 1
    assert "make test" in fresh
    assert "old" not in fresh
    assert fresh.endswith("b\n```\nnot ours\n```\n")
    assert generated.regenerate(fresh) == (fresh, 1)


def test_a_block_may_name_known_programs_only() -> None:
    with pytest.raises(SystemExit, match="'rm' is not one of attnplat, documents, make"):
        generated.run("rm -rf nothing")


# --- records of the full tests ---------------------------------------------------------------

RECORD: dict[str, Any] = {
    "schema": 1,
    "date": "2026-01-31T12:00:00+00:00",
    "version": "0.1.0",
    "sources": "0" * 64,
    "machine": {},
    "packages": {},
    "suites": [
        {"name": "all", "passed": 3, "failed": 0, "errors": 0, "skipped": 1},
        {"name": "other", "not_run": "no such interpreter"},
    ],
    "outcome": "passed",
}
NAME = "2026-01-31-00000000.json"
# a change to the record: a part of what must be reported
BROKEN_RECORDS: dict[str, tuple[dict[str, Any], str]] = {
    "a field is missing": ({"sources": None}, "sources is None, not str"),
    "another schema": ({"schema": 2}, "schema is 2"),
    "no date": ({"date": "yesterday"}, "date is 'yesterday', not an ISO date"),
    "another day": ({"date": "2026-02-01T00:00:00+00:00"}, "does not begin with the date"),
    "a version that never was": ({"version": "0.0.9"}, "version 0.0.9 is not in the changelog"),
    "no hash": ({"sources": "abc"}, "sources is not a SHA-256"),
    "not passed": ({"outcome": "failed"}, "outcome is 'failed'"),
    "a failure under a pass": (
        {"suites": [{"name": "all", "passed": 3, "failed": 1, "errors": 0, "skipped": 0}]},
        "suite all: 1 failed, 0 errors",
    ),
    "a count is missing": ({"suites": [{"name": "all", "passed": 3}]}, "suite all: failed is None"),
    "a reason is missing": (
        {"suites": [*RECORD["suites"], {"name": "x", "not_run": ""}]},
        "suite x was not run and says not why",
    ),
    "nothing ran": ({"suites": RECORD["suites"][1:]}, "no suite passed a test"),
}


def test_a_good_record_is_accepted() -> None:
    assert full_tests.problems(RECORD, name=NAME, versions=["0.1.0"]) == []


@pytest.mark.parametrize("claim", BROKEN_RECORDS)
def test_a_broken_record_is_reported(claim: str) -> None:
    change, expected = BROKEN_RECORDS[claim]
    found = full_tests.problems({**RECORD, **change}, name=NAME, versions=["0.1.0"])
    assert any(expected in problem for problem in found), found


def read_records() -> dict[str, dict[str, Any]]:
    folder = ROOT / "ci" / "records"
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def test_every_committed_record_is_sound() -> None:
    versions = full_tests.changelog_versions(CHANGELOG)
    for name, record in read_records().items():
        assert full_tests.problems(record, name=name, versions=versions) == [], name


def test_a_release_without_a_record_is_reported() -> None:
    changelog = "## [0.2.0] - unreleased\n## [0.1.1] - 2026-03-01\n## [0.1.0] - 2026-02-01\n"
    assert full_tests.unrecorded_releases([RECORD], changelog) == ["0.1.1"]


def test_the_full_tests_leave_no_folder_of_tests_out() -> None:
    named = {arguments[0] for arguments in full_tests.TORCH_SUITES.values()}
    folders = {
        f"tests/{path.name}" for path in (ROOT / "tests").iterdir() if any(path.rglob("test_*.py"))
    }
    assert named - {full_tests.NATIVE} == folders
    assert (ROOT / full_tests.NATIVE).is_file()


def test_a_suite_that_passed_is_not_run_again_and_one_that_failed_is(tmp_path: Path) -> None:
    test = tmp_path / "test_it.py"
    suite = full_tests.Suite("it", Path(sys.executable), (str(test), "-p", "no:cacheprovider"))
    kept = tmp_path / "kept"
    for body, failed in (("assert False", 1), ("assert True", 0), ("assert False", 0)):
        test.write_text(f"def test_it():\n    {body}\n", encoding="utf-8")
        assert full_tests.passed_or_run(suite, kept)["failed"] == failed


def test_every_release_in_the_changelog_has_a_record_of_the_full_tests() -> None:
    assert full_tests.unrecorded_releases(read_records().values(), CHANGELOG) == []


def test_the_changelog_speaks_of_this_version() -> None:
    assert attnplat.__version__ in full_tests.changelog_versions(CHANGELOG)


def test_the_sources_hash_sees_a_change_a_move_and_nothing_else(tmp_path: Path) -> None:
    def tree(files: dict[str, str]) -> str:
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        return full_tests.sources_hash(root)

    base = tree({"attnplat/a.py": "1", "tests/t.py": "2"})
    assert tree({"tests/t.py": "2", "attnplat/a.py": "1"}) == base
    assert tree({"attnplat/a.py": "1", "tests/t.py": "2", "docs/x.md": "3"}) == base
    assert tree({"attnplat/a.py": "9", "tests/t.py": "2"}) != base
    assert tree({"attnplat/b.py": "1", "tests/t.py": "2"}) != base
    assert tree({"attnplat/a.py": "1", "tests/t.py": "2", "tests/u.json": ""}) != base
