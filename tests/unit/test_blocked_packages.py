"""attnplat goes as far as it can without each optional package, and touches no driver."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OPTIONAL = ("triton", "pynvml", "transformers", "torch")

# Public names whose objects hold tensors. All others are there without torch.
NEED_TORCH = {
    "Batch",
    "IndexCache",
    "IndexCacheSpec",
    "KVCache",
    "KVCacheLayout",
    "KVCacheSpec",
    "PageTable",
    "Workspace",
}

BLOCK = """
import sys, importlib.abc
blocked = set(sys.argv[1].split(","))
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"{name} is blocked by this test", name=name)
        return None
sys.meta_path.insert(0, Block())
"""


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("blocked", ["torch", "triton,pynvml,transformers", ",".join(OPTIONAL)])
def test_every_public_name_is_there_but_those_that_hold_tensors(blocked: str) -> None:
    code = BLOCK + textwrap.dedent("""
        import attnplat
        lacks = {}
        for name in attnplat.__all__:
            try:
                getattr(attnplat, name)
            except ModuleNotFoundError as error:
                lacks[name] = error.name
        # torch may be missing in fact, not by the block alone.
        assert set(lacks.values()) <= {"torch"}, lacks
        print(*sorted(lacks))
        """)
    done = run_python(code, blocked)
    assert done.returncode == 0, done.stderr
    if "torch" in blocked.split(","):
        assert set(done.stdout.split()) == NEED_TORCH
    else:
        assert set(done.stdout.split()) in (set(), NEED_TORCH)


@pytest.mark.parametrize(
    ("blocked", "commands"),
    [
        *((package, [["doctor", "--json"]]) for package in OPTIONAL),
        (
            ",".join(OPTIONAL),
            [
                ["doctor"],
                ["backends"],
                ["explain", "--head-size", "128"],
                ["explain", "--device", "sm100", "--model", "llama-3-8b"],
            ],
        ),
    ],
)
def test_detection_choice_and_the_commands_that_explain_work(
    blocked: str, commands: list[list[str]]
) -> None:
    code = BLOCK + textwrap.dedent("""
        import attnplat, json
        from attnplat.cli.main import main
        platform = attnplat.current_platform()
        layer = attnplat.MhaConfig(head_size=128, num_heads=32, num_kv_heads=8)
        assert platform.select(layer).explain()
        assert attnplat.platform_for("sm90").select(layer).ok
        for command in json.loads(sys.argv[2]):
            assert main(command) == 0, command
        assert not blocked & {name.partition(".")[0] for name in sys.modules}
        """)
    done = run_python(code, blocked, json.dumps(commands))
    assert done.returncode == 0, done.stderr


def test_running_without_torch_says_what_to_install() -> None:
    code = BLOCK + textwrap.dedent("""
        from attnplat.cli.main import main
        sys.exit(main(["run", "--prompt", "x"]))
        """)
    done = run_python(code, "torch")
    assert done.returncode == 2, done.stderr
    assert "pip install" in done.stderr
    assert "Traceback" not in done.stderr


# Libraries through which a context on a device is created. NVML's is not one of them.
DRIVERS = ("libcuda.so", "libcudart", "libamdhip64", "libhsa-runtime64", "libnvcuda")

LOOK = """
import attnplat
from attnplat.cli.main import main
from attnplat.platforms import PLATFORMS, detect

attnplat.current_platform()
for name in ("cuda", "rocm", "cpu"):
    detect(name)
attnplat.platform_for("sm90").select(attnplat.MhaConfig(head_size=128))
assert main(["doctor", "--json"]) == 0
mapped = open("/proc/self/maps").read()
print("mapped:", *(name for name in {drivers!r} if name in mapped))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_no_library_that_could_create_a_context_is_even_loaded() -> None:
    done = run_python(LOOK.format(drivers=DRIVERS))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "mapped:"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_look_at_loaded_libraries_sees_one() -> None:
    done = run_python(LOOK.format(drivers=("libc.so",)))
    assert done.stdout.splitlines()[-1] == "mapped: libc.so", done.stderr
