"""Models are found, loaded whole, and what is not a model is said to be none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BloomConfig, BloomForCausalLM, FalconConfig, FalconForCausalLM

from attnplat.errors import ModelFileError, OfflineError, UnsupportedCallError
from attnplat.integrations.transformers import PagedModel, register
from attnplat.integrations.transformers.loading import LoadedModel, find_model, load_model


def load(name: Path | str, **options: Any) -> LoadedModel:
    register()
    given = dict(implementation="attnplat", dtype=None, device=torch.device("cpu"), cache=None)
    return load_model(find_model(str(name)), **{**given, **options})  # type: ignore[arg-type]


@pytest.fixture
def copy(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "copy"))


def test_a_folder_is_loaded_in_the_dtype_asked_for(tiny_model: Path) -> None:
    loaded = load(tiny_model)
    assert loaded.name == "tiny-llama" and loaded.model.dtype == torch.float32
    assert not loaded.model.training and loaded.model.config._attn_implementation == "attnplat"
    assert load(tiny_model, dtype=torch.bfloat16).model.dtype == torch.bfloat16


def not_there(folder: Path) -> Path:
    return folder / "nothing"


def no_config(folder: Path) -> Path:
    (folder / "config.json").unlink()
    return folder


def config_is_no_json(folder: Path) -> Path:
    (folder / "config.json").write_text("{")
    return folder


def config_of_an_unknown_kind(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    return folder


def config_of_no_language_model(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "vit"}))
    return folder


def config_that_runs_code(folder: Path) -> Path:
    auto_map = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto_map}))
    (folder / "own.py").write_text("raise SystemExit('was run')")
    return folder


def no_weights(folder: Path) -> Path:
    (folder / "model.safetensors").unlink()
    return folder


def cut_weights(folder: Path) -> Path:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    return folder


def weights_that_are_none(folder: Path) -> Path:
    (folder / "model.safetensors").write_text("not weights")
    return folder


def one_weight_missing(folder: Path) -> Path:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def weight_of_another_shape(folder: Path) -> Path:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.zeros(3)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def no_tokenizer(folder: Path) -> Path:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    return folder


def not_gguf(folder: Path) -> Path:
    (folder / "model.gguf").write_bytes(b"PK\3\4 something else")
    return folder / "model.gguf"


def broken_gguf(folder: Path) -> Path:
    (folder / "model.gguf").write_bytes(b"GGUF\3\0\0\0" + bytes(range(200)))
    return folder / "model.gguf"


def several_gguf(folder: Path) -> Path:
    (folder / "config.json").unlink()
    for name in ("a.gguf", "b.gguf"):
        (folder / name).write_bytes(b"GGUF")
    return folder


HARM = {
    not_there: "no such file or folder",
    no_config: "no model: it takes a folder with a config.json",
    config_is_no_json: "cannot be loaded",
    config_of_an_unknown_kind: "no_such_model",
    config_of_no_language_model: "cannot be loaded: ValueError: Unrecognized configuration class",
    config_that_runs_code: "cannot be loaded",
    no_weights: "cannot be loaded",
    cut_weights: "cannot be loaded",
    weights_that_are_none: "cannot be loaded",
    one_weight_missing: "lacks 1 weights of the model: model.layers.1.mlp.up_proj.weight",
    weight_of_another_shape: "model.norm.weight",
    no_tokenizer: "cannot be loaded",
    not_gguf: "no GGUF file",
    broken_gguf: "cannot be loaded",
    several_gguf: "several GGUF files; name one of them: a.gguf, b.gguf",
}


@pytest.mark.parametrize("harm", HARM, ids=lambda harm: harm.__name__)
def test_a_harmed_model_is_one_clear_error(harm: Any, copy: Path) -> None:
    place = harm(copy)
    with pytest.raises(ModelFileError) as error:
        load(place)
    message = str(error.value)
    assert HARM[harm] in message and "\n" not in message
    assert str(place) in message or place.stem in message


@pytest.mark.parametrize("name", ["no/such/place", "../nothing", "~/nothing", "missing.gguf"])
def test_what_is_no_path_and_no_hub_name_is_not_looked_for(name: str) -> None:
    with pytest.raises(ModelFileError, match="no such file or folder"):
        find_model(name)


def test_offline_the_hub_is_not_asked() -> None:
    with pytest.raises(OfflineError, match=r"'some/model' .* ATTNPLAT_OFFLINE is set; name a fold"):
        load("some/model", offline=True)


def test_a_family_that_cannot_be_built_with_it_is_one_clear_error(
    tiny_model: Path, tmp_path: Path
) -> None:
    sizes = dict(vocab_size=259, hidden_size=64, num_hidden_layers=1, num_attention_heads=2)
    folder = Path(shutil.copytree(tiny_model, tmp_path / "falcon"))
    FalconForCausalLM(FalconConfig(**sizes)).save_pretrained(folder)
    with pytest.raises(UnsupportedCallError, match="a table of its own"):
        load(folder)


def test_a_family_that_goes_its_own_way_is_loaded_and_does_not_run_paged(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "bloom"))
    config = BloomConfig(vocab_size=259, hidden_size=64, n_layer=1, n_head=2)
    BloomForCausalLM(config).save_pretrained(folder)
    with pytest.raises(UnsupportedCallError, match=r"BloomForCausalLM .*0 of 1 attention layers"):
        PagedModel(load(folder).model)
