"""`attnplat doctor` tells the truth, names the fix, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnplat.cli import examination
from attnplat.cli.examination import Examination
from attnplat.cli.findings import findings
from attnplat.cli.main import main
from attnplat.cli.tables import plain_table
from attnplat.config.env import Environment
from attnplat.platforms import current_platform
from attnplat.platforms.cpu import detect as cpu
from attnplat.platforms.cuda import detect as cuda
from attnplat.platforms.detection import Detection
from attnplat.platforms.device import DeviceInfo
from attnplat.platforms.inventory import Inventory
from attnplat.platforms.rocm import detect as rocm
from attnplat.storage import check_folder

# An instruction set that this machine surely lacks.
FOREIGN_ISA = "avx2" if platform.machine() in ("aarch64", "arm64") else "neon"


def run_doctor(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ATTNPLAT_", "VLLM_"))}
    return subprocess.run(
        [sys.executable, "-m", "attnplat", "doctor", *options],
        env={**clean, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """The JSON report under the given variables and no others of ours, with the exit code."""
    for name in os.environ:
        if name.startswith(("ATTNPLAT_", "VLLM_")):
            monkeypatch.delenv(name)

    def ask(**variables: str) -> dict[str, Any]:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        code = main(["doctor", "--json"])
        report: dict[str, Any] = json.loads(capsys.readouterr().out)
        return {**report, "exit": code}

    return ask


def levels(report: dict[str, Any]) -> set[str]:
    return {finding["level"] for finding in report["findings"]}


def real(device: DeviceInfo) -> DeviceInfo:
    """The device as if it were here."""
    from dataclasses import replace

    return replace(device, simulated=False)


def examine(
    device: DeviceInfo | None,
    inventory: Inventory,
    environment: Environment = Environment(),  # noqa: B008
    notes: tuple[str, ...] = (),
) -> Examination:
    detections = {"cuda": Detection(), "rocm": Detection(), "cpu": Detection()}
    if device is not None:
        detections[str(device.platform)] = Detection((device,), notes)
    cache = check_folder(Path("/"))
    return Examination(device, detections, inventory, environment, cache._replace(problem=None))


def test_the_report_tells_of_this_machine_and_ends_well(answer: Ask) -> None:
    report = answer()
    assert report["exit"] == 0
    assert report["device"]["platform"] in {"cuda", "rocm", "cpu"}
    assert report["devices"]["cpu"][0]["traits"]
    assert set(report["devices"]) == {"cuda", "rocm", "cpu"}
    assert "error" not in levels(report)
    for name in ("torch", "triton", "amd-aiter", "flashinfer-python"):
        assert report["packages"][name]["install"]
    assert {s["source"] for s in report["switches"].values()} == {"default"}


def test_the_used_device_is_the_one_that_current_platform_answers_for() -> None:
    assert examination.examine().device == current_platform().device


def test_the_keys_come_in_the_same_order_every_time() -> None:
    first, second = run_doctor("--json").stdout, run_doctor("--json").stdout
    assert first == second
    keys = list(json.loads(first))
    assert keys == sorted(keys)


def test_people_get_tables() -> None:
    done = run_doctor()
    assert done.returncode == 0
    assert done.stderr == ""
    for word in ("(used)", "Packages", "Settings", "Cache folder"):
        assert word in done.stdout


def test_no_package_is_imported() -> None:
    code = (
        "import sys\n"
        "from attnplat.cli.main import main\n"
        "assert main(['doctor', '--json']) == 0\n"
        "heavy = {'torch', 'triton', 'transformers', 'rich', 'numpy'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_a_simulated_device_is_told_beside_the_real_ones(answer: Ask) -> None:
    report = answer(ATTNPLAT_DEVICE="rocm:gfx950")
    assert (report["exit"], report["device"]["arch"]) == (0, "gfx950")
    assert report["device"]["simulated"]
    assert report["devices"]["cpu"]
    assert report["environment"] == {"ATTNPLAT_DEVICE": "rocm:gfx950"}


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("ATTNPLAT_DEVICE", "tpu:v5", "unknown device 'tpu:v5'"),
        ("ATTNPLAT_DEVICE", "cpu:7", "visible: 0 to 0"),
        ("ATTNPLAT_AITER", "perhaps", "ATTNPLAT_AITER is 'perhaps'"),
        ("ATTNPLAT_CPU_ISA", "sse9", "ATTNPLAT_CPU_ISA is 'sse9'"),
        ("ATTNPLAT_CPU_ISA", FOREIGN_ISA, f"ATTNPLAT_CPU_ISA is {FOREIGN_ISA!r}; this processor"),
    ],
)
def test_a_wrong_setting_is_an_error_in_a_whole_report(
    answer: Ask, name: str, value: str, told: str
) -> None:
    report = answer(**{name: value})
    assert report["exit"] == 2
    errors = [f["text"] for f in report["findings"] if f["level"] == "error"]
    assert len(errors) == 1
    assert told in errors[0]
    assert report["packages"]
    assert all(errors[0] not in f["text"] for f in report["findings"] if f["level"] != "error")


def test_retired_and_unknown_variables_are_told(answer: Ask) -> None:
    report = answer(VLLM_ATTENTION_BACKEND="FLASH_ATTN", ATTNPLAT_BACKENDS="x")
    texts = [f["text"] for f in report["findings"]]
    assert any("VLLM_ATTENTION_BACKEND was removed" in t and "ATTNPLAT_BACKEND" in t for t in texts)
    assert any("did you mean ATTNPLAT_BACKEND?" in t for t in texts)


def test_the_cache_folder_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    assert check_folder(tmp_path).problem is None
    assert check_folder(tmp_path / "a" / "b").problem is None
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    problem = check_folder(tmp_path / "file" / "below").problem
    assert problem is not None
    assert "is not a folder" in problem
    assert check_folder(Path("/proc/attnplat")).problem is not None


def test_an_unwritable_cache_folder_is_told_with_the_fix(answer: Ask, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    report = answer(ATTNPLAT_CACHE_DIR=str(tmp_path / "file"))
    assert report["cache"]["writable"] is False
    (finding,) = [f for f in report["findings"] if "cache folder" in f["text"]]
    assert "ATTNPLAT_CACHE_DIR" in finding["fix"]


@pytest.mark.parametrize("encoding", [b"ascii", b"cp1252", b"utf-8"])
def test_names_that_a_terminal_cannot_write_are_written_all_the_same(
    encoding: bytes, tmp_path: Path
) -> None:
    folder = os.fsencode(tmp_path) + b"/\xff\xe6\xb8\xac"
    for options in ([], ["--json"]):
        done = subprocess.run(
            [sys.executable, "-m", "attnplat", "doctor", *options],
            env={
                **os.environb,
                b"ATTNPLAT_CACHE_DIR": folder,
                b"CUDA_VISIBLE_DEVICES": b"\xff",
                b"PYTHONIOENCODING": encoding,
            },
            capture_output=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert b"xff" in done.stdout or b"udcff" in done.stdout


def test_without_torch_the_fix_is_named() -> None:
    found = findings(examine(real(cpu.simulate("amx")), Inventory.assume()))
    assert [(f.level, f.fix) for f in found] == [("warning", "pip install torch")]


@pytest.mark.parametrize(
    ("device", "version", "told"),
    [
        (cuda.simulate("sm90"), "2.13.0+cpu", True),
        (cuda.simulate("sm90"), "2.13.0+rocm7.1", True),
        (cuda.simulate("sm90"), "2.13.0+cu130", False),
        (rocm.simulate("gfx942"), "2.13.0+cu130", True),
        (rocm.simulate("gfx942"), "2.13.0+rocm7.1", False),
        (cpu.simulate("avx2"), "2.13.0+cpu", False),
    ],
)
def test_a_torch_that_cannot_drive_the_device_is_told(
    device: DeviceInfo, version: str, told: bool
) -> None:
    inventory = Inventory.assume({"torch": version}, {"cpu_kernels": True})
    found = findings(examine(real(device), inventory))
    assert bool(found) == told
    assert all("cannot drive" in f.text for f in found)


def test_an_installed_aiter_that_is_switched_off_is_advised_on_amd_only() -> None:
    packages = {"torch": "2.13.0+rocm7.1", "amd-aiter": "0.1.7"}
    mi300 = real(rocm.simulate("gfx942"))
    (advice,) = findings(examine(mi300, Inventory.assume(packages)))
    assert (advice.level, advice.fix) == ("advice", "set ATTNPLAT_AITER=1")
    assert findings(examine(mi300, Inventory.assume(packages, switches={"aiter": True}))) == []
    with_kernels = Inventory.assume(packages, {"cpu_kernels": True})
    assert findings(examine(real(cpu.simulate("amx")), with_kernels)) == []


def test_kernels_that_were_not_built_are_told_with_the_way_to_get_them() -> None:
    device, packages = real(cpu.simulate("avx2")), {"torch": "2.13.0"}
    (found,) = findings(examine(device, Inventory.assume(packages)))
    assert found.level == "warning" and "no C++ compiler on PATH" in found.text
    assert found.fix.startswith("install a C++ compiler") and "pip install" in found.fix
    (found,) = findings(examine(device, Inventory.assume(packages, tools={"c++": "/usr/bin/c++"})))
    assert "/usr/bin/c++ could build it" in found.text
    assert found.fix.startswith("pip install")
    assert findings(examine(device, Inventory.assume(packages, {"cpu_kernels": True}))) == []


def test_the_instruction_set_and_who_chose_it_are_told(answer: Ask) -> None:
    report = answer()
    assert report["cpu_kernels"]["isa"] == report["devices"]["cpu"][0]["arch"]
    assert report["cpu_kernels"]["chosen_by"] == "the highest that this machine has"
    assert report["cpu_kernels"]["built"] == report["features"]["cpu_kernels"]["usable"]
    forced = answer(ATTNPLAT_CPU_ISA="scalar")["cpu_kernels"]
    assert (forced["isa"], forced["chosen_by"]) == ("scalar", "ATTNPLAT_CPU_ISA")


def test_a_driver_whose_nvml_is_not_there_has_a_fix() -> None:
    note = "an NVIDIA driver is here (/dev/nvidiactl), but NVML cannot be loaded (OSError: none)"
    inventory = Inventory.assume({"torch": "2.13.0+cu130"})
    (found,) = findings(examine(real(cuda.simulate("sm90")), inventory, notes=(note,)))
    assert (found.level, found.text) == ("warning", note)
    assert "NVIDIA_DRIVER_CAPABILITIES" in found.fix


def test_only_packages_for_the_devices_here_are_listed_as_missing(answer: Ask) -> None:
    text, here = run_doctor().stdout, answer()["devices"]
    assert ("flashinfer" in text) == bool(here["cuda"])
    assert ("amd-aiter" in text) == bool(here["rocm"])


def test_attention_options_are_refused_since_nothing_here_reads_them() -> None:
    done = run_doctor("--attention-backend", "FLASH_ATTN")
    assert done.returncode == 2
    assert "explain" in done.stderr
    assert "Traceback" not in done.stderr


def test_plain_tables_are_aligned_and_keep_every_cell() -> None:
    text = plain_table([("a", "[b]", ""), ("long", "", "c")], ("x", "yy", "z"), "title")
    assert text.splitlines() == [
        "title",
        "x     yy   z",
        "----  ---  -",
        "a     [b]",
        "long       c",
    ]
    assert plain_table([], ("x", "y")) == "x  y\n-  -"
    assert plain_table([("1", "2")]) == "1  2"


def test_a_table_refuses_rows_of_another_width(capsys: pytest.CaptureFixture[str]) -> None:
    from attnplat.cli.tables import print_table

    print_table([("a", None)], ("x", "y"))
    assert capsys.readouterr().out == "x  y\n-  -\na\n"
    with pytest.raises(ValueError, match="1 cells in a table of 2"):
        print_table([("a",)], ("x", "y"))
