"""What pip is told, what it builds, and what it may never pull in."""

from __future__ import annotations

import configparser
import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import attnplat
from ci import check_install

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = check_install.read_pins((ROOT / "ci" / "constraints.txt").read_text())
EXTRAS = {
    name: [Requirement(text) for text in texts]
    for name, texts in PROJECT["optional-dependencies"].items()
}
CORE = [Requirement(text) for text in PROJECT["dependencies"]]
# What `make` installs, and therefore what has to be pinned.
MADE = {"core": CORE, "demo": EXTRAS["demo"], "gguf": EXTRAS["gguf"], "dev": EXTRAS["dev"]}


def test_core_dependencies_are_the_five_and_no_more() -> None:
    names = {requirement.name for requirement in CORE}
    assert names == {"torch", "packaging", "platformdirs", "filelock", "rich"}


def test_the_extras_are_those_that_the_documentation_names() -> None:
    documented = {"triton", "cuda", "rocm", "ipex", "transformers", "gguf", "demo", "dev"}
    assert set(EXTRAS) == documented


def test_no_requirement_is_the_unrelated_distribution_aiter() -> None:
    every = [*CORE, *(requirement for extra in EXTRAS.values() for requirement in extra)]
    names = {canonicalize_name(requirement.name) for requirement in every}
    assert "amd-aiter" in names
    assert "aiter" not in names | set(PINS)


@pytest.mark.parametrize("group", MADE)
def test_everything_that_make_installs_is_pinned_to_a_version_it_asks_for(group: str) -> None:
    for requirement in MADE[group]:
        name = canonicalize_name(requirement.name)
        if name == "attnplat":
            continue
        assert name in PINS, f"{name} has no pin in ci/constraints.txt"
        assert requirement.specifier.contains(PINS[name]), f"{requirement} excludes {PINS[name]}"


def test_the_pins_hold_no_cuda_library() -> None:
    assert check_install.cuda_libraries(PINS) == []


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_every_python_the_classifiers_name_is_allowed(version: str) -> None:
    assert f"Programming Language :: Python :: {version}" in PROJECT["classifiers"]
    assert SpecifierSet(PROJECT["requires-python"]).contains(f"{version}.0")


# Addresses of people's own services and folders of one machine have no place in what everybody
# runs; the prose files may link.
PRIVATE = re.compile(r"https?://|--(extra-)?index-url|--find-links|/root/|/home/\w|/opt/\w")


@pytest.mark.parametrize(
    "path",
    [
        *("pyproject.toml", "Makefile"),
        *(f"ci/{path.name}" for path in sorted((ROOT / "ci").iterdir()) if path.is_file()),
    ],
)
def test_build_files_name_no_host_and_no_folder_of_one_machine(path: str) -> None:
    found = [
        line
        for line in (ROOT / path).read_text(encoding="utf-8").splitlines()
        if PRIVATE.search(line)
    ]
    assert found == []


def test_the_license_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


BUILD = """
import sys
from scikit_build_core import build
build.build_wheel(sys.argv[1])
build.build_sdist(sys.argv[1])
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Wheel and source archive, built by the backend as pip calls it."""
    if importlib.util.find_spec("scikit_build_core") is None:
        pytest.skip("the build backend scikit-build-core is not installed")
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    (sdist,) = folder.glob("*.tar.gz")
    return wheel, sdist


LIBRARIES = (".so", ".dylib", ".dll")


def package_files() -> set[str]:
    """Every source file of the package; the compiled library is made by the build."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "attnplat").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in LIBRARIES
    }


def wheel_metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        name = f"attnplat-{attnplat.__version__}.dist-info/METADATA"
        return Parser().parsestr(archive.read(name).decode())


@pytest.mark.build
def test_the_wheel_is_one_for_every_python_3_and_has_the_library_where_a_compiler_is(
    built: tuple[Path, Path],
) -> None:
    compiler = any(map(shutil.which, ("c++", "g++", "clang++")))
    name = built[0].name
    with zipfile.ZipFile(built[0]) as archive:
        libraries = [n for n in archive.namelist() if n.endswith(LIBRARIES)]
    assert name.startswith(f"attnplat-{attnplat.__version__}-py3-none-")
    assert name.endswith("-any.whl") is not compiler
    assert len(libraries) == (1 if compiler else 0)


@pytest.mark.build
def test_the_wheel_holds_the_whole_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as archive:
        names = set(archive.namelist())
    information = {name for name in names if name.startswith("attnplat-")}
    sources = {name for name in names - information if not name.endswith(LIBRARIES)}
    assert sources == package_files()
    assert "attnplat/py.typed" in names
    folder = f"attnplat-{attnplat.__version__}.dist-info"
    assert f"{folder}/licenses/LICENSE" in information


@pytest.mark.build
def test_the_wheel_installs_the_command(built: tuple[Path, Path]) -> None:
    points = configparser.ConfigParser()
    with zipfile.ZipFile(built[0]) as archive:
        name = f"attnplat-{attnplat.__version__}.dist-info/entry_points.txt"
        points.read_string(archive.read(name).decode())
    assert dict(points["console_scripts"]) == {"attnplat": "attnplat.cli.main:program"}


@pytest.mark.build
def test_the_metadata_say_what_pyproject_says(built: tuple[Path, Path]) -> None:
    metadata = wheel_metadata(built[0])
    assert metadata["Version"] == attnplat.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    core = {
        Requirement(text).name
        for text in metadata.get_all("Requires-Dist")
        if "extra ==" not in text
    }
    assert core == {requirement.name for requirement in CORE}


@pytest.mark.build
def test_the_source_archive_builds_and_tests_but_carries_no_environment(
    built: tuple[Path, Path],
) -> None:
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert package_files() <= names
    assert {"pyproject.toml", "README.md", "LICENSE", "tests/conftest.py"} <= names
    assert not [name for name in names if name.startswith((".venv", ".ci", ".git/", ".whl"))]
