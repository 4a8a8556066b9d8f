"""Where a model's config comes from, and what is said when it cannot be had."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attnplat.errors import AttnplatError, ModelFileError, UnknownNameError
from attnplat.models import known_shapes, load_config

CONFIG = {"model_type": "llama", "num_attention_heads": 4}


def test_a_folder_and_its_file_give_the_same_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert load_config(tmp_path) == load_config(str(tmp_path / "config.json")) == CONFIG


@pytest.mark.parametrize("name", ["llama-3-8b", "Llama-3-8B", " LLAMA_3_8b "])
def test_a_shape_is_known_in_any_case(name: str) -> None:
    assert load_config(name)["num_hidden_layers"] == 32


@pytest.mark.parametrize("name", known_shapes())
def test_a_shape_is_plain_json_and_the_callers_own(name: str) -> None:
    first = load_config(name)
    assert json.loads(json.dumps(first)) == first
    first["model_type"] = "changed"
    for value in first.values():
        if isinstance(value, dict):
            value.clear()
    assert load_config(name) != first


def test_a_file_wins_over_a_shape_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gpt2").write_text(json.dumps(CONFIG))
    assert load_config("gpt2") == CONFIG


@pytest.mark.parametrize(
    ("name", "closest"),
    [("lama-3-8b", "llama-3-8b"), ("gpt-os-120b", "gpt-oss-120b"), ("meta-llama/Llama-3-8B", None)],
)
def test_an_unknown_name_gets_the_closest(name: str, closest: str | None) -> None:
    with pytest.raises(UnknownNameError, match="nothing is downloaded") as caught:
        load_config(name)
    if closest is not None:
        assert caught.value.closest == closest


def test_a_missing_path_is_no_name() -> None:
    for path in (Path("nowhere"), "./nowhere", "/nowhere/at/all", "nowhere/config.json"):
        with pytest.raises(ModelFileError, match="no file or folder"):
            load_config(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not valid JSON: Expecting value at line 1, column 1"),
        (b'{"model_type": "llama",', "not valid JSON.*line 1, column 24"),
        (b"[1, 2]", "holds a JSON list, not an object"),
        (b"null", "holds a JSON NoneType"),
        (b"\xff\xfe\x00", "not text in UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_corrupt_file_is_named_with_what_is_wrong(
    tmp_path: Path, content: bytes, says: str
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=says) as caught:
        load_config(tmp_path)
    assert str(path) in str(caught.value)


def test_a_folder_without_a_config_tells_what_it_holds(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"holds no config.json; it holds nothing"):
        load_config(tmp_path)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelFileError, match=r"it holds model\.gguf"):
        load_config(tmp_path)


@pytest.mark.parametrize("text", ["", "\0", "x" * 5000, "/dev/null/config.json"])
def test_a_path_that_cannot_be_is_a_clear_error(text: str) -> None:
    with pytest.raises(AttnplatError):
        load_config(text)


def test_what_is_no_regular_file_is_not_read() -> None:
    with pytest.raises(ModelFileError, match="not a regular file"):
        load_config("/dev/zero")
