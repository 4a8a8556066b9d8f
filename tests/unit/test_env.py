"""The environment is read once, by declared variables, and never silently ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnplat.config.env import (
    CPU_ISAS,
    ENV_VARS,
    REPLACED_VARS,
    DriverEnvironment,
    Environment,
    read_driver_env,
    read_env,
)
from attnplat.errors import ConfigError

# DESIGN: the variables that exist.
NAMES = {
    "ATTNPLAT_DEVICE",
    "ATTNPLAT_BACKEND",
    "ATTNPLAT_BATCH_INVARIANT",
    "ATTNPLAT_CPU_ISA",
    "ATTNPLAT_AITER",
    "ATTNPLAT_AITER_MHA",
    "ATTNPLAT_AITER_MLA",
    "ATTNPLAT_CACHE_DIR",
    "ATTNPLAT_OFFLINE",
}
BOOLEANS = sorted(NAMES - {"ATTNPLAT_DEVICE", "ATTNPLAT_BACKEND", "ATTNPLAT_CPU_ISA"})
BOOLEANS.remove("ATTNPLAT_CACHE_DIR")


def test_the_declared_variables_are_those_of_the_design_and_each_has_its_field() -> None:
    assert {var.name for var in ENV_VARS} == NAMES
    everything = {
        "ATTNPLAT_DEVICE": "rocm:gfx950",
        "ATTNPLAT_BACKEND": "flash_attn",
        "ATTNPLAT_CPU_ISA": "avx2",
        "ATTNPLAT_CACHE_DIR": "/tmp/x",
        **dict.fromkeys(BOOLEANS, "1"),
    }
    environment = read_env(everything)
    for var in ENV_VARS:
        assert getattr(environment, var.field) is not None, var.name
    assert environment.to_dict() == {
        **everything,
        **dict.fromkeys(BOOLEANS, True),
    }


def test_an_empty_environment_wishes_nothing() -> None:
    assert read_env({}) == Environment()
    assert read_env({}).to_dict() == {}
    assert read_env(dict.fromkeys(NAMES, " ")) == Environment()


@pytest.mark.parametrize("name", BOOLEANS)
@pytest.mark.parametrize(
    ("text", "value"),
    [
        *((t, True) for t in ("1", "true", "YES", "On", " on ")),
        *((t, False) for t in ("0", "False", "no", "OFF")),
    ],
)
def test_switches_take_the_usual_words(name: str, text: str, value: bool) -> None:
    field = name.removeprefix("ATTNPLAT_").lower()
    assert getattr(read_env({name: text}), field) is value


@pytest.mark.parametrize("name", BOOLEANS)
@pytest.mark.parametrize("text", ["maybe", "2", "-1", "tru", "ja"])
def test_other_words_are_refused_by_name_value_and_what_is_taken(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is '{text}'; it takes 1, true"):
        read_env({name: text})


@pytest.mark.parametrize("isa", CPU_ISAS)
def test_every_instruction_set_is_taken_in_any_spelling(isa: str) -> None:
    assert read_env({"ATTNPLAT_CPU_ISA": isa.upper().replace("_", "-")}).cpu_isa == isa


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ATTNPLAT_CPU_ISA is 'sse9'; it takes scalar, avx2"):
        read_env({"ATTNPLAT_CPU_ISA": "sse9"})


def test_the_cache_folder_may_start_at_home() -> None:
    assert read_env({"ATTNPLAT_CACHE_DIR": "~/c"}).cache_dir == Path.home() / "c"
    with pytest.raises(ConfigError, match="ATTNPLAT_CACHE_DIR"):
        read_env({"ATTNPLAT_CACHE_DIR": "~nobody-of-that-name/c"})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("ATTNPLAT_BACKENDS", "did you mean ATTNPLAT_BACKEND?"),
        ("ATTNPLAT_AITER_MHAA", "did you mean ATTNPLAT_AITER_MHA?"),
        ("ATTNPLAT_XYZZYXYZZYXYZZY", "known: ATTNPLAT_AITER, "),
    ],
)
def test_an_unknown_variable_is_noticed_with_the_closest(name: str, hint: str) -> None:
    (notice,) = read_env({name: "1", "PATH": "/bin", "attnplat_device": "x"}).notices
    assert name in notice
    assert hint in notice


@pytest.mark.parametrize("var", REPLACED_VARS, ids=lambda var: var.name)
def test_another_engines_variable_is_noticed_with_what_to_set(var: object) -> None:
    (notice,) = read_env({var.name: "FLASH_ATTN"}).notices  # type: ignore[attr-defined]
    assert var.name in notice  # type: ignore[attr-defined]
    assert var.instead in notice  # type: ignore[attr-defined]


def test_what_a_notice_tells_to_set_exists() -> None:
    from dataclasses import fields

    from attnplat.config.attention import AttentionConfig

    known = NAMES | {f"AttentionConfig.{f.name}" for f in fields(AttentionConfig)}
    for var in REPLACED_VARS:
        for part in var.instead.split(" or "):
            assert part.partition("=")[0] in known, part


def test_what_drivers_are_told_keeps_unset_and_empty_apart() -> None:
    assert read_driver_env({}) == DriverEnvironment()
    told = read_driver_env({"CUDA_VISIBLE_DEVICES": "", "CUDA_PATH": "/c", "PATH": "/bin"})
    assert told == DriverEnvironment(cuda_visible_devices="", cuda_home="/c", path="/bin")
    assert read_driver_env({"CUDA_HOME": "/h", "CUDA_PATH": "/c"}).cuda_home == "/h"


def test_the_processs_own_environment_is_read_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNPLAT_BACKEND", "reference")
    assert read_env().backend == "reference"
    monkeypatch.delenv("ATTNPLAT_BACKEND")
    assert read_env().backend is None


def test_nothing_else_reads_the_environment() -> None:
    package = Path(__file__).parents[2] / "attnplat"
    readers = [
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if any(word in path.read_text() for word in ("os.environ", "getenv"))
    ]
    assert readers == ["config/env.py"]
