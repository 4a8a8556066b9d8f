"""Building the C++ kernels in other ways than they are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

needs_compiler = pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("c++") is None,
    reason="needs cmake and a C++ compiler",
)


def run(command: list[str], seconds: int = 900, **variables: str) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    return done.stdout


def build(folder: Path, target: str, *options: str) -> Path:
    """Builds a target of CMakeLists.txt with CMake options; where it is."""
    run(["cmake", "-S", str(ROOT), "-B", str(folder), "-DATTNPLAT_COMPARE=ON", *options])
    run(["cmake", "--build", str(folder), "--target", target, "--parallel", "2"], 1500)
    return folder / target


def run_tests(library: Path, *arguments: str, **variables: str) -> str:
    """What pytest says of tests run with the kernels of another folder."""
    plugin = ["-p", "tests.execution.cpu.another_library", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-x", "-q", *plugin, *arguments]
    where = {"ATTNPLAT_TESTED_LIBRARY": str(library), "PYTHONPATH": str(ROOT)}
    return run(command, 3000, **where, **variables)
