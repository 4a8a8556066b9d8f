"""The workflow files say what ci/matrix.toml says, and nothing that they should not."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from attnplat.platforms import simulate
from attnplat.platforms.names import parse_device_name
from ci import expect_device, workflows

ROOT = Path(__file__).resolve().parents[2]
TEXT = workflows.MATRIX.read_text(encoding="utf-8")
MATRIX = workflows.read_matrix(TEXT)
MADE = workflows.workflows(MATRIX)


def test_the_generated_files_are_current() -> None:
    assert workflows.differences(MADE) == [], "run make generate"


def test_the_matrix_has_every_kind_of_machine() -> None:
    assert {runner.name for runner in MATRIX.runners} == {
        *(f"cpu-{kind}" for kind in ("avx2", "avx512", "amx", "arm64", "ipex")),
        *(f"nvidia-{arch}" for arch in ("sm80", "sm90", "sm100", "sm120")),
        *(f"amd-{arch}" for arch in ("gfx942", "gfx950", "gfx1201")),
    }
    assert MATRIX.pythons == ("3.11", "3.12", "3.13")
    assert (MATRIX.torches[0], MATRIX.torches[-1]) == ("2.8", "newest")


@pytest.mark.parametrize("runner", MATRIX.runners, ids=lambda r: r.name)
def test_every_runner_is_a_device_that_attnplat_knows(runner: workflows.Runner) -> None:
    found = parse_device_name(runner.device)
    assert found.arch is not None and simulate(found.platform, found.arch).simulated
    assert os.access(ROOT / runner.executes, os.X_OK)


# a change to the text of the matrix: a part of the error
WRONG = {
    ('executes = "ci/device"', 'executes = "make"'): "executes make",
    ('when = ["demand"]', 'when = ["weekly"]'): "runs when",
    ('when = ["demand"]', "when = []"): "runs when",
    ('when = ["push", "schedule"]', 'when = ["pull_request"]'): "no pull request runs on it",
    ("timeout_minutes = 45", "timeout_minutes = 600"): "has 600 minutes",
    ('name = "cpu-amx"', 'name = "cpu-avx512"'): "two runners have one name",
    ("every_python = true", "any_python = true"): "unknown any_python",
}


@pytest.mark.parametrize("change", WRONG, ids=lambda change: change[1])
def test_a_matrix_that_cannot_be_is_refused(change: tuple[str, str]) -> None:
    assert change[0] in TEXT
    with pytest.raises(ValueError, match=WRONG[change]):
        workflows.read_matrix(TEXT.replace(*change))


def test_a_change_of_the_matrix_is_a_change_of_the_files() -> None:
    changed = workflows.read_matrix(TEXT.replace('"3.13"]', '"3.13", "3.14"]'))
    assert workflows.differences(workflows.workflows(changed)) == [
        ".github/workflows/ci.yml",
        "docs/ci.md",
    ]


def jobs() -> list[tuple[str, str, dict[str, Any]]]:
    yaml = pytest.importorskip("yaml")
    found = []
    for name, text in MADE.items():
        if name.endswith(".yml"):
            data = yaml.safe_load(text)
            found += [(name, job, {**body, "workflow": data}) for job, body in data["jobs"].items()]
    return found


def test_every_job_may_read_and_no_more_has_a_limit_and_runs_known_scripts() -> None:
    for name, job, body in jobs():
        workflow, where = body["workflow"], f"{name}: {job}"
        assert workflow["permissions"] == {"contents": "read"}, where
        assert workflow["concurrency"]["group"], where
        assert body["timeout-minutes"], where
        for step in body["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"actions/[a-z-]+@v[0-9]+", step["uses"]), where
            else:
                known = ("ci/", "make ", "${{ matrix.e")
                assert step["run"].startswith(known), (where, step)


def test_no_pull_request_reaches_a_machine_of_ones_own() -> None:
    for name, job, body in jobs():
        triggers = body["workflow"][True]  # YAML 1.1 reads `on` so
        rows = body.get("strategy", {}).get("matrix", {}).get("include", [body])
        labels = {label for row in rows for label in row.get("labels", body["runs-on"])}
        if "pull_request" in triggers:
            assert "self-hosted" not in labels, f"{name}: {job}"


def test_yaml_reads_back_what_was_written() -> None:
    yaml = pytest.importorskip("yaml")
    value = {
        "text": "a: b # c",
        "words": ["on", "3.10", "true", "x y", "*", "- a", ""],
        "number": 5,
        "truth": False,
        "nothing": None,
        "deep": [{"a": {"b": ["c"]}, "d": "'\"\\ü"}, {"e": "null"}],
    }
    assert yaml.safe_load(workflows.to_yaml(value)) == value


# what was promised, what is here: a part of what is wrong, or None
PROMISES = {
    ("cuda:sm90", False, ("cuda", "sm90")): None,
    ("cuda:sm90", False, ("cuda", "sm80")): "cuda:sm90 was promised, and here is cuda:sm80",
    ("cpu:avx512", True, ("cpu", "amx")): None,
    ("cpu:avx512", True, ("cpu", "avx2")): "lacks avx512",
    ("cpu:neon", True, ("cpu", "avx2")): "lacks",
}


@pytest.mark.parametrize("promise", PROMISES, ids=str)
def test_a_machine_is_what_its_labels_say(promise: tuple[str, bool, tuple[str, str]]) -> None:
    wanted, at_least, here = promise
    found = expect_device.problem(wanted, at_least, (simulate(*here),))
    expected = PROMISES[promise]
    assert found is None if expected is None else found is not None and expected in found


def test_a_device_that_is_not_there_is_told() -> None:
    found = expect_device.problem("rocm:gfx942", False, ())
    assert found == "rocm:gfx942 was promised, and no rocm device is here"
