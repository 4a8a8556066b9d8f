"""The kernels built in other ways: with sanitizers, with AMX in plain C++, and for ARM."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.execution.cpu.building import ROOT, build, needs_compiler, run, run_tests
from tests.execution.cpu.steps import needs_library

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600), needs_compiler]

ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"


def test_kernels_for_tiles_agree_with_the_others_where_tiles_are_emulated(tmp_path: Path) -> None:
    compare = build(tmp_path, "compare_isas", "-DATTNPLAT_EMULATE=ON")
    said = run([str(compare), "0", "200"])
    assert " 0 failures" in said
    assert "amx" in said


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folder of a library built with the address and undefined-behaviour sanitizers, and the
    variables with which Python, which was not, can load it."""
    folder = tmp_path_factory.mktemp("sanitized")
    build(folder, "attnplat_cpu", "-DATTNPLAT_SANITIZE=ON")
    runtime = run(["c++", "-print-file-name=libasan.so"]).strip()
    if not Path(runtime).is_absolute():
        pytest.skip("needs the compiler's libasan.so, which is not installed")
    # The linker's script that some systems call by that name cannot be loaded.
    variables = {
        "LD_PRELOAD": str(Path(runtime).resolve()),
        # Python and torch leave memory behind at the end, and mix allocators.
        "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "CMAKE_BUILD_PARALLEL_LEVEL": "2",
    }
    return folder, variables


READ_BEHIND_THE_END = """
import sys, torch
from tests.execution.cpu import another_library
from attnplat.platforms.cpu.kernels import library
from attnplat.platforms.cpu.kernels.indexing import choose_columns
logits = torch.zeros(1, 1000)
wrong = torch.as_strided(logits, (1, 1000), (1000, 1))
wrong = type("Longer", (), {
    "shape": (1, 1001), "data_ptr": logits.data_ptr, "stride": lambda self, n: 1001
})()
choose_columns(library.load(), wrong, 4, 1)
"""


@needs_library
def test_the_sanitizer_sees_one_number_behind_the_end(
    sanitized: tuple[Path, dict[str, str]],
) -> None:
    folder, variables = sanitized
    with pytest.raises(AssertionError, match="heap-buffer-overflow"):
        run(
            [sys.executable, "-c", READ_BEHIND_THE_END],
            ATTNPLAT_TESTED_LIBRARY=str(folder),
            PYTHONPATH=str(ROOT),
            **variables,
        )


# Files of kernel tests, and which of their tests; the rest differs in values alone.
SANITIZED_TESTS = {
    "features": "every_feature or every_mask or every_head_size or group or block_size or cross",
    "memory": "",
    "guards": "",
    "quantised": "",
    "indexer": "scores or size or order or exact or best or scales or tables",
    "sparse": "",
    "library": "not fork",
}


@needs_library
@pytest.mark.parametrize("name", SANITIZED_TESTS)
def test_no_sanitizer_finds_anything(sanitized: tuple[Path, dict[str, str]], name: str) -> None:
    folder, variables = sanitized
    chosen = ["-k", SANITIZED_TESTS[name]] if SANITIZED_TESTS[name] else []
    said = run_tests(folder, f"tests/execution/cpu/test_{name}.py", *chosen, **variables)
    assert " passed" in said


def test_no_sanitizer_finds_anything_in_emulated_tiles(tmp_path: Path) -> None:
    options = ("-DATTNPLAT_SANITIZE=ON", "-DATTNPLAT_EMULATE=ON")
    said = run([str(build(tmp_path, "compare_isas", *options)), "0", "60"])
    assert " 0 failures" in said


def why_no_arm() -> str | None:
    """What ARM kernels cannot be tried without, or None when all is here."""
    for tool in (ARM_COMPILER, ARM_EMULATOR):
        if shutil.which(tool) is None:
            return f"needs {tool} (Debian: g++-aarch64-linux-gnu, qemu-user-static)"
    return None


def test_kernels_for_arm_agree_where_arm_is_emulated(tmp_path: Path) -> None:
    if (reason := why_no_arm()) is not None:
        pytest.skip(reason)
    compare = build(
        tmp_path,
        "compare_isas",
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        f"-DCMAKE_CXX_COMPILER={ARM_COMPILER}",
        "-DCMAKE_EXE_LINKER_FLAGS=-static",
    )
    kind = subprocess.run(
        ["od", "-An", "-tx1", "-j18", "-N1", str(compare)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert kind.stdout.strip() == "b7"  # EM_AARCH64
    # An emulated run takes some twenty times as long as its like on this machine.
    said = run([ARM_EMULATOR, str(compare), "0", "12"], 2400)
    assert " 0 failures" in said
    assert "neon" in said
