"""Records say what has been shown, and the committed pages say what the records say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attnplat.config.backend_names import BackendName
from attnplat.errors import ModelFileError
from attnplat.platforms.earned import DIGESTS, Digest, Earned
from attnplat.platforms.feature_tables import backends_document, feature_tables
from attnplat.testing import CASES, run_conformance
from attnplat.testing.documents import UNKILLED, conformance_page, numerics_page
from attnplat.testing.mutations.campaign import ASKED, Kills
from attnplat.testing.mutations.planted import PLANTED
from attnplat.testing.records import (
    Record,
    earned_by,
    failing,
    problems,
    read_records,
    record_of,
    verified,
    write_record,
)

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "conformance" / "records"
COMMITTED = read_records(RECORDS)


def test_a_report_becomes_a_record_and_comes_back(tmp_path: Path) -> None:
    report = run_conformance("REFERENCE", ids=["A10", "L1"])
    path = write_record(record_of(report), tmp_path)
    (record,) = read_records(tmp_path)
    assert path.name == record.name
    assert path.name.startswith("REFERENCE-cpu-")
    assert (record.backend, record.platform, record.passed) == ("REFERENCE", "cpu", ("A10",))
    assert record.values["not applicable"].keys() == {"L1"}
    assert verified([record]) == {("REFERENCE", "cpu"): record}


def record(date: str = "2026-01-01", **changes: Any) -> Record:
    report = {
        "schema": 1, "date": date, "attnplat": "0.1.0", "backend": "REFERENCE",
        "platform": "cpu", "arch": "avx2", "device_name": "", "system": "Linux x86_64",
        "packages": {}, "level": "quick", "seed": 0, "passed": ["A1"], "partly refused": {},
        "failed": {}, "refused": {}, "not applicable": {}, "checks": 1, "errors": {},
        "shown": {},
        "seconds": 1.0,
    }  # fmt: skip
    return Record(f"{date}.json", {**report, **changes})


def test_a_failure_on_one_architecture_is_one_of_the_platform() -> None:
    good, bad = record(), record(arch="amx", failed={"D3": "off"})
    assert verified([good, bad]) == {}
    assert failing([good, bad]) == {("REFERENCE", "cpu"): bad}
    mended = record("2026-02-01", arch="amx")
    assert verified([good, bad, mended]).keys() == {("REFERENCE", "cpu")}


@pytest.mark.parametrize(
    ("change", "said"),
    [({"passed": []}, "no case passed"), ({"schema": 9}, "schema"), ({"date": 5}, "date")],
)
def test_what_is_no_record_is_told(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    values = {**record().values, **change}
    assert said in " ".join(problems(values))
    (tmp_path / "x.json").write_text(json.dumps(values))
    with pytest.raises(ModelFileError, match=r"x\.json"):
        read_records(tmp_path)


def test_every_committed_record_is_about_known_backends_and_cases_and_shows_no_failure() -> None:
    assert COMMITTED
    known = {case.id for case in CASES}
    for found in COMMITTED:
        assert found.backend in BackendName.__members__
        assert not found.failed, found.name
        for name in ("passed", "refused", "not applicable", "partly refused"):
            assert set(found.values[name]) <= known, found.name
        for name, worst in found.values["errors"].items():
            # Float64 sums of the longest sequences may be off by a rounding for every key.
            roundings = 131_072 * 2.0**-53 if name == "float64" else 0.0
            assert worst["out"] <= max(worst["out allowed"], roundings)
            assert worst["lse"] <= worst["lse allowed"]


def test_the_portable_backends_are_verified_on_the_cpu() -> None:
    assert {("REFERENCE", "cpu"), ("TORCH_SDPA", "cpu")} <= verified(COMMITTED).keys()


PAGES = {"conformance": conformance_page(Kills.read()), "numerics": numerics_page(COMMITTED)}


@pytest.mark.parametrize("page", PAGES)
def test_the_page_is_current(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    assert text == PAGES[page], "stale: make generate"


def test_marks_in_the_docs_are_those_of_the_records() -> None:
    text = (ROOT / "docs" / "backends.md").read_text(encoding="utf-8")
    assert text == backends_document(earned_by(COMMITTED)), "stale: make generate"
    for digest in earned_by(COMMITTED).digests:
        for operation in digest.shown:
            table = text.split(f"### {digest.platform}: {operation}\n")[1].split("###")[0]
            (row,) = [line for line in table.splitlines() if f"| {digest.backend} | V (" in line]
            assert digest.arch in row.split(" | ")[1]


def test_marks_that_are_installed_are_those_of_the_records() -> None:
    assert DIGESTS.read_text(encoding="utf-8") == earned_by(COMMITTED).to_json(), (
        "stale: make generate"
    )
    assert Earned.read() == earned_by(COMMITTED)


def test_no_backend_is_verified_by_what_no_record_shows() -> None:
    one = Digest("TORCH_SDPA", "cpu", "avx2", "x.json", 0, {"mha": frozenset({"sinks"})})
    tables = feature_tables("cpu", earned=Earned((one,)))
    rows = {row[0]: dict(zip(t.headers, row, strict=True)) for t in tables for row in t.rows
            if t.title == "cpu: mha"}  # fmt: skip
    assert rows["TORCH_SDPA"]["mark"] == "V (avx2)"
    assert rows["TORCH_SDPA"]["sinks"] == "yes, V"
    assert rows["TORCH_SDPA"]["MM prefix"] == "yes, D"
    assert rows["REFERENCE"]["mark"] == "D"


def test_every_case_is_failed_by_a_planted_bug_or_says_why_none_can() -> None:
    kills = Kills.read()
    bare = [case.id for case in ASKED if not kills.bugs_of(case.id) and case.id not in UNKILLED]
    assert not bare
    assert not [case for case in UNKILLED if kills.bugs_of(case)]


def test_every_planted_bug_has_been_caught() -> None:
    kills = Kills.read()
    assert len(PLANTED) >= 40
    assert {bug.name for bug in PLANTED} == kills.planted.keys()
    assert not [name for name, cases in kills.planted.items() if not cases]
