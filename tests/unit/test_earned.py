"""A mark is what records of the device's class have earned, and says which, or what is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from attnplat.backends.backend import Backend, Mark
from attnplat.cli.main import main
from attnplat.config.layer import MhaConfig
from attnplat.config.names import Operation
from attnplat.platforms import platform_for
from attnplat.platforms.device import DeviceInfo
from attnplat.platforms.earned import Digest, Earned, earned
from attnplat.platforms.feature_tables import feature_tables
from attnplat.platforms.plugin_backend import of_plugin

MHA = frozenset({Operation.MHA})
KNOWN = Backend(name="OURS", summary="", serves=MHA)
ADAPTED = replace(KNOWN, loads="module:Class")
INTERPRETED = replace(ADAPTED, mark=Mark.INTERPRETED)
FOREIGN = of_plugin(ADAPTED, "a-plugin 1.0")

AVX2 = Digest("OURS", "cpu", "avx2", "avx2.json", 0, {"mha": frozenset({"sinks", "float32"})})
AMX = AVX2._replace(arch="amx", record="amx.json")
SM90 = AVX2._replace(platform="cuda", arch="sm90", record="sm90.json")
FAILED = AMX._replace(failed=2)


class Question(NamedTuple):
    """A backend, the records that there are, a device, and the mark and words that it gets."""

    backend: Backend
    digests: tuple[Digest, ...]
    device: str
    mark: str
    because: str
    operation: Operation = Operation.MHA
    wants: frozenset[str] = frozenset()


NONE = "adapter present, verified by no conformance record of the device's class"
QUESTIONS = {
    "a record of the class": Question(
        ADAPTED, (AVX2,), "cpu:avx2", "V", "verified by the record avx2.json"
    ),
    "the record of the class among others": Question(
        ADAPTED, (AVX2, AMX, SM90), "cuda:sm90", "V", "verified by the record sm90.json"
    ),
    "what the record has not shown is told": Question(
        *(ADAPTED, (AVX2,), "cpu:avx2", "V"),
        "verified by the record avx2.json, in which no case has alibi, bfloat16",
        wants=frozenset({"sinks", "bfloat16", "alibi"}),
    ),
    "what was interpreted is verified by a record": Question(
        INTERPRETED, (AVX2,), "cpu:avx2", "V", "verified by the record avx2.json"
    ),
    "a record of another class": Question(
        ADAPTED, (AVX2, SM90), "cpu:amx", "D", f"{NONE}; there is one of cpu:avx2, cuda:sm90"
    ),
    "no record": Question(ADAPTED, (), "cpu:avx2", "D", NONE),
    "a record of another backend": Question(
        ADAPTED, (AVX2._replace(backend="THEIRS"),), "cpu:avx2", "D", NONE
    ),
    "a record with failures": Question(
        *(ADAPTED, (FAILED,), "cpu:amx", "D"),
        f"{NONE}; amx.json has 2 failed cases and earns nothing on cpu",
    ),
    "a failure on another class of the platform": Question(
        *(ADAPTED, (AVX2, FAILED._replace(failed=1)), "cpu:avx2", "D"),
        f"{NONE}; amx.json has 1 failed case and earns nothing on cpu",
    ),
    "a failure on another platform": Question(
        ADAPTED, (FAILED, SM90), "cuda:sm90", "V", "verified by the record sm90.json"
    ),
    "another operation": Question(
        *(ADAPTED, (AVX2,), "cpu:avx2", "D"),
        f"{NONE}; avx2.json shows no mla",
        operation=Operation.MLA,
    ),
    "interpreted, no record": Question(
        INTERPRETED, (), "cpu:avx2", "I", "compiled and interpreted, not yet run on hardware"
    ),
    "no adapter": Question(KNOWN, (), "cpu:avx2", "K", "facts known, no adapter yet"),
    "a plugin's backend of a recorded name": Question(FOREIGN, (AVX2,), "cpu:avx2", "D", NONE),
}


@pytest.mark.parametrize("case", QUESTIONS)
def test_a_mark_says_which_record_earned_it_or_what_is_missing(case: str) -> None:
    asked = QUESTIONS[case]
    platform, arch = asked.device.split(":")
    device = DeviceInfo(platform=platform, arch=arch)
    proof = Earned(asked.digests).proof(asked.backend, asked.operation, device, asked.wants)
    assert (str(proof.mark), proof.because) == (asked.mark, asked.because)


def test_the_file_holds_what_was_written(tmp_path: Path) -> None:
    found = Earned((AVX2, FAILED, SM90))
    (tmp_path / "earned.json").write_text(found.to_json())
    assert Earned.read(tmp_path / "earned.json") == found
    (tmp_path / "empty.json").write_text(Earned(()).to_json())
    assert Earned.read(tmp_path / "empty.json") == Earned(())


def test_docs_and_selections_mark_alike() -> None:
    """What a table says of a class of devices, a selection on such a device says too."""
    compared = 0
    for digest in earned().digests:
        platform = platform_for(f"{digest.platform}:{digest.arch}")
        tables = {t.title: t.rows for t in feature_tables(digest.platform, earned=earned())}
        for operation in digest.shown:
            rows = {row[0]: row[1] for row in tables[f"{digest.platform}: {operation}"]}
            for name, cell in rows.items():
                on_class = cell.startswith("V (") and digest.arch in cell[3:-1].split(", ")
                here = platform.mark(name, Operation(operation))
                assert (here == Mark.VERIFIED) == on_class, (name, cell)
                compared += on_class
    assert compared >= len(earned().digests)


EXPLAINED = {
    "cuda:sm90": ("TORCH_SDPA [V]", "[V] verified by the record TORCH_SDPA-cuda-sm90-"),
    "cuda:sm80": ("TORCH_SDPA [D]", "; there is one of cpu:avx2, cuda:sm90"),
    "rocm:gfx942": ("TORCH_SDPA [D]", "[D] adapter present, verified by no conformance record"),
    "cpu:avx2": ("TORCH_SDPA [V]", "[V] verified by the record TORCH_SDPA-cpu-avx2-"),
}


@pytest.mark.parametrize("device", EXPLAINED)
def test_an_explanation_says_what_is_behind_the_mark(
    device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["explain", "--device", device, "--assume-packages", "all", "--head-size", "64"]
    asked += ["-ac.backend", "TORCH_SDPA"]
    marked, because = EXPLAINED[device]
    assert main(asked) == 0
    text = capsys.readouterr().out
    assert f"-> {marked}" in text and because in text
    assert main([*asked, "--json"]) == 0
    (layer,) = json.loads(capsys.readouterr().out)[0]["layers"]
    assert f"TORCH_SDPA [{layer['mark']}]" == marked
    assert f"[{layer['mark']}] {layer['mark_because']}" in text


def test_a_plan_says_it_once_for_each_backend() -> None:
    wide = MhaConfig(head_size=64, num_heads=8, num_kv_heads=8)
    plan = platform_for("cpu:avx2", assume="all").plan_model([wide, wide.replace(head_size=128)])
    assert plan.explain().count("CPU_ATTN [V] verified by the record CPU_ATTN-cpu-avx2-") == 1


def test_tables_are_marked_without_a_folder_of_records(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["backends", "--platform", "cpu", "--operation", "mha", "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)
    rows = {row["backend"]: row for row in table["rows"]}
    assert rows["TORCH_SDPA"]["mark"] == "V (avx2)" and rows["ZENTORCH"]["mark"] == "D"


def test_the_records_are_read_by_nobody_who_prints_no_mark() -> None:
    code = (
        "import sys, attnplat; p = attnplat.platform_for('sm90');"
        "p.select(attnplat.MhaConfig(head_size=64));"
        "sys.exit('attnplat.platforms.earned' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
