"""Packages that really abort, hang and lie are told apart, and their caller is never harmed."""

from __future__ import annotations

import json
import logging
import os
import sys
import textwrap
import time
from pathlib import Path

import pytest

from attnplat import MhaConfig, platform_for
from attnplat.cli.examination import Machine, Trial, examine, this_machine
from attnplat.cli.findings import findings
from attnplat.config.env import DriverEnvironment, Environment
from attnplat.platforms.inventory import Inventory, look_for_packages
from attnplat.platforms.probe_memory import ProbeMemory, remembered
from attnplat.platforms.probe_outcome import Outcome, ProbeKind
from attnplat.platforms.probing import Probe, probes_for, torch_requirement, try_all, try_package
from attnplat.storage import Store, check_folder

DRIVER = DriverEnvironment(cuda_home="/nowhere", path="")

MODULES = {
    "flash-attn": "flash_attn",
    "amd-aiter": "aiter",
    "nvidia-ml-py": "pynvml",
    "intel-extension-for-pytorch": "intel_extension_for_pytorch",
    "zentorch": "zentorch",
    "flash-mla": "flash_mla",
    "hpc-ops": "hpc",
    "triton": "triton",
    "torch": "torch",
}


def install(
    folder: Path, name: str, code: str, version: str = "1.0", *, requires: str = ""
) -> Path:
    """A distribution as an installer leaves it: metadata, a list of files, and its module."""
    module = MODULES[name]
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {requires}"] if requires else []
    (metadata / "METADATA").write_text("\n".join([*lines, "", "About it.", ""]))
    (metadata / "RECORD").write_text(f"{module}/__init__.py,,\n{metadata.name}/METADATA,,\n")
    (folder / module).mkdir(exist_ok=True)
    (folder / module / "__init__.py").write_text(textwrap.dedent(code))
    return folder


def probe_of(folder: Path, name: str) -> Probe:
    (probe,) = probes_for(look_for_packages([str(folder)]), [name])
    return probe


def tried(
    folder: Path, name: str, code: str, version: str = "1.0", timeout_s: float = 30.0, **more: str
) -> Outcome:
    """What comes of trying a distribution with this code."""
    install(folder, name, code, version, **more)
    return try_package(probe_of(folder, name), [str(folder)], timeout_s)


COMPLETE = "def flash_attn_varlen_func(): ...\ndef flash_attn_with_kvcache(): ...\n"

# What a package does -> the kind, a part of what was seen, a part of what to do.
CASES = {
    "works": ("flash-attn", COMPLETE, ProbeKind.WORKS, "can be imported", ""),
    "is for another build of torch": (
        "flash-attn",
        "raise ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2E')",
        ProbeKind.ABI_MISMATCH,
        "undefined symbol",
        "--no-build-isolation flash-attn --force-reinstall",
    ),
    "is for another C library": (
        "flash-attn",
        'raise OSError("/lib/libstdc++.so.6: version `GLIBCXX_3.4.32\' not found")',
        ProbeKind.ABI_MISMATCH,
        "GLIBCXX",
        "--force-reinstall",
    ),
    "is for another numpy": (
        "flash-attn",
        "raise ValueError('numpy.dtype size changed, may indicate binary incompatibility')",
        ProbeKind.ABI_MISMATCH,
        "numpy",
        "--force-reinstall",
    ),
    "wants a library of another CUDA": (
        "flash-attn",
        "raise ImportError('libcudart.so.12: cannot open shared object file: No such file')",
        ProbeKind.MISSING_LIBRARY,
        "libcudart.so.12",
        "install the build of flash-attn",
    ),
    "wants a driver": (
        "flash-attn",
        "raise ImportError('libcuda.so.1: cannot open shared object file: No such file')",
        ProbeKind.NO_DEVICE,
        "libcuda.so.1",
        "nvidia-smi",
    ),
    "wants another package": (
        "flash-attn",
        "import a_module_that_is_not_there",
        ProbeKind.MISSING_MODULE,
        "imports a_module_that_is_not_there",
        "pip install a_module_that_is_not_there",
    ),
    "lacks a function": (
        "flash-attn",
        "def flash_attn_varlen_func(): ...",
        ProbeKind.MISSING_SYMBOL,
        "flash_attn has no flash_attn_with_kvcache",
        "--upgrade",
    ),
    "wants a function of another version": (
        "flash-attn",
        "from json import a_function_that_is_not_there",
        ProbeKind.MISSING_SYMBOL,
        "cannot import name",
        "--upgrade",
    ),
    "swallows its own import errors": (
        "amd-aiter",
        "try:\n    import a_module_that_is_not_there\nexcept Exception: pass",
        ProbeKind.MISSING_SYMBOL,
        "aiter has no flash_attn_varlen_func",
        "--upgrade",
    ),
    "finds no ROCm": (
        "amd-aiter",
        "import logging\n"
        "logging.getLogger().addHandler(logging.StreamHandler())\n"
        "raise RuntimeError('ROCm version file not found')",
        ProbeKind.NO_DEVICE,
        "RuntimeError: ROCm version file not found",
        "rocminfo",
    ),
    "finds no driver when it is started": (
        "nvidia-ml-py",
        "class NVMLError_LibraryNotFound(Exception): ...\n"
        "def nvmlInit(): raise NVMLError_LibraryNotFound('NVML Shared Library Not Found')\n",
        ProbeKind.NO_DEVICE,
        "(call nvmlInit)",
        "nvidia-smi",
    ),
    "says that it is for another torch": (
        "flash-mla",
        "raise ImportError('flash_mla 1.0 was built for torch 2.14, but torch 2.13 is installed')",
        ProbeKind.WRONG_TORCH,
        "built for torch 2.14",
        "install the flash-mla made for torch",
    ),
    "raises what it likes": (
        "flash-attn",
        "raise KeyError('libsomething')",
        ProbeKind.RAISES,
        "KeyError: 'libsomething' (import flash_attn)",
        "python -X faulthandler -c 'import flash_attn'",
    ),
    "raises what is no Exception": (
        "flash-attn",
        "class Odd(BaseException):\n    def __str__(self): raise Odd\nraise Odd",
        ProbeKind.RAISES,
        "Odd: an error that cannot be printed",
        "faulthandler",
    ),
    "is interrupted": ("flash-attn", "raise KeyboardInterrupt", ProbeKind.RAISES, "Keyboard", ""),
    "is not Python": ("flash-attn", "def (", ProbeKind.RAISES, "SyntaxError", ""),
    "recurses": (
        "flash-attn",
        "def f(): f()\nf()",
        ProbeKind.RAISES,
        "RecursionError",
        "",
    ),
    "exits": ("flash-attn", "import sys; sys.exit(3)", ProbeKind.EXITS, "SystemExit: 3", ""),
    "exits at once": (
        "flash-attn",
        "import os; os._exit(5)",
        ProbeKind.EXITS,
        "exit code 5: no message (import flash_attn)",
        "",
    ),
    "exits without a word": (
        "flash-attn",
        "import os; os._exit(0)",
        ProbeKind.EXITS,
        "ended its process without an error",
        "",
    ),
    "aborts": (
        "flash-attn",
        "import os; os.abort()",
        ProbeKind.CRASHES,
        "killed by signal 6 (import flash_attn)",
        "faulthandler",
    ),
    "reads what is not its own": (
        "flash-attn",
        "import ctypes; ctypes.string_at(0)",
        ProbeKind.CRASHES,
        "killed by signal 11",
        "",
    ),
    "aborts when it is started": (
        "nvidia-ml-py",
        "import os\ndef nvmlInit(): os.abort()\n",
        ProbeKind.CRASHES,
        "killed by signal 6 (call nvmlInit)",
        "",
    ),
}


@pytest.mark.parametrize("what", CASES)
def test_whatever_a_package_does_is_told_by_its_kind_with_a_fix(what: str, tmp_path: Path) -> None:
    name, code, kind, seen, fix = CASES[what]
    outcome = tried(tmp_path, name, code)
    assert outcome.kind is kind, outcome
    assert seen in outcome.text
    assert fix in outcome.fix
    assert outcome.broken == (kind is not ProbeKind.WORKS)
    assert bool(outcome.fix) == outcome.broken
    assert Outcome.from_dict(json.loads(json.dumps(outcome.to_dict()))) == outcome._replace(
        seconds=round(outcome.seconds, 2)
    )


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("import time; time.sleep(600)", ProbeKind.HANGS),
        ("while True: pass", ProbeKind.HANGS),
        ("while True: print('loading' * 100)", ProbeKind.HANGS),
        (
            "import threading; threading.Lock().acquire(); l = threading.Lock()\n"
            "l.acquire(); l.acquire()",
            ProbeKind.HANGS,
        ),
        (
            COMPLETE + "import threading, time\n"
            "threading.Thread(target=time.sleep, args=(600,)).start()",
            ProbeKind.WORKS,
        ),
        (COMPLETE + "import atexit, time; atexit.register(time.sleep, 600)", ProbeKind.WORKS),
        (
            COMPLETE + "import subprocess, sys\n"
            "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])",
            ProbeKind.WORKS,
        ),
    ],
    ids=["sleeps", "spins", "prints", "locks itself", "leaves a thread", "stays", "leaves a child"],
)
def test_a_package_that_hangs_costs_its_time_limit_and_no_more(
    code: str, kind: ProbeKind, tmp_path: Path
) -> None:
    start = time.monotonic()
    outcome = tried(tmp_path, "flash-attn", code, timeout_s=1.5)
    assert outcome.kind is kind
    assert time.monotonic() - start < 15


def test_what_importing_it_does_beside_is_told_and_reaches_nobody(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    handlers, modules = list(logging.getLogger().handlers), set(sys.modules)
    outcome = tried(
        tmp_path,
        "flash-attn",
        COMPLETE + "import logging, os, sys, threading, time\n"
        "print('welcome'); os.write(1, b'hi'); sys.stderr.write('careful')\n"
        "logging.basicConfig(level=10)\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n",
    )
    assert outcome.kind is ProbeKind.WORKS
    assert set(outcome.effects) == {
        "adds 1 handlers to the root logger",
        "changes the root logger's level",
        "leaves 1 threads running",
        "prints when it is imported",
        "writes to standard error when it is imported",
    }
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger().handlers == handlers
    assert "flash_attn" not in set(sys.modules) - modules


def test_neither_core_files_nor_anything_else_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    code = "open('litter', 'w').close()\nimport os; os.abort()"
    assert tried(tmp_path / "site", "flash-attn", code).kind is ProbeKind.CRASHES
    assert list(here.iterdir()) == []


# By metadata first ---------------------------------------------------------------------------

LEAVES_A_MARK = "open({path!r}, 'w').close()"


@pytest.mark.parametrize("name", ["intel-extension-for-pytorch", "zentorch"])
@pytest.mark.parametrize(
    ("version", "torch", "kind"),
    [
        ("2.8.0", "2.13.0+cpu", ProbeKind.WRONG_TORCH),
        ("2.14.0.1", "2.13.0", ProbeKind.WRONG_TORCH),
        ("2.13.0.2", "2.13.1+cpu", ProbeKind.WORKS),
    ],
)
def test_a_package_for_another_torch_is_known_without_importing_it(
    name: str, version: str, torch: str, kind: ProbeKind, tmp_path: Path
) -> None:
    mark = tmp_path / "imported"
    site = install(tmp_path / "site", name, LEAVES_A_MARK.format(path=str(mark)), version)
    install(site, "torch", "", torch)
    outcome = try_package(probe_of(site, name), [str(site)])
    assert outcome.kind is kind
    assert mark.exists() == (kind is ProbeKind.WORKS)
    if kind is ProbeKind.WRONG_TORCH:
        assert f"torch {torch} is installed" in outcome.text
        assert "torch 2.13" in outcome.fix


@pytest.mark.parametrize(
    ("requires", "kind"),
    [
        ("torch==2.14.0", ProbeKind.WRONG_TORCH),
        ("torch (==2.14.0)", ProbeKind.WRONG_TORCH),
        ("torch <2.10,>=2.8; platform_system == 'Linux'", ProbeKind.WRONG_TORCH),
        ("torch>=2.8", ProbeKind.WORKS),
        ("torch==2.13.*", ProbeKind.WORKS),
        ("torch", ProbeKind.WORKS),
        ("torch==2.14.0 ; extra == 'old'", ProbeKind.WORKS),
        ("torch @ file:///somewhere", ProbeKind.WORKS),
        ("torchvision==0.1", ProbeKind.WORKS),
        ("torch=!nonsense", ProbeKind.WORKS),
    ],
)
def test_a_requirement_on_torch_is_compared_before_anything_is_imported(
    requires: str, kind: ProbeKind, tmp_path: Path
) -> None:
    install(tmp_path, "torch", "", "2.13.0+cpu")
    assert tried(tmp_path, "flash-attn", COMPLETE, requires=requires).kind is kind


def test_a_requirement_is_looked_for_in_the_head_of_the_metadata_only(tmp_path: Path) -> None:
    (tmp_path / "METADATA").write_text("Name: x\n\nRequires-Dist: torch==1.0\n")
    assert torch_requirement(str(tmp_path)) is None
    assert torch_requirement("/nowhere") is None


# Something else of that name -----------------------------------------------------------------


def test_an_empty_folder_and_the_other_distribution_are_no_aiter_of_amds(tmp_path: Path) -> None:
    (tmp_path / "aiter").mkdir()
    (tmp_path / "aiter-0.13.20191203.dist-info").mkdir()
    (tmp_path / "aiter-0.13.20191203.dist-info" / "METADATA").write_text("Name: aiter\n")
    found = look_for_packages([str(tmp_path)])
    assert probes_for(found) == ()
    inventory = Inventory.of(found, Environment(), DRIVER, {})
    assert not inventory.usable("aiter")
    assert "amd-aiter" in inventory.notes[0]


def test_metadata_without_a_module_is_told_as_such(tmp_path: Path) -> None:
    site = install(tmp_path, "amd-aiter", "")
    (site / "aiter" / "__init__.py").unlink()
    outcome = try_package(probe_of(site, "amd-aiter"), [str(site)])
    assert outcome.kind is ProbeKind.SOMETHING_ELSE
    assert "a folder without code" in outcome.text
    (site / "aiter").rmdir()
    outcome = try_package(probe_of(site, "amd-aiter"), [str(site)])
    assert outcome.kind is ProbeKind.MISSING_MODULE
    assert "its module aiter is not there" in outcome.text
    assert "--force-reinstall" in outcome.fix


def test_a_module_in_front_of_the_packages_own_is_told_with_its_place(tmp_path: Path) -> None:
    site = install(tmp_path / "site", "flash-attn", COMPLETE)
    front = tmp_path / "front" / "flash_attn"
    front.mkdir(parents=True)
    (front / "__init__.py").write_text(COMPLETE)
    outcome = try_package(probe_of(site, "flash-attn"), [str(front.parent), str(site)])
    assert outcome.kind is ProbeKind.SOMETHING_ELSE
    assert str(front) in outcome.text
    empty = tmp_path / "empty" / "flash_attn"
    empty.mkdir(parents=True)
    outcome = try_package(probe_of(site, "flash-attn"), [str(empty.parent), str(site)])
    assert outcome.kind is ProbeKind.WORKS


def test_the_module_of_a_distribution_without_a_rule_is_found_from_its_files(
    tmp_path: Path,
) -> None:
    outcome = tried(tmp_path, "hpc-ops", "")
    assert (outcome.kind, outcome.module) == (ProbeKind.WORKS, "hpc")
    (tmp_path / "hpc_ops-1.0.dist-info" / "RECORD").write_text("../../../bin/x,,\n")
    outcome = try_package(probe_of(tmp_path, "hpc-ops"), [str(tmp_path)])
    assert outcome.kind is ProbeKind.MISSING_MODULE
    assert outcome.text == "what it installed names no module"


def test_several_are_tried_at_the_same_time_and_told_in_order(tmp_path: Path) -> None:
    names = ["triton", "flash-attn", "flash-mla", "hpc-ops"]
    for name in names:
        install(tmp_path, name, "import time; time.sleep(0.5)")
    heard: list[str] = []
    probes = probes_for(look_for_packages([str(tmp_path)]))
    outcomes = try_all(
        probes, [str(tmp_path)], 30, at_once=4, told=lambda o: heard.append(o.distribution)
    )
    assert [o.distribution for o in outcomes] == names
    assert sorted(heard) == sorted(names)


# Remembering ---------------------------------------------------------------------------------


def memory_of(cache: Path, site: Path, driver: DriverEnvironment = DRIVER) -> ProbeMemory:
    return ProbeMemory(Store(cache, "probes"), [str(site)], driver)


def test_an_outcome_is_kept_until_something_it_depends_on_changes(tmp_path: Path) -> None:
    site, cache = tmp_path / "site", tmp_path / "cache"
    outcome = tried(site, "flash-attn", "raise KeyError('x')")
    memory, probe = memory_of(cache, site), probe_of(site, "flash-attn")
    assert memory.recall(probe) is None
    memory.keep([probe], [outcome])
    assert memory.recall(probe) == outcome._replace(seconds=round(outcome.seconds, 2))

    file = site / "flash_attn" / "__init__.py"
    before = file.stat()
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert memory.recall(probe) is None
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert memory.recall(probe) is not None

    library = site / "flash_attn" / "kernels.so"
    library.write_bytes(b"")
    assert memory.recall(probe) is None
    library.unlink()

    assert memory.recall(probe._replace(version="1.1")) is None
    assert memory.recall(probe._replace(torch="2.13.0")) is None
    for change in ({"cuda_visible_devices": ""}, {"ld_library_path": "/opt/lib"}):
        assert memory_of(cache, site, DRIVER._replace(**change)).recall(probe) is None
    assert memory_of(cache, site, DRIVER._replace(path="/bin")).recall(probe) is not None
    assert memory_of(cache, tmp_path / "elsewhere").recall(probe) is None


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"value": {}}', b"\xff\xfe"])
def test_a_damaged_memory_is_no_memory(damage: bytes, tmp_path: Path) -> None:
    site, cache = tmp_path / "site", tmp_path / "cache"
    outcome = tried(site, "flash-attn", COMPLETE)
    memory, probe = memory_of(cache, site), probe_of(site, "flash-attn")
    memory.keep([probe], [outcome])
    (file,) = (cache / "probes").glob("*.json")
    file.write_bytes(damage)
    assert memory.recall(probe) is None
    memory.keep([probe], [outcome])
    assert memory.recall(probe) is not None


@pytest.mark.parametrize(
    "value",
    [
        None,
        1,
        [],
        {},
        {"kind": "works"},
        {**Outcome("a", "1", ProbeKind.WORKS, "").to_dict(), "kind": "well"},
    ],
)
def test_what_is_no_outcome_is_not_taken_for_one(value: object) -> None:
    assert Outcome.from_dict(value) is None


def test_a_hang_is_not_remembered_since_the_machine_may_have_been_busy(tmp_path: Path) -> None:
    site, cache = tmp_path / "site", tmp_path / "cache"
    outcome = tried(site, "flash-attn", "import time; time.sleep(600)", timeout_s=0.5)
    assert outcome.kind is ProbeKind.HANGS
    memory, probe = memory_of(cache, site), probe_of(site, "flash-attn")
    memory.keep([probe], [outcome])
    assert memory.recall(probe) is None


def here(site: Path, cache: Path) -> Machine:
    """This machine with other packages and another cache."""
    environment = Environment(cache_dir=cache)
    found = look_for_packages([str(site)])
    return this_machine()._replace(
        environment=environment,
        driver=DRIVER,
        installed=found,
        take_stock=lambda outcomes: Inventory.of(found, environment, DRIVER, outcomes),
        paths=[str(site)],
        cache=check_folder(cache),
    )


def test_a_broken_package_is_not_chosen_and_the_reason_is_its_failure(tmp_path: Path) -> None:
    site, cache = tmp_path / "site", tmp_path / "cache"
    code = "raise ImportError('x.so: undefined symbol: _ZN3c10')"
    install(site, "flash-attn", code, "2.8.3")
    install(site, "triton", "raise KeyError('broken')", "3.9.0")
    layer = MhaConfig(head_size=128)

    def inventory() -> Inventory:
        environment = Environment(cache_dir=cache)
        return Inventory.installed(environment, driver=DRIVER, paths=[str(site)])

    assert inventory().usable("fa2")
    assert inventory().broken == {}
    examine(here(site, cache), Trial())
    after = inventory()
    assert not after.usable("fa2")
    assert after.features["fa2"].how.startswith("flash-attn 2.8.3 is broken (ABI mismatch: ")
    assert after != inventory().of(look_for_packages([str(site)]), Environment(), DRIVER, {})
    selection = platform_for("sm80", inventory=after).select(layer)
    assert "undefined symbol" in str(selection.rejections["FLASH_ATTN"])
    assert "triton" in str(selection.rejections["TRITON_ATTN"])
    assert "KeyError" in str(selection.rejections["TRITON_ATTN"])


def test_doctor_tries_what_is_installed_and_tells_kind_and_fix(tmp_path: Path) -> None:
    site, cache = tmp_path / "site", tmp_path / "cache"
    install(site, "flash-attn", "import os; os.abort()")
    install(site, "zentorch", "", "2.14.0.1")
    install(
        site,
        "torch",
        "class nn:\n  class functional: scaled_dot_product_attention = 1\n"
        "class cuda:\n  is_initialized = staticmethod(lambda: False)",
        "2.13.0+cpu",
    )
    install(site, "nvidia-ml-py", "def nvmlInit(): raise OSError('NVML: no driver')")
    first = examine(here(site, cache), Trial())
    kinds = {name: outcome.kind for name, outcome in first.outcomes.items()}
    assert kinds == {
        "torch": ProbeKind.WORKS,
        "flash-attn": ProbeKind.CRASHES,
        "nvidia-ml-py": ProbeKind.NO_DEVICE,
        "zentorch": ProbeKind.WRONG_TORCH,
    }
    told = {f.text.split(":")[0]: f for f in findings(first)}
    assert "zentorch 2.14.0.1" in told
    assert told["zentorch 2.14.0.1"].level == "warning"
    assert "torch 2.13" in told["zentorch 2.14.0.1"].fix
    # No device of NVIDIA's is here, so that its bindings lack one is as it should be.
    if not first.detections["cuda"].devices:
        assert told["flash-attn 1.0"].level == "advice"
        assert not any(text.startswith("nvidia-ml-py") for text in told)

    later = examine(here(site, cache))
    assert later.remembered == {"torch", "flash-attn", "nvidia-ml-py", "zentorch"}
    assert later.outcomes["flash-attn"].kind is ProbeKind.CRASHES
    assert not later.probed

    # What failed is tried again, what worked is believed; all of it when asked for afresh.
    install_again = site / "flash_attn" / "__init__.py"
    install_again.write_text(COMPLETE)
    heard: list[str] = []
    again = examine(here(site, cache), Trial(told=lambda o: heard.append(o.distribution)))
    assert again.remembered == {"torch"}
    assert sorted(heard) == ["flash-attn", "nvidia-ml-py", "zentorch"]
    assert again.outcomes["flash-attn"].kind is ProbeKind.WORKS
    heard.clear()
    examine(here(site, cache), Trial(fresh=True, told=lambda o: heard.append(o.distribution)))
    assert "torch" in heard


def test_a_cache_that_cannot_be_written_costs_the_memory_only(tmp_path: Path) -> None:
    site = tmp_path / "site"
    install(site, "flash-attn", COMPLETE)
    (tmp_path / "file").write_text("")
    done = examine(here(site, tmp_path / "file"), Trial())
    assert done.outcomes["flash-attn"].kind is ProbeKind.WORKS
    assert any("cannot be written" in f.text for f in findings(done))
    found = look_for_packages([str(site)])
    assert remembered(found, Environment(cache_dir=tmp_path / "file"), DRIVER, [str(site)]) == {}
