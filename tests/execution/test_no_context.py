"""Asking what the machine is must not start its accelerator."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# torch creates the device context in `_lazy_init`, which everything that needs one calls; a
# CPU build of torch has the function too, so the claim can fail on any machine.
WATCH = """
import sys
import torch

started = []
def refuse():
    started.append(True)
    raise RuntimeError("something asked torch for a device context")
torch.cuda._lazy_init = refuse
"""


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def test_current_platform_does_not_ask_torch_for_a_context() -> None:
    code = WATCH + "import attnplat\nprint(attnplat.current_platform())\nassert not started\n"
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_the_watch_sees_whoever_asks_for_a_context() -> None:
    done = run_python(WATCH + "torch.cuda.current_device()")
    assert "something asked torch for a device context" in done.stderr


def test_current_platform_does_not_import_torch() -> None:
    code = "import sys, attnplat\nattnplat.current_platform()\nassert 'torch' not in sys.modules"
    done = run_python(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_no_context_exists_on_an_accelerator_after_current_platform() -> None:
    code = """
import torch, attnplat
platform = attnplat.current_platform()
assert not torch.cuda.is_initialized(), "current_platform() initialised CUDA"
assert platform.name in ("cuda", "rocm"), platform.name
torch.empty(1, device="cuda")
assert torch.cuda.is_initialized()
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
