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


BLOCKED_RUN = """
import sys, importlib.abc
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == sys.argv[1]:
            raise ModuleNotFoundError(f"{name} is blocked by this test", name=name)
        return None
sys.meta_path.insert(0, Block())
"""

ATTEND = """
import torch, attnplat
from attnplat.backends.batch import Batch

layer = attnplat.MhaConfig(
    head_size=64, num_heads=4, num_kv_heads=2, dtype="float32", attn_type="encoder_only"
)
backend = attnplat.platform_for("cpu").get_attn_backend(layer)
impl = backend.create(layer, "cpu")
batch = Batch.from_lengths([3, 5])
q, k, v = (torch.randn(8, heads, 64) for heads in (4, 2, 2))
out = impl.forward(impl.plan(batch, None), q, None, kv=(k, v))
expected = torch.cat([
    torch.nn.functional.scaled_dot_product_attention(
        q[rows].transpose(0, 1), k[rows].transpose(0, 1), v[rows].transpose(0, 1),
        enable_gqa=True,
    ).transpose(0, 1)
    for rows in (slice(0, 3), slice(3, 8))
])
torch.testing.assert_close(out, expected)
assert not torch.cuda.is_initialized()
"""


@pytest.mark.parametrize("package", ["triton", "pynvml", "transformers"])
def test_attention_runs_on_the_processor_without_each_optional_package(package: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED_RUN + WATCH + ATTEND + "assert not started", package],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
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


@pytest.mark.gpu
def test_the_driver_itself_knows_of_no_context_after_everything_that_only_looks() -> None:
    code = """
import ctypes, torch, attnplat
from attnplat.cli.main import main
if torch.version.hip:
    raise SystemExit(0)
platform = attnplat.current_platform()
platform.select(attnplat.MhaConfig(head_size=128))
assert main(["doctor"]) == 0
driver = ctypes.CDLL("libcuda.so.1")
assert driver.cuInit(0) == 0
flags, active = ctypes.c_uint(), ctypes.c_int()
assert driver.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active)) == 0
assert active.value == 0, "a context exists"
torch.empty(1, device="cuda")
assert driver.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active)) == 0
assert active.value == 1
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
