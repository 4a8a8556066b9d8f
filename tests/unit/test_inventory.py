"""An inventory tells what is installed by metadata, and what a profile would have."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from attnplat.config.env import DriverEnvironment, Environment
from attnplat.errors import UnknownNameError
from attnplat.platforms.cpu import detect as cpu
from attnplat.platforms.cuda import detect as cuda
from attnplat.platforms.distributions import (
    DISTRIBUTIONS,
    installed_versions,
    normalise,
)
from attnplat.platforms.inventory import FEATURES, SWITCHES, Inventory, find_libraries, find_tools
from attnplat.platforms.profiles import PROFILES, named_inventory

NOWHERE = DriverEnvironment(cuda_home="/nowhere", path="")


def install(folder: Path, entry: str, metadata_file: str | None = "METADATA") -> Path:
    """What an installer leaves of a package, without the package."""
    (folder / entry).mkdir(parents=True)
    if metadata_file:
        (folder / entry / metadata_file).write_text("Metadata-Version: 2.1\nVersion: 9.9\n\nhi\n")
    return folder


@pytest.mark.parametrize(
    ("entry", "file", "name", "version"),
    [
        ("torch-2.13.0+cpu.dist-info", "METADATA", "torch", "2.13.0+cpu"),
        ("flash_attn-2.8.3.post2.dist-info", "METADATA", "flash-attn", "2.8.3.post2"),
        ("amd_aiter-0.1.7.post2.dev18.dist-info", "METADATA", "amd-aiter", "0.1.7.post2.dev18"),
        ("Flash.Attn-2.8-py3.11.egg-info", "PKG-INFO", "flash-attn", "2.8"),
        ("zentorch.egg-info", "PKG-INFO", "zentorch", "9.9"),
    ],
)
def test_versions_are_read_from_what_installers_leave(
    tmp_path: Path, entry: str, file: str, name: str, version: str
) -> None:
    found = installed_versions([name], [str(install(tmp_path, entry, file))])
    assert found == ({name: version}, (), {name: str(tmp_path / entry)})


def test_the_first_folder_on_the_path_wins_as_for_imports(tmp_path: Path) -> None:
    first = install(tmp_path / "a", "triton-3.6.0.dist-info")
    second = install(tmp_path / "b", "triton-3.9.0.dist-info")
    paths = [str(tmp_path / "missing"), str(first), str(second)]
    assert installed_versions(["triton"], paths).versions == {"triton": "3.6.0"}


def test_damaged_metadata_is_told_and_not_counted(tmp_path: Path) -> None:
    folder = install(tmp_path, "triton-3.6.0.dist-info", None)
    found = installed_versions(["triton"], [str(folder)])
    assert found.versions == {}
    assert "triton" in found.notes[0]


def test_an_empty_folder_is_no_package_and_the_other_aiter_is_not_amds(tmp_path: Path) -> None:
    (tmp_path / "aiter").mkdir()
    bare = Inventory.installed(Environment(), driver=NOWHERE, paths=[str(tmp_path)])
    assert bare.packages == {}
    assert bare.notes == ()
    install(tmp_path, "aiter-0.13.20191203.dist-info")
    other = Inventory.installed(Environment(), driver=NOWHERE, paths=[str(tmp_path)])
    assert other.packages == {}
    assert not other.usable("aiter")
    assert "amd-aiter" in other.notes[0]


def test_the_answers_are_those_of_the_standard_library() -> None:
    names = [d.name for d in DISTRIBUTIONS] + ["pytest", "packaging", "platformdirs"]
    found = installed_versions(names, sys.path).versions
    assert "pytest" in found
    for name in names:
        try:
            expected: str | None = metadata.version(name)
        except metadata.PackageNotFoundError:
            expected = None
        assert found.get(name) == expected, name


def test_reading_the_inventory_imports_none_of_the_packages() -> None:
    code = (
        "import sys\n"
        "from attnplat.platforms.inventory import Inventory\n"
        "Inventory.installed()\n"
        "heavy = {'torch', 'triton', 'transformers', 'rich', 'importlib.metadata'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("packages", "tools", "usable", "not_usable"),
    [
        ({}, {}, set(), {"fa2", "fa3", "fa4", "flashinfer", "aiter", "flashmla", "torch_cuda"}),
        ({"flash-attn": "2.8.3"}, {}, {"fa2"}, {"fa3", "fa4"}),
        ({"fa3-fwd": "0.0.3"}, {}, {"fa3"}, {"fa2"}),
        ({"flash-attn-3": "3.0.0"}, {}, {"fa3"}, {"fa2"}),
        ({"flash-attn-4": "4.0.0b36"}, {}, {"fa4"}, {"fa2", "fa3"}),
        ({"flashinfer-python": "0.7.2"}, {}, set(), {"flashinfer", "flashinfer_cubin"}),
        ({"flashinfer-python": "0.7.2"}, {"nvcc": "/n"}, {"nvcc"}, {"flashinfer", "ninja"}),
        (
            {"flashinfer-python": "0.7.2"},
            {"nvcc": "/n", "ninja": "/j"},
            {"flashinfer", "flashinfer_sparse_sm90", "flashinfer_sparse_sm120"},
            {"flashinfer_cubin"},
        ),
        (
            {"flashinfer-python": "0.6.14", "flashinfer-cubin": "0.6.14"},
            {},
            {"flashinfer", "flashinfer_cubin", "flashinfer_sparse_sm120"},
            {"flashinfer_sparse_sm90"},
        ),
        (
            {"flashinfer-python": "0.6.13", "flashinfer-cubin": "0.6.13"},
            {},
            {"flashinfer"},
            {"flashinfer_sparse_sm120"},
        ),
        ({"flashinfer-cubin": "0.6.13"}, {}, set(), {"flashinfer", "flashinfer_cubin"}),
        ({"sgl-deep-gemm": "0.2.5"}, {}, {"deep_gemm"}, {"flashmla"}),
        ({"torch": "2.13.0+cpu"}, {}, set(), {"torch_cuda", "torch_rocm"}),
        ({"torch": "2.13.0+cu130"}, {}, {"torch_cuda"}, {"torch_rocm"}),
        ({"torch": "2.13.0+rocm7.1"}, {}, {"torch_rocm"}, {"torch_cuda"}),
        ({"amd-aiter": "0.1.7"}, {}, {"aiter"}, {"aiter_mla_non_causal"}),
    ],
)
def test_features_follow_from_packages_and_tools(
    packages: dict[str, str], tools: dict[str, str], usable: set[str], not_usable: set[str]
) -> None:
    inventory = Inventory.assume(packages, tools=tools)
    assert {name for name in usable if not inventory.usable(name)} == set()
    assert {name for name in not_usable if inventory.usable(name)} == set()


def test_every_feature_says_what_established_it_and_every_switch_who_set_it() -> None:
    inventory = Inventory.installed(Environment(aiter=True, aiter_mla=False))
    assert set(inventory.features) == set(FEATURES)
    assert all(found.how for found in inventory.features.values())
    assert set(inventory.switches) == set(SWITCHES)
    assert inventory.switches["aiter"] == (True, "environment")
    assert inventory.switches["aiter_mla"] == (False, "environment")
    assert inventory.switches["aiter_mha"] == (True, "default")
    assert not Inventory.installed(Environment()).on("aiter")


@pytest.mark.parametrize("name", ["fa5", "aiter_", ""])
def test_names_nobody_declares_are_refused(name: str) -> None:
    inventory = Inventory.assume()
    with pytest.raises(UnknownNameError, match="inventory feature"):
        inventory.usable(name)
    with pytest.raises(UnknownNameError, match="inventory switch"):
        inventory.on(name)
    with pytest.raises(UnknownNameError):
        Inventory.assume(features={name: True})
    with pytest.raises(UnknownNameError):
        Inventory.assume(switches={name: True})


def test_an_inventory_is_a_value_that_cannot_be_changed() -> None:
    one = Inventory.assume({"triton": "3.9.0", "torch": "2.13.0"})
    other = Inventory.assume({"torch": "2.13.0", "triton": "3.9.0"})
    assert one == other
    assert hash(one) == hash(other)
    assert one != Inventory.assume({"torch": "2.13.0"})
    assert one != Inventory.assume({"triton": "3.9.0", "torch": "2.13.0"}, {"fa2": True})
    with pytest.raises(TypeError):
        one.packages["torch"] = "1"  # type: ignore[index]


def test_compilers_are_looked_for_where_the_environment_says(tmp_path: Path) -> None:
    for folder, tool in (("cuda/bin", "nvcc"), ("bin", "ninja"), ("other", "nvcc")):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / tool).write_text("#!/bin/sh\n")
        (tmp_path / folder / tool).chmod(0o755)
    driver = DriverEnvironment(
        cuda_home=str(tmp_path / "cuda"), path=f"{tmp_path / 'other'}:{tmp_path / 'bin'}"
    )
    assert find_tools(driver) == {
        "nvcc": str(tmp_path / "cuda/bin/nvcc"),
        "ninja": str(tmp_path / "bin/ninja"),
    }
    (tmp_path / "bin/ninja").chmod(0o644)
    elsewhere = driver._replace(cuda_home=str(tmp_path))
    assert find_tools(elsewhere) == {"nvcc": str(tmp_path / "other/nvcc")}
    assert find_tools(NOWHERE) == {}


def test_the_compiled_library_is_looked_for_in_every_folder_of_the_package(tmp_path: Path) -> None:
    sources, built = tmp_path / "sources", tmp_path / "built"
    library = built / "platforms/cpu/kernels/libattnplat_cpu.so"
    library.parent.mkdir(parents=True)
    assert find_libraries([str(sources), str(built)]) == {}
    library.write_bytes(b"")
    found = find_libraries([str(sources), str(built)])
    assert found == {"libattnplat_cpu.so": str(library)}


@pytest.mark.parametrize(
    ("platform", "profile", "usable", "not_usable"),
    [
        ("cuda", "full", {"fa2", "fa3", "fa4", "flashinfer_cubin", "flashmla"}, set()),
        ("cuda", "all", {"flashinfer_cubin", "cutlass_mla", "deep_gemm"}, set()),
        ("cuda", "full_no_trtllm", {"flashinfer", "fa3"}, {"flashinfer_cubin"}),
        ("cuda", "bundled", {"fa2", "fa3", "fa4", "flashmla", "cutlass_mla"}, {"flashinfer"}),
        ("cuda", "minimal", {"torch_cuda"}, {"fa2", "fa3", "fa4", "flashmla", "cutlass_mla"}),
        ("rocm", "full", {"aiter", "torch_rocm"}, {"torch_cuda"}),
        ("rocm", "minimal", set(), {"aiter"}),
        ("cpu", "zen", set(), {"torch_cuda"}),
        ("cpu", "minimal", set(), {"torch_cuda"}),
        ("elsewhere", "all", set(), {"fa2", "aiter"}),
    ],
)
def test_profiles_have_what_their_name_says(
    platform: str, profile: str, usable: set[str], not_usable: set[str]
) -> None:
    inventory = named_inventory(platform, profile)
    assert {name for name in usable if not inventory.usable(name)} == set()
    assert {name for name in not_usable if inventory.usable(name)} == set()
    assert inventory.profile is not None


def test_the_rocm_profiles_differ_in_the_switch() -> None:
    full, default = named_inventory("rocm", "full"), named_inventory("rocm", "default")
    assert full.packages == default.packages
    assert (full.on("aiter"), default.on("aiter")) == (True, False)


def test_assumed_packages_are_known_distributions() -> None:
    known = {d.name for d in DISTRIBUTIONS}
    for profiles in PROFILES.values():
        for inventory in profiles.values():
            assert set(inventory.packages) <= known
    assert all(normalise(d.name) == d.name for d in DISTRIBUTIONS)


def test_assumed_answers_for_a_device_and_refuses_unknown_profiles() -> None:
    assert Inventory.assumed("all", cuda.simulate("sm90")).profile == "full"
    assert Inventory.assumed("installed", cuda.simulate("sm90")).profile is None
    with pytest.raises(UnknownNameError, match=r"package profile of cpu.*known: all, full"):
        Inventory.assumed("bundled", cpu.simulate("amx"))
