"""The kernels built in other ways: with sanitizers, and with AMX in plain C++."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        shutil.which("cmake") is None or shutil.which("c++") is None,
        reason="needs cmake and a C++ compiler",
    ),
]


def compare(folder: Path, *options: str, runs: int) -> str:
    """Builds compare_isas with CMake options and runs it; what it prints."""
    configure = ["cmake", "-S", str(ROOT), "-B", str(folder), "-DATTNPLAT_COMPARE=ON", *options]
    for command in (
        configure,
        ["cmake", "--build", str(folder), "--target", "compare_isas", "--parallel", "2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run(
        [str(folder / "compare_isas"), "0", str(runs)],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_no_sanitizer_finds_anything_and_all_instruction_sets_agree(tmp_path: Path) -> None:
    said = compare(tmp_path, "-DATTNPLAT_SANITIZE=ON", "-DATTNPLAT_EMULATE=ON", runs=60)
    assert " 0 failures" in said


def test_kernels_for_tiles_agree_with_the_others_where_tiles_are_emulated(tmp_path: Path) -> None:
    said = compare(tmp_path, "-DATTNPLAT_EMULATE=ON", runs=200)
    assert " 0 failures" in said
    assert "amx" in said
