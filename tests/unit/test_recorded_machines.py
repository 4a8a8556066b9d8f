"""`attnplat doctor` on machines that are not here: the truth, in the form that its schema says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

import attnplat.cli
from attnplat.cli import doctor
from attnplat.cli.examination import Examination, Trial, examine
from attnplat.cli.findings import findings
from attnplat.platforms.distributions import Installed
from attnplat.platforms.plugins import Plugin, Problem
from attnplat.platforms.probe_outcome import ProbeKind
from tests.unit.recorded_machines import NAMES, Recorded, recorded

SCHEMA = json.loads((Path(attnplat.cli.__file__).parent / "doctor_schema.json").read_text())
VALIDATOR = Draft202012Validator(SCHEMA)
GIB = 2**30


class Truth(NamedTuple):
    """What doctor must say of a machine: the device used, its memory in GiB and cores, how many
    devices each platform has, and a part of every finding with a part of its fix."""

    used: str
    memory: float
    cores: int | None
    counts: dict[str, int]
    told: tuple[tuple[str, str], ...] = ()


TRUTHS = {
    "h100_x8": Truth("cuda:sm90", 79.6, None, {"cuda": 8}),
    "h200_vm": Truth("cuda:sm90", 140.4, None, {"cuda": 1}),
    "gb200_x4": Truth("cuda:sm100", 185.0, None, {"cuda": 4}),
    "jetson_orin": Truth("cuda:sm87", 61.4, None, {"cuda": 1}),
    "jetson_xavier_without_nvml": Truth(
        "cuda:sm72",
        29.9,
        None,
        {"cuda": 1},
        (("a Jetson by its release file", "NVIDIA_DRIVER_CAPABILITIES"),),
    ),
    "a100_mig_slice": Truth(
        "cuda:sm80", 19.5, None, {"cuda": 1}, (("the time of 8 of 96", "OMP_NUM_THREADS"),)
    ),
    "wsl_nvidia": Truth(
        "cpu:avx512_bf16", 31.3, 24, {}, (("Driver Not Loaded); torch was not asked", "--probe"),)
    ),
    "mi300x_x8": Truth(
        "rocm:gfx942", 192.0, None, {"rocm": 8}, (("amd-aiter is installed", "ATTNPLAT_AITER=1"),)
    ),
    "mi355x_two_of_eight": Truth("rocm:gfx950", 288.0, None, {"rocm": 1}),
    "rx9070xt_desktop": Truth(
        "rocm:gfx1200",
        15.9,
        None,
        {"rocm": 1},
        (("HSA_OVERRIDE_GFX_VERSION=12.0.0 makes a gfx1201 pass for a gfx1200", "unset it"),),
    ),
    "wsl_amd": Truth(
        "cpu:avx2", 15.6, 16, {}, (("shows no KFD topology; torch was not asked", "--probe"),)
    ),
    "amx_vm_in_container": Truth(
        "cpu:amx", 16.0, 4, {}, (("the time of 3.5 of 32", "OMP_NUM_THREADS"),)
    ),
    "apple_m4": Truth("cpu:neon_bf16", 64.0, 16, {}),
    "graviton4": Truth("cpu:neon_bf16", 123.9, 16, {}),
    "windows_laptop": Truth(
        "cuda:sm89", 8.0, None, {"cuda": 1}, (("Windows does not tell what the processor", ""),)
    ),
    "updated_driver": Truth(
        "cpu:avx2", 62.7, 16, {}, (("Driver/library version mismatch", "reboot"),)
    ),
    "three_kinds": Truth(
        "cuda:sm120",
        31.8,
        None,
        {"cuda": 2, "rocm": 1},
        (
            ("rocm:gfx1100 is here, and torch cannot drive it", "a build of torch for rocm"),
            ("the distribution aiter is an unrelated package", ""),
        ),
    ),
    "cpu_pod_on_a_gpu_host": Truth(
        "cpu:amx",
        2.0,
        1,
        {},
        (
            ("its devices are not in this container", "--gpus all"),
            ("the time of 0.5 of 64", "OMP_NUM_THREADS"),
            ("torch is not installed", "pip install torch"),
        ),
    ),
    "dgx_spark": Truth("cuda:sm121", 121.7, None, {"cuda": 1}),
}


def looked_at(name: str, folder: Path, trial: Trial | None = None) -> Examination:
    machine = recorded(name, folder)
    if trial is not None:  # what is installed there cannot be tried here
        machine = machine._replace(installed=Installed({}))
    return examine(machine, trial)


def report(examination: Examination) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(doctor.report(examination, findings(examination))))
    return made


def test_every_recorded_machine_has_its_truth() -> None:
    assert set(NAMES) == set(TRUTHS)
    assert len(NAMES) >= 12


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_machine_is_told_as_it_is(name: str, tmp_path: Path) -> None:
    truth, examination = TRUTHS[name], looked_at(name, tmp_path)
    used = examination.device
    assert used is not None
    assert (str(used), used.cores) == (truth.used, truth.cores)
    assert used.memory_bytes is not None
    assert used.memory_bytes / GIB == pytest.approx(truth.memory, abs=0.1)
    counts = {p: len(d.devices) for p, d in examination.detections.items() if p != "cpu"}
    assert {p: n for p, n in counts.items() if n} == truth.counts
    found = findings(examination)
    for text, fix in truth.told:
        (finding,) = [f for f in found if text in f.text]
        assert fix in finding.fix
    kernels = [f for f in found if "own kernels" in f.text]
    assert len(found) == len(truth.told) + len(kernels), found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("trial", [None, Trial()], ids=["metadata", "probe"])
def test_its_report_is_of_the_committed_form(
    name: str, trial: Trial | None, tmp_path: Path
) -> None:
    VALIDATOR.validate(report(looked_at(name, tmp_path, trial)))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_started_to_look_at_it_unless_asked_to(name: str, tmp_path: Path) -> None:
    machine = recorded(name, tmp_path)
    examine(machine)
    probes = machine.probes["cuda"]
    assert isinstance(probes, Recorded)
    assert probes.torch_calls == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "used", "memory"),
    [("wsl_nvidia", "cuda:sm89", 24.0), ("wsl_amd", "rocm:gfx1100", 24.0)],
)
def test_where_the_driver_does_not_tell_torch_does_when_asked(
    name: str, used: str, memory: float, tmp_path: Path
) -> None:
    examination = looked_at(name, tmp_path, Trial())
    device = examination.device
    assert device is not None
    assert str(device) == used
    assert (device.memory_bytes or 0) / GIB == pytest.approx(memory, abs=0.1)
    assert "found by torch in a process of its own" in device.notes[-1]


@pytest.mark.parametrize("name", NAMES)
def test_torch_and_detection_agree_on_the_recorded_machines(name: str, tmp_path: Path) -> None:
    examination = looked_at(name, tmp_path, Trial())
    notes = [n for d in examination.detections.values() for n in d.notes if n.startswith("torch ")]
    failing = {"jetson_xavier_without_nvml": ["torch does not tell of cuda devices: exit code 1"]}
    assert [note.split(": ImportError")[0] for note in notes] == failing.get(name, [])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"devices": []}, "torch sees 0 cuda devices, and 4 were found"),
        (
            {"devices": [["NVIDIA GB200", [9, 0], 1, None]] * 4},
            "cuda:0 is sm100 (NVIDIA GB200), and torch calls it sm90",
        ),
        ({"devices": [["NVIDIA GB200", [10, 0], 1, None]] * 3}, "torch sees 3 cuda devices"),
        ({"vendor": None}, "torch does not tell of cuda devices: it is a build for processors"),
        ({"failure": "no answer within 60 s", "vendor": None}, "no answer within 60 s"),
    ],
)
def test_a_torch_that_sees_something_else_is_told_of(
    change: dict[str, Any], told: str, tmp_path: Path
) -> None:
    machine = recorded("gb200_x4", tmp_path)._replace(installed=Installed({}))
    probes = machine.probes["cuda"]
    changed = Recorded({**probes.answers, "torch": {**probes.answers["torch"], **change}})
    machine = machine._replace(probes=dict.fromkeys(machine.probes, changed))
    texts = [finding.text for finding in findings(examine(machine, Trial()))]
    assert any(told in text for text in texts), texts


def test_a_torch_for_other_devices_leaves_the_processor_in_use(tmp_path: Path) -> None:
    machine = recorded("h100_x8", tmp_path)
    answers = {**machine.probes["cuda"].answers, "packages": {"torch": "2.13.0+cpu"}}
    (tmp_path / "x.json").write_text(json.dumps(answers))
    inventory = type(machine.take_stock({})).assume({"torch": "2.13.0+cpu"})
    examination = examine(machine._replace(take_stock=lambda _: inventory))
    assert str(examination.device) == "cpu:amx"
    assert any("torch cannot drive it" in f.text for f in findings(examination))


# The schema itself ---------------------------------------------------------------------------


def test_the_schema_is_one_and_has_no_loose_ends() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    kinds = SCHEMA["$defs"]["probe"]["properties"]["kind"]["enum"]
    assert kinds == [str(kind) for kind in ProbeKind]
    for name, part in SCHEMA["$defs"].items():
        assert part["additionalProperties"] is False, name
        assert set(part["required"]) == set(part["properties"]), name


@pytest.mark.parametrize(
    "change",
    [
        {"device": {}},
        {"device": "cuda:sm90"},
        {"python": 3},
        {"surprise": 1},
        {"findings": [{"level": "note", "text": "x", "fix": ""}]},
        {"findings": [{"level": "error", "text": "", "fix": ""}]},
        {"devices": {"cuda": [], "cpu": []}},
        {"features": {"fa2": {"usable": "yes", "how": "x"}}},
        {"environment": {"PATH": "x"}},
    ],
)
def test_the_schema_refuses_what_is_not_of_its_form(change: dict[str, Any], tmp_path: Path) -> None:
    good = report(looked_at("apple_m4", tmp_path))
    with pytest.raises(ValidationError):
        VALIDATOR.validate({**good, **change})


def test_plugins_of_every_kind_are_of_the_committed_form(tmp_path: Path) -> None:
    bad = Problem("import", "it raises KeyError", "update it")
    plugins = (
        Plugin("a-plugin", "1.0", "a_plugin", ("A_ATTN",), ()),
        Plugin("b-plugin", "", "b_plugin", (), (), problem=bad, advice=bad),
    )
    examination = examine(recorded("graviton4", tmp_path)._replace(plugins=lambda: plugins))
    VALIDATOR.validate(report(examination))
    texts = [f.text for f in findings(examination)]
    assert "plugin b-plugin is set aside: it raises KeyError" in texts


def test_this_machines_report_is_of_the_committed_form() -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ATTNPLAT_", "VLLM_"))}
    for more in ({}, {"VLLM_ATTENTION_BACKEND": "FLASH_ATTN", "ATTNPLAT_CPU_ISA": "nonsense"}):
        done = subprocess.run(
            [sys.executable, "-m", "attnplat", "doctor", "--json"],
            env={**clean, **more},
            capture_output=True,
            text=True,
            timeout=60,
        )
        VALIDATOR.validate(json.loads(done.stdout))


def test_a_wrong_option_is_refused_by_name() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "attnplat", "doctor", "--fresh"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "--fresh goes with --probe" in done.stderr
