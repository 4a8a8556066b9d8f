"""`attnplat cache` shows what is kept and removes what is of no more use, and nothing else."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from attnplat.cli.main import main
from attnplat.storage import Store


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with an entry in use, one of another version, and a damaged one."""
    monkeypatch.setenv("ATTNPLAT_CACHE_DIR", str(tmp_path))
    probes = Store(tmp_path, "probes")
    probes.write("current", 1, packages={"pytest": metadata.version("pytest")}, about="pytest")
    probes.write("older", 2, packages={"pytest": "0.0.1"})
    Store(tmp_path, "models").find_or_make("m", lambda f: (f / "w").write_text("x") and None)
    (tmp_path / "models" / "m" / "w").write_text("y")
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["cache", "--json", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    return {entry["key"]: entry for entry in found["entries"]}


def test_every_entry_is_told_with_what_is_wrong_with_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = told(capsys)
    installed = metadata.version("pytest")
    assert {key: entry["problem"] for key, entry in found.items()} == {
        "m": "damaged",
        "current": "",
        "older": f"made with pytest 0.0.1; installed is {installed}",
    }
    assert main(["cache"]) == 0
    out = capsys.readouterr().out
    assert "3 entries" in out and "cache --clean removes 2 of them" in out


def test_cleaning_keeps_what_is_in_use(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "--clean"]) == 0
    assert "removed 2 of 3 entries" in capsys.readouterr().out
    assert set(told(capsys)) == {"current"}


def test_clearing_may_be_limited_to_a_kind(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    removed = told(capsys, "probes", "--clear")
    assert {key for key, entry in removed.items() if entry["removed"]} == {"current", "older"}
    assert set(told(capsys)) == {"m"}


def test_an_unknown_kind_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "model"]) == 2
    assert "did you mean 'models'?" in capsys.readouterr().err


def test_a_cache_that_is_not_there_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ATTNPLAT_CACHE_DIR", str(tmp_path / "none"))
    assert told(capsys) == {}
    assert not (tmp_path / "none").exists()
